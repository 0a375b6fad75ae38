"""Which tasks of a stage are done: their records, and whether the files are still as these say."""

import hashlib
import os
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from gristmill.engine.ledger import DoneRecord, Ledger, OutputRecord, TaskId
from gristmill.engine.lineage import MISSING, FileTags, is_hash, matches
from gristmill.engine.task import FileSet, Stage, Task, identify, paths_read_by
from gristmill.io.files import rejects_name
from gristmill.storage.files import FileInfo, list_names, remove_files
from gristmill.storage.listings import list_kept_again
from gristmill.storage.local import PARTIAL, remove_partial_files
from gristmill.storage.names import name_of
from gristmill.urls import is_remote


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
        self.stage, self.ledger = stage, ledger
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
        """The records of calls that did other parts of the stage's work, or the whole, by id."""
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
        """What the inputs of a task are now: of all objects, and of local files that are no outputs of this run."""
        written = {path: self.written.get(name_of(path)) for path in paths_read_by([task]) if is_remote(path)}
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
        list_kept_again()
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
        output, found = self.written.get(name_of(path)), self.tags.stat(path)
        return found is not None and (output is None or matches(found, output))

    def remove_leftovers(self) -> None:
        """Remove what killed workers left next to outputs, also of skipped tasks, and of inputs that are gone."""
        if not is_remote(loose := self.ledger.loose):
            remove_files(loose / name for name in list_names(loose) if name.endswith(PARTIAL))
            with suppress(OSError):  # there are records, or there is no folder
                loose.rmdir()
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
        """The same of an input; of a set, which many tasks may share, they are looked up once."""
        if found in self._set_hashes:
            return self._set_hashes[found]
        paths = filter(is_remote, found.paths if isinstance(found, FileSet) else (found,))
        hashes = {path: tag for path in paths if (tag := self._tag(path)) != MISSING and is_hash(tag)}
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
