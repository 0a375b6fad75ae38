"""Done tasks of a stage: tasks of earlier runs whose outputs are as recorded, and tasks of this run."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from gristmill.engine.staleness.identity import identify
from gristmill.engine.staleness.ledger import Ledger
from gristmill.engine.staleness.lineage import MISSING, FileTags, is_hash, matches
from gristmill.engine.staleness.records import DoneRecord, OutputRecord, Records, TaskId
from gristmill.engine.staleness.reruns import differing_versions
from gristmill.engine.task import FileSet, Stage, Task, paths_read_by
from gristmill.io.files import rejects_name
from gristmill.paths import name_of
from gristmill.storage.files import FileInfo, remove_if_unused, remove_partial_files
from gristmill.storage.stores import store_of


class KnownInputs(NamedTuple):
    """The inputs of a task that is about to run: its identity, the states of its inputs, the hashes of objects."""

    identity: dict[str, str]
    states: dict[Path, FileInfo]
    hashes: dict[Path, str]


class DoneTasks:
    """The done tasks of a stage, of earlier runs and of this one; its temporary files are in `work`.

    Attributes:
        before: Records of earlier runs, by id.
        earlier: The names of all files that these runs wrote, by replaced records, too.
        records: Records of this run's tasks, of skipped ones, too, by id.
        planned: Identities of this run's tasks that are not done yet, by id.
        written: Records of the outputs of this run's tasks, by name (see name_of).
        known: The names of all files that the stage ever wrote or began to write, in any part of its work.
        seen: The inputs of this run's tasks that other stages or users wrote, as the identities say, by name.
        kept_versions: Other versions that wrote what is kept: (then, now) by name.
        is_changed: Whether `records` is to be written to the ledger.
    """

    def __init__(
        self, stage: Stage, ledger: Ledger, work: Path, accept_versions: bool = False, retry_failed: bool = False
    ) -> None:
        self.stage = stage
        self.ledger = ledger
        self.tags = FileTags(own=ledger.outputs(), own_ledger=Path(name_of(ledger.file)))
        self.before = ledger.read()
        self.earlier = self.tags.own.keys()
        self.records: Records = {}
        self.planned: dict[TaskId, dict[str, str]] = {}
        self.written: dict[str, OutputRecord] = {}
        self.known = set(self.tags.own)
        for sibling in ledger.siblings:
            self.known.update(sibling.outputs())
        self.seen: dict[str, FileInfo] = {}
        self.kept_versions: dict[str, tuple[str, str]] = {}
        self.is_changed = False
        self._accept_versions = accept_versions
        self._retry_failed = retry_failed
        self._work_prefix = name_of(work) + os.sep
        self._set_tags: dict[FileSet, str] = {}
        self._set_hashes: dict[Path | FileSet, dict[Path, str]] = {}
        self._read_sets: dict[tuple[TaskId, FileSet], None] = {}  # by the tasks that ran

    def identity(self, task: Task) -> dict[str, str]:
        """Return all that a task's outputs depend on, as its inputs are now."""
        return identify(task, self.stage.identity, self._tag)

    def plan(self, step: str, task: Task) -> dict[str, str]:
        """Return the identity of a task of this run; it is kept until the task is done, as it may be of many files."""
        identity = self.identity(task)
        self.planned[step, task.name] = identity
        return identity

    def find(self, step: str, task: Task, identity: dict[str, str]) -> DoneRecord | None:
        """Return the record of an earlier run of this very task, if its outputs are as recorded."""
        record = self.before.get((step, task.name))
        if record is None or self.is_retried(step, task.name):
            return None
        kept_versions = differing_versions(record.identity, identity)
        if kept_versions is None or (kept_versions and not self._accept_versions):
            return None
        names = list(map(self.ledger.relative, task.outputs))
        recorded_names = [output.path for output in record.outputs]
        if recorded_names[: len(names)] != names:  # in another folder, of which an identity says nothing
            return None
        rejects = record.outputs[len(task.outputs) :]
        paths = [*task.outputs, *map(self.ledger.path, rejects)]
        if not all(map(self._is_intact, paths, record.outputs)):
            return None
        self.kept_versions |= kept_versions
        return record

    def is_retried(self, step: str, task: str) -> bool:
        """Return whether a task runs again as documents or files failed in it, which is asked for."""
        record = self.before.get((step, task))
        return self._retry_failed and record is not None and record.counts.has_failures

    def keep(self, task: Task, record: DoneRecord, is_new: bool = True) -> None:
        """Add a record to the records of this run; an old one with the present times of copied outputs."""
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
        objects = [path for path in paths_read_by([task]) if store_of(path).needs_copies]
        single = [path for path in task.inputs if isinstance(path, Path)]
        states = dict[Path, FileInfo]()
        for path in (*single, *objects):
            if name_of(path) not in self.written:
                info = self.tags.stat(path)
                if info:
                    states[path] = info
        for path in objects:
            output = self.written.get(name_of(path))
            if output:
                states[path] = FileInfo(output.size, output.mtime_ns, output.e_tag)
        return states

    def inputs_of(self, step: str, task: Task) -> KnownInputs:
        """Return what is known of a task that is about to run; remember the sets that it reads."""
        task_id = (step, task.name)
        for files in task.inputs:
            if isinstance(files, FileSet):
                self._read_sets[task_id, files] = None
        identity = self.planned.get(task_id) or self.identity(task)
        return KnownInputs(identity, self.states(task), self.hashes(task))

    def hashes(self, task: Task) -> dict[Path, str]:
        """Return the SHA-256 of each object that a task reads and a stage wrote: its copy is compared."""
        hashes = dict[Path, str]()
        for files in task.inputs:
            hashes |= self._hashes_of(files)
        return hashes

    def changed_inputs(self) -> list[str]:
        """Return the inputs that changed since they were read; drop records of tasks that read them in sets.

        Tasks that read single files have looked themselves, and it is too late for the records of a set's readers.
        """
        now = FileTags(self.tags.own, self.tags.own_ledger)  # whose records, one a task so far, are not read for it
        changed = [name for name, info in self.seen.items() if now.stat(name) != info]
        if changed:
            names = set(changed)
            readers = list[TaskId]()
            for task, files in self._read_sets:
                if not names.isdisjoint(map(name_of, files.paths)):
                    readers.append(task)
            self.ledger.forget(readers)
        return changed

    def is_own(self, path: Path) -> bool:
        """Return whether a file is temporary, or an output of this run."""
        name = name_of(path)
        return name in self.written or self.is_temporary(name)

    def is_temporary(self, path: Path | str) -> bool:
        """Return whether a file is removed at the end of the stage."""
        return name_of(path).startswith(self._work_prefix)

    def is_present(self, path: Path) -> bool:
        """Return whether a temporary file is there as recorded, not as a killed run left it with other arguments."""
        info = self.tags.stat(path)
        if info is None:
            return False
        output = self.written.get(name_of(path))
        return output is None or matches(info, output)

    def remove_leftovers(self) -> None:
        """Remove what killed workers left next to outputs, also of skipped tasks, and of inputs that are gone."""
        remove_if_unused(self.ledger.loose)  # if there are no records
        remove_partial_files(with_rejects({*self.written, *self.earlier}))

    def _is_intact(self, path: Path, output: OutputRecord) -> bool:
        """Return whether a file is as recorded; a temporary one may be gone, and is made again if it is needed."""
        return self.is_temporary(path) or self.tags.of(path) == output.sha256

    def _refresh(self, task: Task, record: DoneRecord) -> None:
        """Set the times of a record's outputs to their present times, as copies have others."""
        rejects = record.outputs[len(task.outputs) :]
        paths = [*task.outputs, *map(self.ledger.path, rejects)]
        for i, (path, output) in enumerate(zip(paths, record.outputs, strict=True)):
            info = self.tags.stat(path)
            if info and not matches(info, output) and not self.is_temporary(path):
                record.outputs[i] = msgspec.structs.replace(output, mtime_ns=info.mtime_ns, e_tag=info.e_tag)
                self.is_changed = True

    def note_read(self, name: str) -> None:
        """Note that a file that another stage or a user wrote was read."""
        if name in self.tags.own or self.is_temporary(name):
            return
        info = self.tags.stat(name)
        if info:
            self.seen.setdefault(name, info)

    def _hashes_of(self, files: Path | FileSet) -> dict[Path, str]:
        """Return the SHA-256 of each remote file of an input, cached for each file set."""
        if files in self._set_hashes:
            return self._set_hashes[files]
        hashes = dict[Path, str]()
        paths: tuple[Path, ...] = (files,) if isinstance(files, Path) else files.paths
        for path in paths:
            if store_of(path).needs_copies:
                tag = self._tag(path)
                if tag != MISSING and is_hash(tag):
                    hashes[path] = tag
        if isinstance(files, FileSet):
            self._set_hashes[files] = hashes
        return hashes

    def _tag(self, files: Path | FileSet) -> str:
        """Return the content tag of an input."""
        if isinstance(files, FileSet):
            if files not in self._set_tags:
                tags = [f"{path.name} {self._tag(path)}" for path in files.paths]
                self._set_tags[files] = hashlib.sha256("\n".join(tags).encode()).hexdigest()
            return self._set_tags[files]
        name = name_of(files)
        if name in self.written:
            return self.written[name].sha256
        self.note_read(name)
        return self.tags.of(name)


def with_rejects(names: Iterable[str]) -> list[str]:
    """Return files by name, and after each that of the malformed records which were found while it was written."""
    files = list[str]()
    for name in names:
        files += [name, rejects_name(name)]
    return files
