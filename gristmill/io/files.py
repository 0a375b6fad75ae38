"""The state folder of a stage, its files of malformed records, and marks of what it has not finished.

A stage that writes a folder of files, such as NORM/, marks it before it writes the first file and removes the
mark after the last; no stage reads a folder that is marked. A mark is a file `.gristmill/STAGE.unfinished` in the
folder; it holds the reason. A stage that writes single files, such as FILTERED.pickle, marks these alone, by a file
`.gristmill/STAGE.unfinished-files` beside them, which holds the reason and their names, separated by NUL.
"""

import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from gristmill.errors import InputError, UsageError
from gristmill.storage.files import (
    is_file,
    list_names,
    read_files,
    remove_files,
    write_file,
)
from gristmill.storage.local import remove_partial_files
from gristmill.storage.names import absolute
from gristmill.storage.objects import list_objects
from gristmill.storage.walking import is_link_to_parent
from gristmill.urls import folders_above, is_remote

STATE_DIR = ".gristmill"  # folder in a stage's output folder, for its ledger and intermediate files
REJECTS_SUFFIX = ".malformed"
PART = "+"  # in the name of a run: before the part of the work of a stage that it does
_MARK_SUFFIX = ".unfinished"
_FILES_MARK_SUFFIX = ".unfinished-files"
INTERRUPTED = "was interrupted, or is still at work"
RUN_FILE = "run.json"  # in the folder of a whole run: its configuration


class StateFolders:
    """Which folders of buckets may have a state folder, where each costs a request to ask.

    In OUT/normalized, which a stage of a whole run wrote, and in the folders directly in it, there may be one. Further
    below there is none: a corpus may have as many folders as files. Stages refuse to make one there.
    """

    def __init__(self) -> None:
        self._is_of_run: dict[Path, bool] = {}

    def may_be_in(self, folder: Path) -> bool:
        """Whether a folder may have one; every folder on a disk may."""
        return self._stage_above(folder) is None

    def reject_deep_outputs(self, folders: Iterable[Path]) -> None:
        """Raise UsageError if a stage is to write into a folder that can have none."""
        for folder in folders:
            if top := self._stage_above(folder):
                raise UsageError(
                    f"{folder} is deep in {top}, which `gristmill run` wrote: give a folder directly in {top}, or one "
                    f"that is not in {top.parent}"
                )

    def _stage_above(self, folder: Path) -> Path | None:
        """The folder of a stage of a whole run that is two levels above an object's `folder`, or more."""
        above = folders_above(folder)[1:-1] if is_remote(folder) else []
        known = next(filter(self._is_of_run.get, above), None)  # needs no request
        return known or next(filter(self._is_stage_of_run, above), None)

    def _is_stage_of_run(self, folder: Path) -> bool:
        if folder not in self._is_of_run:
            self._is_of_run[folder] = is_file(folder.parent / RUN_FILE) and bool(list_names(folder / STATE_DIR))
        return self._is_of_run[folder]


def stage_in(name: str) -> str:
    """The stage in the name of a run, which may name its output and a part of its work, too: STAGE-OUTPUT+PART."""
    return re.split(r"[-+]", name, maxsplit=1)[0]


def rejects_path(output: Path) -> Path:
    """Path of the file for malformed records found while writing `output`."""
    return output.with_name(output.name + REJECTS_SUFFIX)


def rejects_name(output: str) -> str:
    """The same of a name, which takes a tenth of the time."""
    return output + REJECTS_SUFFIX


def mark_unfinished(folder: Path, stage: str, reason: str = INTERRUPTED) -> None:
    """Mark the output of a stage in `folder` as unfinished."""
    write_file(_mark_path(folder, stage), reason.encode())


def mark_finished(folder: Path, stage: str) -> None:
    """Remove the stage's mark from `folder`, if there is one."""
    remove_files([mark := _mark_path(folder, stage)])
    remove_partial_files([mark])  # of a run that was killed just as it wrote its mark


def clear_marks(folder: Path, stage: str) -> None:
    """Remove the marks of all runs of a stage, of the whole or of parts of its work, from `folder`."""
    marks, own = _marks_in(folder, _MARK_SUFFIX), _mark_path(folder, stage)
    remove_files(mark for mark in marks if mark == own or mark.name.startswith(f"{stage}{PART}"))
    remove_partial_files([own])


def is_unfinished(folder: Path, stage: str) -> bool:
    """Whether `folder` has the stage's mark."""
    return is_file(_mark_path(folder, stage))


def reject_unfinished(folder: Path) -> None:
    """Raise InputError if a stage has not finished writing `folder`, a parent of it, or a folder below it."""
    if is_remote(folder):
        state = f"{STATE_DIR}/"
        below = {name.rpartition(state)[0] for name, _ in list_objects(folder) if state in name}
        reject_marked(folder, [folder / name for name in sorted(below)])
        return
    for root in absolute(folder).parents:
        _reject_marks(folder, root)
    for directory, folders, _ in os.walk(folder, followlinks=True):
        if STATE_DIR in folders:
            _reject_marks(folder, Path(directory))
        folders[:] = [name for name in folders if name[0] != "." and not is_link_to_parent(Path(directory, name))]


def reject_marked(folder: Path, below: Iterable[Path]) -> None:
    """Raise InputError if a stage has not finished writing a folder in a bucket, a parent of it, or one `below`."""
    for root in filter(StateFolders().may_be_in, dict.fromkeys((*folders_above(folder), folder, *below))):
        _reject_marks(folder, root)


def mark_files_unfinished(files: Sequence[Path], stage: str, reason: str = INTERRUPTED) -> None:
    """Mark single files of one folder, which a stage is about to write, as unfinished."""
    names = "\0".join([reason, *(path.name for path in files)])
    write_file(_files_mark(files[0].parent, stage), os.fsencode(names))


def are_marked(files: Sequence[Path], stage: str) -> bool:
    """Whether the stage has marked these files."""
    return is_file(_files_mark(files[0].parent, stage))


def mark_files_finished(files: Sequence[Path], stage: str) -> None:
    """Remove the stage's mark of these files, if there is one; and those of runs of parts of its work."""
    remove_files([own := _files_mark(files[0].parent, stage)])
    remove_partial_files([own])
    for mark, _, names in _iter_file_marks(files[0].parent):
        if mark.name.startswith(f"{stage}{PART}") and {path.name for path in files}.issuperset(names):
            remove_files([mark])


def unfinished_files(folder: Path, own: str = "") -> dict[str, tuple[Path, str]]:
    """The mark of each file in `folder` that a stage, other than the run `own`, has marked, and its reason, by name."""
    marks = [found for found in _iter_file_marks(folder) if found[0].name != own + _FILES_MARK_SUFFIX]
    return {name: (mark, reason) for mark, reason, names in marks for name in names}


def reject_unfinished_files(paths: Iterable[Path | str], own: str = "", written: Collection[Path] = ()) -> None:
    """Raise InputError if a stage has not finished writing one of the files `paths`, or a folder that holds one.

    Unless it is the run `own`, which writes the folders `written`: parts of its work may have marks there.
    """
    marks: dict[str, dict[str, tuple[Path, str]]] = {}
    passed, ours, states = set[Path](), set(map(absolute, written)), StateFolders()
    for path in map(str, paths):
        folder, name = os.path.split(path)
        if folder not in marks:
            for root in filter(states.may_be_in, set(folders_above(absolute(Path(path)))) - passed):
                _reject_marks(Path(path), root, ours)
                passed.add(root)
            marks[folder] = unfinished_files(Path(folder), own) if states.may_be_in(Path(folder)) else {}
        if name in marks[folder]:
            mark, reason = marks[folder][name]
            stage = mark.name.removesuffix(_FILES_MARK_SUFFIX)
            raise InputError(
                f"{path} is not up to date: {stage}, which writes it, {reason}. Run {stage_in(stage)} "
                f"again to its end, with the same options. (If it is right in spite of that, remove {mark}.)"
            )


def _reject_marks(folder: Path, root: Path, ours: Collection[Path] = ()) -> None:
    for mark in _marks_in(root, _MARK_SUFFIX) if root not in ours else ():
        stage = mark.name.removesuffix(_MARK_SUFFIX)
        reason = next(read_files([mark]), b"").decode(errors="replace") or INTERRUPTED
        raise InputError(
            f"{folder} is not complete: {stage}, which writes {root}, {reason}. Run {stage_in(stage)} again to "
            f"its end, with the same options. (If {root} is complete in spite of that, remove {mark}.)"
        )


def _marks_in(folder: Path, suffix: str) -> list[Path]:
    names = list_names(folder / STATE_DIR)
    return sorted(folder / STATE_DIR / name for name in names if name.endswith(suffix))


def _mark_path(folder: Path, stage: str) -> Path:
    return folder / STATE_DIR / f"{stage}{_MARK_SUFFIX}"


def _iter_file_marks(folder: Path) -> Iterator[tuple[Path, str, list[str]]]:
    """Each mark of single files in `folder`, its reason, and the names of the files."""
    for mark in _marks_in(folder, _FILES_MARK_SUFFIX):
        for content in read_files([mark]):  # none if the stage has just ended
            reason, *names = os.fsdecode(content).split("\0")
            yield mark, reason, names


def _files_mark(folder: Path, stage: str) -> Path:
    return folder / STATE_DIR / f"{stage}{_FILES_MARK_SUFFIX}"
