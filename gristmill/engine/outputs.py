"""Outputs of a stage: which files it may overwrite and remove, and marks of what is not finished."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from gristmill.counts import Counts
from gristmill.engine.done_tasks import DoneTasks, Records, with_rejects
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
)
from gristmill.paths import absolute, folders_above, join, name_of
from gristmill.storage.files import (
    exists,
    is_file,
    is_folder,
    walk,
)
from gristmill.wording import count_of


class Ownership:
    """The files that a run of a stage may overwrite and remove: those that its ledger names.

    `reads` are the inputs, `files` the single files that it writes. With `inputs_vary` the inputs are a list that gains
    and loses members from call to call.
    """

    def __init__(
        self, done: DoneTasks, reads: tuple[Path, ...], files: tuple[Path, ...], inputs_vary: bool = False
    ) -> None:
        self.done = done
        self.ledger = done.ledger
        self.reads = reads
        self.files = files
        self.inputs_vary = inputs_vary
        self._inputs = set[str]()  # of all steps so far, without the outputs of earlier ones

    def check_outputs(self, tasks: Sequence[Task]) -> None:
        """Raise UsageError if a task would overwrite an input of the stage."""
        for name in map(name_of, paths_read_by(tasks)):
            if name not in self.done.written:
                self._inputs.add(name)
        for task in tasks:
            for path in task.outputs:
                if name_of(path) in self._inputs:
                    raise UsageError(f"{path} is an input, and would be overwritten: give another output folder")

    def claim(self, step: str, outputs: Sequence[Path]) -> TaskId:
        """Record, before a step writes `outputs`, that they are this stage's; return the id of that record.

        What runs before claimed that did not end stays claimed: this one may not end either, and some of these files
        may be of inputs that are gone. Raises OutputError as `reject_foreign_files`.
        """
        files = with_rejects(map(name_of, outputs))
        self.reject_foreign_files(files)
        task = ("", f"{CLAIMS}: {step}")
        names = dict.fromkeys(map(self.ledger.relative, files))
        if task in self.done.before:
            names |= dict.fromkeys(output.path for output in self.done.before[task].outputs)
        claimed = [OutputRecord(name, -1, 0, "") for name in names]
        self.ledger.write(DoneRecord(*task, {}, claimed, Counts({}, [])))
        return task

    def reject_foreign_files(self, names: Iterable[str]) -> None:
        """Raise OutputError if one of some files exists that the stage did not write, as it would be lost.

        All are named as by name_of. What is in a state folder is nobody else's.
        """
        unknown = set[Path]()
        for name in names:
            if name not in self.done.known and f"/{STATE_DIR}/" not in name and self.done.tags.stat(name):
                unknown.add(Path(name))
        if not unknown or self.ledger.is_damaged:
            return
        for ledger in (self.ledger, *self.ledger.others):  # maybe by another process since they were read
            unknown -= set(map(Path, ledger.outputs()))
        folders = set[Path]()
        for file in unknown:
            folders.update(folders_above(file))
        unknown -= self.ledger.announced(folders)
        for path in sorted(unknown):
            raise OutputError(
                f"{path} exists, and {self.ledger.file.stem} did not write it: it would be overwritten. Give another "
                "output, or remove it"
            )

    def check_reads(self) -> None:
        """Raise UsageError if another input was read for the present output."""
        if self.inputs_vary and self._reads_an_earlier_input():
            return
        is_same = _has_outputs(self.done.records)  # an input that is gone has moved
        self._check_recorded_reads(self.done.before, READS, is_same, is_part=False)
        self._check_recorded_reads(self.done.before, READS_OF_PARTS, is_same, is_part=True)
        for whole in self.ledger.wholes:
            self._check_recorded_reads(whole.read(), READS, is_same, is_part=True)

    def _check_recorded_reads(self, records: Records, task: TaskId, is_same: bool, is_part: bool) -> None:
        """Raise UsageError if the inputs that `task` recorded are not the present ones, and outputs would be lost."""
        record = records.get(task)
        if record is None or self._lacks_files or not _has_outputs(records):
            return
        for key, names in record.identity.items():
            number = int(key.split()[1])
            if number >= len(self.reads):
                continue
            now = self.reads[number]
            relative, earlier = names.split("\0")[:2]
            if is_same and not _is_there(Path(earlier)):
                continue
            is_same_relative = _is_same(Path(relative), Path(self.ledger.relative(now)), is_part)
            is_same_absolute = _is_same(Path(earlier), Path(name_of(now)), is_part)
            if not is_same_relative and not is_same_absolute:
                raise UsageError(self._refusal(Path(earlier), now))

    def _reads_an_earlier_input(self) -> bool:
        """Return whether one of the recorded inputs is among the present ones."""
        record = self.done.before.get(READS)
        if record is None:
            return False
        earlier_names = set[str]()
        for names in record.identity.values():
            earlier_names.update(names.split("\0")[:2])
        present_names = {*map(self.ledger.relative, self.reads), *map(name_of, self.reads)}
        return not earlier_names.isdisjoint(present_names)

    def record_reads(self, is_changed: bool) -> Records:
        """Record the names of the inputs for check_reads: relative to the output, as both may be moved, and absolute.

        Unless those recorded are there still, and no output `is_changed`: then the present inputs are copies of them.
        """
        identity = dict[str, str]()
        for number, path in enumerate(self.reads):
            identity[f"input {number}"] = f"{self.ledger.relative(path)}\0{name_of(path)}"
        known = self.done.records.get(READS) or self.done.before.get(READS)
        if known and known.identity == identity:
            return {READS: known}
        if known and not is_changed and not self._lacks_files:
            earlier = [Path(names.split("\0")[1]) for names in known.identity.values()]
            if all(map(_is_there, earlier)):
                return {READS: known}
        record = DoneRecord(*READS, identity, [], Counts({}, []))
        self.ledger.write(record)
        return {READS: record}

    def stale_tasks(self) -> list[TaskId]:
        """Return tasks of earlier runs that this run has not planned, and claims that never ended."""
        stale = list[TaskId]()
        for task in self.done.before:
            step, name = task
            is_task = bool(step) or name.startswith(CLAIMS) or task == READS_OF_PARTS
            if is_task and task not in self.done.records:
                stale.append(task)
        return stale

    def stale_files(self) -> list[Path]:
        """Return files of earlier runs, ended or not, that this run does not write, and no other call has written."""
        root = name_of(self.ledger.root)
        stale = set(self.done.earlier)
        for record in self.done.records.values():
            stale.difference_update(join(root, output.path) for output in record.outputs)
        if not stale:
            return []
        stale &= self.ledger.outputs_of_its_own()
        return sorted(filter(is_file, map(Path, stale)))

    def _refusal(self, earlier: Path, now: Path) -> str:
        """Return the message for an output that was made of another input."""
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
        """Return whether the run writes single files, and none is there."""
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
        """Return the folders with marks, and the single files that each is of; none: it is of all in the folder."""
        places = dict[Path, tuple[Path, ...]]()
        if self.files:
            places[self.files[0].parent] = self.files
        return places | dict.fromkeys(self.folders, ())

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


def _has_outputs(records: Records) -> bool:
    """Return whether a task of a step has written a file."""
    return any(record.outputs for (step, _), record in records.items() if step)


def _is_same(earlier: Path, now: Path, is_part: bool) -> bool:
    """Return whether two inputs are one or, if one was read for a part of what is made of the other, one is in it."""
    if earlier == now:
        return True
    return is_part and (earlier.is_relative_to(now) or now.is_relative_to(earlier))


def _is_there(path: Path) -> bool:
    """Return whether there is a file or folder of this name; what a stage wrote in a bucket is not listed for it."""
    return is_folder(path / STATE_DIR) or exists(path)


def reject_unknown_files(folder: Path, planned: Iterable[Path], suffixes: tuple[str, ...], ledger: Ledger) -> None:
    """Raise OutputError if `folder` has files with these `suffixes` that are neither `planned` nor in the ledger.

    The next stage reads all of the folder, so files of another run would become part of its corpus.
    """
    unknown = {name_of(path) for path in walk(folder) if path.name.lower().endswith(suffixes)}
    unknown -= set(map(name_of, planned))
    for wait in (0.0, 1.0):  # a concurrent process writes its file first and its record just after
        if unknown:
            time.sleep(wait)
            for any_ledger in (ledger, *ledger.others):
                unknown -= any_ledger.outputs().keys()
    if unknown:
        raise OutputError(
            f"{folder} holds {count_of(len(unknown), 'file')} that {ledger.file.stem} did not write, such as "
            f"{Path(min(unknown)).name!r}: another run may have written them, or the ledger {ledger.file} is damaged. "
            "Remove them, or give an empty or new folder"
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
