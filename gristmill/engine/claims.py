"""Claims: which files of a folder belong to a run of a stage, to other runs, or to nobody; nothing is lost silently."""

import time
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from gristmill.counts import Counts
from gristmill.engine.ledger import READS, DoneRecord, Ledger, OutputRecord, TaskId
from gristmill.engine.task import Task, paths_read_by
from gristmill.errors import OutputError, TakenOver, UsageError
from gristmill.io.files import (
    INTERRUPTED,
    STATE_DIR,
    are_marked,
    clear_marks,
    is_unfinished,
    mark_files_finished,
    mark_files_unfinished,
    mark_finished,
    mark_unfinished,
    rejects_name,
    rejects_path,
)
from gristmill.storage.files import FileInfo, exists, file_info, is_file, is_folder
from gristmill.storage.names import absolute, name_of
from gristmill.storage.walking import walk
from gristmill.urls import folders_above

Records = dict[TaskId, DoneRecord]


@dataclass(frozen=True)
class Claims:
    """What a run of a stage reads and plans; see the arguments of open_stage."""

    selection: str
    plans: str | None
    reads: tuple[Path, ...]
    files: tuple[Path, ...] = ()
    _inputs: set[str] = field(default_factory=set)  # of all steps so far, without the outputs of earlier ones

    def check_outputs(self, tasks: Iterable[Task], written: Container[str]) -> None:
        """Raise UsageError if a task would overwrite an input of the stage; `written` are outputs of earlier steps."""
        tasks = list(tasks)
        self._inputs.update(name for name in map(name_of, paths_read_by(tasks)) if name not in written)
        for path in (path for task in tasks for path in task.outputs):
            if name_of(path) in self._inputs:
                raise UsageError(f"{path} is an input, and would be overwritten: give another output folder")

    def claim_outputs(
        self,
        ledger: Ledger,
        step: str,
        outputs: Sequence[Path],
        before: Records,
        known: Container[str],
        is_there: Callable[[str], object],
    ) -> TaskId:
        """Record, before a step writes `outputs`, that they are this stage's; return the id of that record.

        What runs `before` claimed that did not end stays claimed: this one may not end either, and some of these files
        may be of inputs that are gone. Raises OutputError as `reject_foreign_files`.
        """
        files = [file for name in map(name_of, outputs) for file in (name, rejects_name(name))]
        self.reject_foreign_files(ledger, files, known, is_there)
        task = "", f"{self._claims}{step}"
        names = dict.fromkeys([*map(ledger.relative, files), *(it.path for it in _outputs_of(before.get(task)))])
        record = DoneRecord(*task, {}, [OutputRecord(name, -1, 0, "") for name in names], Counts({}, []))
        ledger.write(record)
        return record.id

    def reject_foreign_files(
        self, ledger: Ledger, names: Iterable[str], known: Container[str], is_there: Callable[[str], object]
    ) -> None:
        """Raise OutputError if one of some files `is_there` and is not `known`, as somebody's file would be lost.

        All are named as by name_of. What is in a state folder is nobody else's.
        """
        found = (name for name in names if name not in known and f"/{STATE_DIR}/" not in name and is_there(name))
        unknown = set(map(Path, found))
        if unknown and not ledger.is_damaged:
            unknown -= set(map(Path, ledger.outputs()))  # maybe by another process since `known` was read
            unknown -= ledger.announced({folder for file in unknown for folder in folders_above(file)})
        for path in [] if ledger.is_damaged else sorted(unknown):
            raise OutputError(
                f"{path} exists, and {ledger.file.stem} did not write it: it would be overwritten. Give another "
                "output, or remove it"
            )

    def check_reads(self, ledger: Ledger, before: Records, is_same: bool) -> None:
        """Raise UsageError if another input folder was read for the present output.

        `is_same`: whether a task of before is done now, so that a folder that is gone can only have moved.
        A part of the work ("book") may read a folder in that of the whole ("").
        """
        if self._lacks_files or not any(record.outputs for (step, _), record in before.items() if step):
            return  # nothing would be lost
        own = self._part
        for record in (record for (step, name), record in before.items() if not step and name.startswith(READS)):
            part = record.task.removeprefix(READS)
            if part in (own, "") or not own:
                for name, now in zip(record.identity.values(), self.reads, strict=False):
                    earlier = [Path(it) for it in name.split("\0")]
                    has_moved = is_same and not _is_there(earlier[1])
                    if not has_moved and not _is_same(earlier, _names_of(ledger, now), is_inside=part != own):
                        raise UsageError(self._refusal(ledger, earlier[1], now))

    def record_reads(self, ledger: Ledger, known: Records, is_changed: bool) -> Records:
        """Record the names of the input folders for check_reads.

        Unless those `known` are there still, and no output `is_changed`: then the present folders are copies of them.
        """
        names = (map(str, _names_of(ledger, path)) for path in self.reads)
        folders = {f"input {i}": "\0".join(each) for i, each in enumerate(names)}
        record = DoneRecord(*self._reads_id, folders, [], Counts({}, []))
        earlier = known[record.id].identity if record.id in known else {}
        is_there = all(_is_there(Path(name.split("\0")[1])) for name in earlier.values())
        if earlier == folders or (earlier and is_there and not is_changed and not self._lacks_files):
            return {}
        ledger.write(record)
        return {record.id: record}

    def known_reads(self, before: Records) -> Records:
        """The record of the input folders by an earlier run, which may have been killed before it was compacted."""
        return {task: record for task, record in before.items() if task == self._reads_id}

    def stale(self, before: Records, done: Records) -> list[TaskId]:
        """Tasks of earlier runs that this run should have planned, and did not: their inputs are gone."""
        plans = self.plans
        if plans is None:
            return []
        return [task for task in before if task not in done and task[0] and task[1].startswith(plans)]

    def stale_files(self, ledger: Ledger, stale: Sequence[TaskId], before: Records, done: Records) -> list[Path]:
        """Files that only stale tasks, earlier versions of the tasks done, or runs that did not end wrote."""
        kept = {task: record for task, record in before.items() if task[0] and task not in stale} | done
        current = {ledger.path(output) for record in kept.values() for output in record.outputs}
        earlier = {ledger.path(output) for task in (*stale, *done) if task in before for output in before[task].outputs}
        if self.plans is None:  # a task may have covered more files than this run plans
            earlier &= {rejects_path(path) for path in current}
        left = {ledger.path(output) for task in self.old_claims(before) for output in before[task].outputs}
        return sorted(path for path in (earlier | left) - current if is_file(path))

    def old_claims(self, before: Records) -> list[TaskId]:
        """Claims of earlier runs of this part of the work, which were killed or failed."""
        return [task for task in before if not task[0] and task[1].startswith(self._claims)]

    def _refusal(self, ledger: Ledger, earlier: Path, now: Path) -> str:
        """What to say of an output that was made of another input."""
        if self.files:
            names = " and ".join(str(path) for path in self.files if is_file(path))
            advice = f"give another output file, or remove {names} first"
        else:
            folder = ledger.root.with_name(f"{ledger.root.name}-{now.name}")  # beside it: stages read below
            advice = f"give another output folder, such as {folder}, or remove {ledger.root} first"
        return (
            f"{ledger.root} holds what {ledger.file.stem} made of {earlier}, and would lose it if {now} were read now: "
            f"{advice}"
        )

    @property
    def _lacks_files(self) -> bool:
        """Whether the run writes single files, and none is there."""
        return bool(self.files) and not any(map(is_file, self.files))

    @property
    def _claims(self) -> str:
        return f"claims of {self.selection}: "

    @property
    def _part(self) -> str:
        return self.selection.partition("/")[0]

    @property
    def _reads_id(self) -> TaskId:
        return "", f"{READS}{self._part}"


@dataclass
class Marks:
    """The marks of what a run writes, `folders` and single `files` of one folder; set before its first task.

    Context: after an error that came before any change of the output, the marks are as before. They are removed if
    another process took the lock and has ended the stage since, as its `ledger` says.
    """

    name: str  # of the run
    is_whole: bool  # no part of the work
    folders: tuple[Path, ...]
    files: tuple[Path, ...]
    ledger: Path
    is_output_changed: bool = False
    _before: FileInfo | None = None
    _new_folders: set[Path] = field(default_factory=set)
    _has_new_files: bool = False

    def set(self, reason: str = "") -> None:
        """Mark what the run writes as unfinished; a mark that is there stays, unless there is another reason."""
        for folder in self.folders:
            if reason or not is_unfinished(folder, self.name):
                self._new_folders.add(folder)
                mark_unfinished(folder, self.name, reason or INTERRUPTED)
        if self.files and (reason or not are_marked(self.files, self.name)):
            self._has_new_files = True
            mark_files_unfinished(self.files, self.name, reason or INTERRUPTED)

    def remove(self) -> None:
        """Remove the marks of a run that has ended; a run of the whole has made what the parts left, too."""
        for folder in self.folders:
            (clear_marks if self.is_whole else mark_finished)(folder, self.name)
        if self.files:
            mark_files_finished(self.files, self.name, with_parts=self.is_whole)

    def __enter__(self) -> Self:
        self._before = file_info(self.ledger)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        is_late = isinstance(error, TakenOver) and file_info(self.ledger) != self._before
        if not isinstance(error, Exception) or (self.is_output_changed and not is_late):
            return
        for folder in self._new_folders:
            mark_finished(folder, self.name)
        if self._has_new_files:
            mark_files_finished(self.files, self.name)


def _outputs_of(record: DoneRecord | None) -> list[OutputRecord]:
    return record.outputs if record else []


def _names_of(ledger: Ledger, path: Path) -> list[Path]:
    """The names of an input: relative to the output, by which it is known if both are moved, and absolute."""
    return [Path(ledger.relative(path)), absolute(path)]


def _is_same(earlier: Sequence[Path], now: Sequence[Path], is_inside: bool) -> bool:
    """Whether two inputs, by names of _names_of, are one or, with `is_inside`, one in the other."""
    return any(
        one == other or (is_inside and (one.is_relative_to(other) or other.is_relative_to(one)))
        for one, other in zip(earlier, now, strict=False)
    )


def _is_there(path: Path) -> bool:
    """Whether there is a file or a folder of this name; what a stage wrote in a bucket is not listed for it."""
    return is_folder(path / STATE_DIR) or exists(path)


def reject_unknown_files(folder: Path, planned: Iterable[Path], suffixes: tuple[str, ...], ledger: Ledger) -> None:
    """Raise OutputError if `folder` has files with these `suffixes` that are neither `planned` nor in the ledger.

    The next stage reads the whole folder, so files of another run would become part of its corpus.
    """
    known = {name_of(path) for path in planned}
    unknown = {name_of(path) for path in walk(folder) if path.name.lower().endswith(suffixes)} - known
    for wait in (0.0, 1.0):  # a concurrent process writes its file first and its record just after
        if unknown:
            time.sleep(wait)
            unknown -= {str(path) for path in ledger.outputs()}
    if unknown:
        which = f"{len(unknown):,} files that {ledger.file.stem} did not write, {Path(min(unknown)).name!r} the first"
        if ledger.is_damaged:
            raise OutputError(
                f"{folder} holds {which}, or wrote: its ledger {ledger.file} is damaged and does not name all files "
                "any more. Remove these files, which are then made again, or give a new folder."
            )
        raise OutputError(
            f"{folder} holds {which}: it may be another run's output. Give an empty or new folder, or remove them."
        )


def reject_overlapping_folders(source: Path, target: Path) -> None:
    """Raise UsageError if the output folder `target` is the input folder `source`, or one lies inside the other."""
    if target.resolve().is_relative_to(source.resolve()):
        raise UsageError(
            f"output folder {target} is the input folder {source} or lies in it, and its files would be read as "
            "input: give a folder outside it"
        )
    if source.resolve().is_relative_to(target.resolve()):
        raise UsageError(
            f"input folder {source} lies in the output folder {target}, and later stages would read both: give "
            "another output folder"
        )
