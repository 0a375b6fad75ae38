"""Outputs of a stage: the files that it may overwrite and remove, and the marks of what it has not finished."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from gristmill.counts import Counts
from gristmill.engine.done import DoneTasks
from gristmill.engine.ledger import CLAIMS, READS, READS_OF_PARTS, DoneRecord, Ledger, OutputRecord, TaskId
from gristmill.engine.task import Task, paths_read_by
from gristmill.errors import OutputError, UsageError
from gristmill.io.files import (
    INTERRUPTED,
    STATE_DIR,
    clear_marks,
    is_unfinished,
    mark_finished,
    mark_unfinished,
    rejects_name,
)
from gristmill.storage.files import exists, is_file, is_folder
from gristmill.storage.names import absolute, join, name_of
from gristmill.storage.walking import walk
from gristmill.urls import folders_above

Records = dict[TaskId, DoneRecord]


class Ownership:
    """The files that a run of a stage may overwrite and remove: those that its ledger names.

    `reads` are the inputs, `files` the single files that it writes.
    """

    def __init__(self, done: DoneTasks, reads: tuple[Path, ...], files: tuple[Path, ...]) -> None:
        self.done, self.ledger, self.reads, self.files = done, done.ledger, reads, files
        self._inputs = set[str]()  # of all steps so far, without the outputs of earlier ones

    def check_outputs(self, tasks: Sequence[Task]) -> None:
        """Raise UsageError if a task would overwrite an input of the stage."""
        self._inputs.update(name for name in map(name_of, paths_read_by(tasks)) if name not in self.done.written)
        for path in (path for task in tasks for path in task.outputs):
            if name_of(path) in self._inputs:
                raise UsageError(f"{path} is an input, and would be overwritten: give another output folder")

    def claim(self, step: str, outputs: Sequence[Path]) -> TaskId:
        """Record, before a step writes `outputs`, that they are this stage's; return the id of that record.

        What runs before claimed that did not end stays claimed: this one may not end either, and some of these files
        may be of inputs that are gone. Raises OutputError as `reject_foreign_files`.
        """
        files = [file for name in map(name_of, outputs) for file in (name, rejects_name(name))]
        self.reject_foreign_files(files)
        task = "", f"{CLAIMS}: {step}"
        earlier = self.done.before[task].outputs if task in self.done.before else []
        names = dict.fromkeys([*map(self.ledger.relative, files), *(output.path for output in earlier)])
        self.ledger.write(DoneRecord(*task, {}, [OutputRecord(name, -1, 0, "") for name in names], Counts({}, [])))
        return task

    def reject_foreign_files(self, names: Iterable[str]) -> None:
        """Raise OutputError if one of some files exists that the stage did not write, as it would be lost.

        All are named as by name_of. What is in a state folder is nobody else's.
        """
        found = (name for name in names if name not in self.done.known and f"/{STATE_DIR}/" not in name)
        unknown = set(map(Path, filter(self.done.tags.stat, found)))
        if not unknown or self.ledger.is_damaged:
            return
        for ledger in (self.ledger, *self.ledger.others):  # maybe by another process since they were read
            unknown -= set(map(Path, ledger.outputs()))
        unknown -= self.ledger.announced({folder for file in unknown for folder in folders_above(file)})
        for path in sorted(unknown):
            raise OutputError(
                f"{path} exists, and {self.ledger.file.stem} did not write it: it would be overwritten. Give another "
                "output, or remove it"
            )

    def check_reads(self) -> None:
        """Raise UsageError if another input was read for the present output."""
        before, records = self.done.before, self.done.records
        is_same = any(it.outputs for (step, _), it in records.items() if step)  # an input that is gone has moved
        known = [(before, READS, False), (before, READS_OF_PARTS, True)]
        known += [(whole.read(), READS, True) for whole in self.ledger.wholes]
        for records, task, is_part in known:
            record = records.get(task)
            if self._lacks_files or not any(it.outputs for (step, _), it in records.items() if step):
                continue  # nothing would be lost
            inputs = [(int(key.split()[1]), names) for key, names in record.identity.items()] if record else []
            for names, now in ((names, self.reads[at]) for at, names in inputs if at < len(self.reads)):
                relative, earlier = names.split("\0")[:2]
                has_moved = is_same and not _is_there(Path(earlier))
                pairs = (relative, self.ledger.relative(now)), (earlier, name_of(now))
                if not has_moved and not any(_is_same(Path(one), Path(other), is_part) for one, other in pairs):
                    raise UsageError(self._refusal(Path(earlier), now))

    def record_reads(self, is_changed: bool) -> Records:
        """Record the names of the inputs for check_reads: relative to the output, as both may be moved, and absolute.

        Unless those recorded are there still, and no output `is_changed`: then the present inputs are copies of them.
        """
        names = (f"{self.ledger.relative(path)}\0{name_of(path)}" for path in self.reads)
        record = DoneRecord(*READS, {f"input {i}": name for i, name in enumerate(names)}, [], Counts({}, []))
        known = self.done.records.get(READS) or self.done.before.get(READS)
        earlier = known.identity if known else {}
        is_there = all(_is_there(Path(name.split("\0")[1])) for name in earlier.values())
        if known and (earlier == record.identity or (is_there and not is_changed and not self._lacks_files)):
            return {READS: known}
        self.ledger.write(record)
        return {READS: record}

    def stale_tasks(self) -> list[TaskId]:
        """Tasks of earlier runs that this run has not planned: their inputs are gone; and claims that never ended."""
        left = (task for task in self.done.before if task not in self.done.records)
        return [task for task in left if task[0] or task[1].startswith(CLAIMS) or task == READS_OF_PARTS]

    def stale_files(self) -> list[Path]:
        """Files of earlier runs, ended or not, that this run does not write, and no other call has written."""
        root = name_of(self.ledger.root)
        current = (join(root, output.path) for record in self.done.records.values() for output in record.outputs)
        found = set(self.done.earlier).difference(current) if self.done.earlier else set()
        return sorted(filter(is_file, map(Path, found & self.ledger.outputs_of_its_own()))) if found else []

    def _refusal(self, earlier: Path, now: Path) -> str:
        """What to say of an output that was made of another input."""
        root = self.ledger.root
        if self.files:
            names = " and ".join(str(path) for path in self.files if is_file(path))
            advice = f"give another output file, or remove {names} first"
        else:
            folder = root.with_name(f"{root.name}-{absolute(now).name}")  # next to it, as stages read all below it
            advice = f"give another output folder, such as {folder}, or remove {root} first"
        return (
            f"{root} holds what {self.ledger.file.stem} made of {earlier}, and would lose it if {now} were read now: "
            f"{advice}"
        )

    @property
    def _lacks_files(self) -> bool:
        """Whether the run writes single files, and none is there."""
        return bool(self.files) and not any(map(is_file, self.files))


@dataclass
class Marks:
    """The marks of what a run writes, `folders` and single `files` of one folder; set before its first task.

    Context: after an error that came before any change of the output, the marks are as before.
    """

    name: str  # of the run
    folders: tuple[Path, ...]
    files: tuple[Path, ...]
    stay: bool = False  # after an error, too, as the output has changed
    _new: list[Path] = field(default_factory=list)  # folders that have been marked

    @property
    def _places(self) -> dict[Path, tuple[Path, ...]]:
        """The folders with marks, and the single files that each is of; none: it is of the whole folder."""
        return ({self.files[0].parent: self.files} if self.files else {}) | dict.fromkeys(self.folders, ())

    def set(self, reason: str = "") -> None:
        """Mark what the run writes as unfinished; a mark that is there stays, unless there is another reason."""
        for folder, files in self._places.items():
            if reason or not is_unfinished(folder, self.name):
                self._new.append(folder)
                mark_unfinished(folder, self.name, files, reason or INTERRUPTED)

    def remove(self) -> None:
        """Remove the marks of a run that has ended, and those of parts of its work, which it has made, too."""
        for folder, files in self._places.items():
            clear_marks(folder, self.name, files)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not isinstance(error, Exception) or self.stay:
            return
        for folder in self._new:
            mark_finished(folder, self.name)


def _is_same(earlier: Path, now: Path, is_part: bool) -> bool:
    """Whether two inputs are one; or, if one was read for a part of what is made of the other, one is in the other."""
    return earlier == now or (is_part and (earlier.is_relative_to(now) or now.is_relative_to(earlier)))


def _is_there(path: Path) -> bool:
    """Whether there is a file or a folder of this name; what a stage wrote in a bucket is not listed for it."""
    return is_folder(path / STATE_DIR) or exists(path)


def reject_unknown_files(folder: Path, planned: Iterable[Path], suffixes: tuple[str, ...], ledger: Ledger) -> None:
    """Raise OutputError if `folder` has files with these `suffixes` that are neither `planned` nor in the ledger.

    The next stage reads all of the folder, so files of another run would become part of its corpus.
    """
    known = {name_of(path) for path in planned}
    unknown = {name_of(path) for path in walk(folder) if path.name.lower().endswith(suffixes)} - known
    for wait in (0.0, 1.0):  # a concurrent process writes its file first and its record just after
        if unknown:
            time.sleep(wait)
            for each in (ledger, *ledger.others):
                unknown -= each.outputs().keys()
    if unknown:
        raise OutputError(
            f"{folder} holds {len(unknown):,} files that {ledger.file.stem} did not write, "
            f"{Path(min(unknown)).name!r} the first: they may be another run's, or its ledger {ledger.file} is "
            "damaged. Remove them, or give an empty or new folder"
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
