"""The state folder of a stage, its files of malformed records, and marks of what it has not finished.

A stage that writes a folder of files, such as NORM/, marks it before it writes the first file and removes the
mark after the last; no stage reads a folder that is marked. One that writes single files, such as FILTERED.pickle,
marks these alone. A mark is a file `.gristmill/RUN.unfinished` in the folder; it holds the reason and the names of
such files, separated by NUL.
"""

import os
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from gristmill.errors import InputError, UsageError
from gristmill.paths import absolute, folders_above, scheme_of
from gristmill.storage.files import (
    Found,
    folders_with,
    is_file,
    is_folder,
    list_names,
    listed_once,
    read_files,
    refresh,
    remove_files,
    remove_partial_files,
    walk_all,
    write_file,
)

STATE_DIR = ".gristmill"  # folder in a stage's output folder, for its ledger and intermediate files
REJECTS_SUFFIX = ".malformed"
PART = "+"  # in the name of a run: before the part of the work of a stage that it does
_MARK_SUFFIX = ".unfinished"
INTERRUPTED = "was interrupted, or is still at work"
RUN_FILE = "run.json"  # in the folder of a whole run: its configuration


def stage_in(name: str) -> str:
    """The stage in the name of a run, which may name its output and a part of its work, too: STAGE-OUTPUT+PART."""
    return re.split(r"[-+]", name, maxsplit=1)[0]


def rejects_path(output: Path) -> Path:
    """Return the path of the file for malformed records found while writing `output`."""
    return output.with_name(output.name + REJECTS_SUFFIX)


def rejects_name(output: str) -> str:
    """Return the name of the file for malformed records; ten times as fast as rejects_path."""
    return output + REJECTS_SUFFIX


class Mark(NamedTuple):
    """A mark of unfinished work, and why: these `files` of the folder with the mark, or, without any, all of it."""

    path: Path
    reason: str
    files: tuple[str, ...]

    @property
    def run(self) -> str:
        """Return the name of the run."""
        return self.path.name.removesuffix(_MARK_SUFFIX)


def mark_unfinished(folder: Path, run: str, files: Iterable[Path] = (), reason: str = INTERRUPTED) -> None:
    """Mark the output of a run in `folder` as unfinished: single files of it, or all."""
    write_file(_mark_path(folder, run), os.fsencode("\0".join([reason, *(path.name for path in files)])))


def mark_finished(folder: Path, run: str) -> None:
    """Remove the run's mark from `folder`, if there is one."""
    remove_files([mark := _mark_path(folder, run)])
    remove_partial_files([mark])  # of a run that was killed just as it wrote its mark


def is_unfinished(folder: Path, run: str) -> bool:
    """Return whether `folder` has the run's mark."""
    return is_file(_mark_path(folder, run))


def marks_in(folder: Path) -> Iterator[Mark]:
    """Yield the marks in a folder."""
    for name in sorted(list_names(folder / STATE_DIR)):
        if name.endswith(_MARK_SUFFIX):
            path = folder / STATE_DIR / name
            for content in read_files([path]):  # none if the stage has just ended
                reason, *files = os.fsdecode(content).split("\0")
                yield Mark(path, reason or INTERRUPTED, tuple(files))


def list_finished(folder: Path, what: str = "a folder") -> list[Found]:
    """Return every file below a folder, read or not, except in state folders; in a bucket from a single listing.

    UsageError if there is no such folder, `what` was expected; InputError if a stage has not finished writing it.
    """
    refresh(folder)
    with listed_once(folder):
        if not is_folder(folder):
            if is_file(folder):
                raise UsageError(f"{folder}: expected {what}, got a file. Check the path")
            of_hub = ""
            if len(folder.parts) == 2 and not scheme_of(folder):
                of_hub = f"; a data set of the Hub is hf://datasets/{folder}"
            raise UsageError(f"{folder}: expected {what}, but there is none of that name. Check the path{of_hub}")
        reject_unfinished(folder)
        return list(walk_all(folder, STATE_DIR))


def reject_unfinished(folder: Path) -> None:
    """Raise InputError if a stage has not finished writing `folder`, a parent of it, or a folder below it."""
    for root in (*folders_above(absolute(folder)), *folders_with(folder, STATE_DIR)):
        _reject_marks(folder, root, marks_in(root))


def reject_unfinished_files(paths: Iterable[Path | str], own: str = "", written: Collection[Path] = ()) -> None:
    """Raise InputError if a stage has not finished writing one of the files `paths`, or a folder that holds one.

    Unless it is the run `own`, which writes the folders `written`: parts of its work may have marks there.
    """
    marks = dict[Path, list[Mark]]()
    ours = set(map(absolute, written))
    for path in map(Path, paths):
        folders = folders_above(absolute(path))
        if folders[0] not in marks:
            for root in folders:
                if root not in marks:
                    marks[root] = list(marks_in(root))
                    if root not in ours:
                        _reject_marks(path, root, marks[root])
        for mark in marks[folders[0]]:
            if path.name in mark.files and mark.run != own:
                raise InputError(
                    f"{path} is not up to date: {mark.run}, which writes it, {mark.reason}. Run {stage_in(mark.run)} "
                    f"again to its end, with the same options. (If it is right in spite of that, remove {mark.path}.)"
                )


def _reject_marks(folder: Path, root: Path, marks: Iterable[Mark]) -> None:
    """Raise InputError if one of the marks in `root` is of all of it."""
    for mark in marks:
        if not mark.files:
            raise InputError(
                f"{folder} is not complete: {mark.run}, which writes {root}, {mark.reason}. Run {stage_in(mark.run)} "
                f"again to its end, with the same options. (If {root} is complete in spite of that, remove "
                f"{mark.path}.)"
            )


def _mark_path(folder: Path, run: str) -> Path:
    return folder / STATE_DIR / f"{run}{_MARK_SUFFIX}"
