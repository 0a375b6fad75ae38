"""Outputs of a stage: which are done and as recorded, which files it may overwrite, marks of what is not finished."""

import hashlib
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from gristmill.counts import Counts
from gristmill.engine.ledger import CLAIMS, READS, READS_OF_PARTS, DoneRecord, Ledger, OutputRecord, TaskId
from gristmill.engine.lineage import MISSING, FileTags, is_hash, matches
from gristmill.engine.task import FileSet, Stage, Task, identify, paths_read_by
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
from gristmill.paths import absolute, folders_above, join, name_of
from gristmill.storage.files import (
    FileInfo,
    exists,
    is_file,
    is_folder,
    remove_if_unused,
    remove_partial_files,
    walk,
)
from gristmill.storage.stores import store_of
from gristmill.wording import count_of

Records = dict[TaskId, DoneRecord]


class DoneTasks:
    """The done tasks of a stage with temporary files in `work`: those of earlier runs, and those of this run.

    Attributes:
        before: Records of earlier runs, by id.
        earlier: The names of all files that these runs wrote, those of replaced records included.
        records: Records of this run's tasks, those that were skipped included, by id.
        planned: Identities of this run's tasks that are not done yet, by id.
        written: Records of the outputs of this run's tasks, by name (see name_of).
        known: The names of all files that the stage ever wrote or claimed, in any part of its work.
        seen: The inputs of this run's tasks that other stages or users wrote, as the identities say, by name.
        is_changed: Whether `records` is to be written to the ledger.
    """

    def __init__(self, stage: Stage, ledger: Ledger, work: Path) -> None:
        self.stage = stage
        self.ledger = ledger
        self.read_again()
        self.before, self.earlier = ledger.read(), self.tags.own.keys()
        self.records: dict[TaskId, DoneRecord] = {}
        self.planned: dict[TaskId, dict[str, str]] = {}
        self.written: dict[str, OutputRecord] = {}
        self.known = set(self.tags.own).union(*(other.outputs() for other in ledger.others))
        self.seen: dict[str, FileInfo] = {}
        self.is_changed = False
        self._work_prefix = name_of(work) + os.sep
        self._set_tags: dict[FileSet, str] = {}
        self._set_hashes: dict[Path | FileSet, dict[Path, str]] = {}
        self._read_sets: dict[tuple[TaskId, FileSet], None] = {}  # by the tasks that ran

    def read_again(self) -> None:
        """List folders and read the ledgers of others anew: other processes may have written to them."""
        self.__dict__.pop("of_others", None)
        self.tags = FileTags(own=self.ledger.outputs(), own_ledger=Path(name_of(self.ledger.file)))

    @cached_property
    def of_others(self) -> dict[TaskId, list[DoneRecord]]:
        """The records of calls that did other parts of the stage's work, or all of it, by id."""
        found: dict[TaskId, list[DoneRecord]] = {}
        for record in (record for ledger in self.ledger.others for record in ledger.read().values()):
            found.setdefault(record.id, []).append(record)
        return found

    def identity(self, task: Task) -> dict[str, str]:
        """All that a task's outputs depend on, as its inputs are now."""
        return identify(task, self.stage.identity, self._tag)

    def plan(self, step: str, task: Task) -> dict[str, str]:
        """The identity of a task of this run, which is kept until the task is done: it is of many files, maybe."""
        identity = self.planned[step, task.name] = self.identity(task)
        return identity

    def find(self, step: str, task: Task, identity: dict[str, str]) -> DoneRecord | None:
        """The record of an earlier run of this very task, if its outputs are as recorded."""
        record = self.before.get((step, task.name))
        if not record or record.identity != identity:
            others = self.of_others.get((step, task.name), [])
            record = next((other for other in others if other.identity == identity), None)
        if not record:
            return None
        record = self._relocated(task, record)
        paths = [*task.outputs, *map(self.ledger.path, record.outputs[len(task.outputs) :])]
        is_intact = len(paths) == len(record.outputs) and all(map(self._is_intact, paths, record.outputs))
        return record if is_intact else None

    def keep(self, task: Task, record: DoneRecord, is_new: bool = True) -> None:
        """Add a record to those of this run; an old one with the present times of outputs that were copied."""
        if not is_new:
            self._refresh(task, record)
        self.records[record.id] = record
        self.planned.pop(record.id, None)
        self.is_changed |= is_new or record.id not in self.before
        names = list(map(name_of, task.outputs))
        self.known.update(names)
        self.written.update(zip(names, record.outputs, strict=False))

    def states(self, task: Task) -> dict[Path, FileInfo]:
        """Return the state of a task's inputs now: of all objects, and of local files that this run did not write."""
        copied = (path for path in paths_read_by([task]) if store_of(path).needs_copies)
        written = {path: self.written.get(name_of(path)) for path in copied}
        objects = {path: FileInfo(out.size, out.mtime_ns, out.e_tag) for path, out in written.items() if out}
        single = (path for path in task.inputs if isinstance(path, Path))
        paths = (path for path in (*single, *written) if name_of(path) not in self.written)
        return {path: info for path in paths if (info := self.tags.stat(path))} | objects

    def found(self, step: str, task: Task) -> dict[str, Any]:
        """The arguments of run_task on the inputs of a task that is about to run; the sets it reads are remembered."""
        self._read_sets |= {((step, task.name), files): None for files in task.inputs if isinstance(files, FileSet)}
        identity = self.planned.get((step, task.name)) or self.identity(task)
        return {"identity": identity, "inputs": self.states(task), "hashes": self.hashes(task)}

    def hashes(self, task: Task) -> dict[Path, str]:
        """The SHA-256 of each object that a task reads and a stage wrote: its copy is compared."""
        return {path: sha256 for found in task.inputs for path, sha256 in self._hashes_of(found).items()}

    def changed_inputs(self) -> list[str]:
        """The names of inputs that are not as they were any more; the records of tasks that may have read them so go.

        Those that read single files have looked themselves, and it is too late for the record of a set's readers.
        """
        now = FileTags(self.tags.own, self.tags.own_ledger)  # whose records, one a task so far, are not read for it
        changed = [name for name, info in self.seen.items() if now.stat(name) != info]
        if changed:
            names = set(changed)
            self.ledger.forget(
                task for task, found in self._read_sets if not names.isdisjoint(map(name_of, found.paths))
            )
        return changed

    def is_own(self, path: Path) -> bool:
        """Whether a file is temporary, or an output of this run."""
        name = name_of(path)
        return name in self.written or self.is_temporary(name)

    def is_temporary(self, path: Path | str) -> bool:
        """Whether a file is removed at the end of the stage."""
        return name_of(path).startswith(self._work_prefix)

    def is_present(self, path: Path) -> bool:
        """Whether a temporary file is there, as recorded, and not one that a killed run left with other arguments."""
        output = self.written.get(name_of(path))
        found = self.tags.stat(path)
        return found is not None and (output is None or matches(found, output))

    def remove_leftovers(self) -> None:
        """Remove what killed workers left next to outputs, also of skipped tasks, and of inputs that are gone."""
        remove_if_unused(self.ledger.loose)  # if there are no records
        remove_partial_files(file for name in {*self.written, *self.earlier} for file in (name, rejects_name(name)))

    def _is_intact(self, path: Path, output: OutputRecord) -> bool:
        """Whether a file is as recorded; a temporary one may be gone, and is made again if it is needed."""
        return self.is_temporary(path) or self.tags.of(path) == output.sha256

    def _relocated(self, task: Task, record: DoneRecord) -> DoneRecord:
        """A record whose temporary outputs were those of a call for another part, with the names they have here."""
        names = list(map(self.ledger.relative, task.outputs))
        renamed = {output.path: name for output, name in zip(record.outputs, names, strict=False)}
        if all(old == name for old, name in renamed.items()):
            return record
        renamed |= {rejects_name(old): rejects_name(name) for old, name in renamed.items()}
        outputs = [msgspec.structs.replace(it, path=renamed.get(it.path, it.path)) for it in record.outputs]
        return msgspec.structs.replace(record, outputs=outputs)

    def _refresh(self, task: Task, record: DoneRecord) -> None:
        for i, output in enumerate(record.outputs):
            path = task.outputs[i] if i < len(task.outputs) else self.ledger.path(output)
            found = self.tags.stat(path)
            if found and not matches(found, output) and not self.is_temporary(path):
                record.outputs[i] = msgspec.structs.replace(output, mtime_ns=found.mtime_ns, e_tag=found.e_tag)
                self.is_changed = True

    def note_read(self, name: str) -> None:
        """Note that a file that another stage or a user wrote was read."""
        if name not in self.tags.own and not self.is_temporary(name) and (info := self.tags.stat(name)):
            self.seen.setdefault(name, info)

    def _hashes_of(self, found: Path | FileSet) -> dict[Path, str]:
        """Return the SHA-256 of each remote file of an input, cached for each file set."""
        if found in self._set_hashes:
            return self._set_hashes[found]
        read = found.paths if isinstance(found, FileSet) else (found,)
        copied = (path for path in read if store_of(path).needs_copies)
        hashes = {path: tag for path in copied if (tag := self._tag(path)) != MISSING and is_hash(tag)}
        if isinstance(found, FileSet):
            self._set_hashes[found] = hashes
        return hashes

    def _tag(self, found: Path | FileSet) -> str:
        if isinstance(found, FileSet):
            if found not in self._set_tags:
                tags = "\n".join(f"{path.name} {self._tag(path)}" for path in found.paths)
                self._set_tags[found] = hashlib.sha256(tags.encode()).hexdigest()
            return self._set_tags[found]
        name = name_of(found)
        if written := self.written.get(name):
            return written.sha256
        self.note_read(name)
        return self.tags.of(name)


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
        if self.inputs_vary and self._reads_an_earlier_input():
            return
        before = self.done.before
        records = self.done.records
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

    def _reads_an_earlier_input(self) -> bool:
        """Return whether one of the recorded inputs is among the present ones."""
        record = self.done.before.get(READS)
        earlier = record.identity.values() if record else ()
        earlier_names = {name for names in earlier for name in names.split("\0")[:2]}
        present_names = {name for path in self.reads for name in (self.ledger.relative(path), name_of(path))}
        return not earlier_names.isdisjoint(present_names)

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
        """The folders with marks, and the single files that each is of; none: it is of all in the folder."""
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
