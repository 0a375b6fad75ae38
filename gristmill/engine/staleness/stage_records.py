"""StageRecords: what earlier runs of a stage did, which of it is still true, and what this run adds to it."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from gristmill.counts import Counts
from gristmill.engine.options import RunOptions
from gristmill.engine.staleness.done_tasks import DoneTasks, KnownInputs
from gristmill.engine.staleness.ledger import Ledger
from gristmill.engine.staleness.lineage import Listed, reject_changed, reject_incomplete
from gristmill.engine.staleness.marks import Marks
from gristmill.engine.staleness.ownership import READS, Ownership, is_ahead
from gristmill.engine.staleness.records import DoneRecord, StepResult, TaskId
from gristmill.engine.staleness.reruns import explain, note_kept, note_outdated
from gristmill.engine.staleness.temporary_files import TemporaryFiles
from gristmill.engine.task import Stage, Task, outputs_of, paths_read_by
from gristmill.errors import InputError
from gristmill.io.files import STATE_DIR, reject_unfinished_files, rejects_name
from gristmill.paths import name_of
from gristmill.storage.files import remove_files, remove_folder
from gristmill.storage.listings import list_kept_again
from gristmill.storage.stores import store_of

_GOAL: TaskId = ("", "goal")  # the record of a stage as one task
HashFiles = Callable[[Sequence[Path]], dict[Path, str]]


class StageRecords:
    """The records of a run of a stage, kept in `ledger`, and the state of its inputs and outputs.

    A run goes through plan, begin, inputs_of and keep for each step, and ends with check_inputs and close.
    `reads` are the input folders and files; `hash_files` returns the SHA-256 of files that only their hash can tell.
    """

    def __init__(
        self,
        stage: Stage,
        ledger: Ledger,
        reads: tuple[Path, ...],
        marks: Marks,
        options: RunOptions,
        hash_files: HashFiles,
        inputs_vary: bool = False,
    ) -> None:
        self.stage = stage
        self.options = options
        self.ledger = ledger
        self.marks = marks
        self.name = ledger.file.stem
        self.work = ledger.root / STATE_DIR / f"{self.name}.work"
        self.done = DoneTasks(stage, ledger, self.work, options.accept_versions, options.retry_failed)
        self.owned = Ownership(self.done, reads, marks.files, inputs_vary)
        self.temporary = TemporaryFiles(self.done, self._list_folders_of)
        self._hash_files = hash_files
        self._goal: Task | None = None

    def open(self, listed: Listed) -> None:
        """Refuse an output that is another's, and input folders that are not complete: see reject_incomplete."""
        self.owned.reject_overlapping_calls()
        self.owned.reject_foreign_files(map(name_of, self.marks.files))
        self.check_listed(listed)

    def check_listed(self, listed: Listed) -> None:
        """Raise InputError for folders in which files are missing, or foreign: see reject_incomplete."""
        for folder, paths in listed.items():
            if paths is not None:
                reject_incomplete(folder, paths, self.done.tags)

    def find_goal(self, arguments: dict[str, Any], outputs: tuple[Path, ...]) -> Counts | None:
        """Return the counts of the stage if an earlier run wrote `outputs` from the same arguments, else None."""
        _, name = _GOAL
        self._goal = Task(name, find_nothing, arguments, outputs)
        self._check_files([self._goal])
        record = self.done.find("", self._goal, self.done.identity(self._goal))
        if record is None:
            return None
        self.done.records = {}
        for task, earlier in self.done.before.items():
            if not is_ahead(task):
                self.done.records[task] = earlier
        return record.counts

    def plan(self, step: str, tasks: Sequence[Task]) -> list[Task]:
        """Return the tasks of a step whose record is not there, or not true any more; keep the records of the others.

        Prints why they run, if that is asked for. Raises UsageError if a task would overwrite an input, InputError for
        inputs that are damaged or not finished.
        """
        self._list_folders_of(outputs_of(tasks))
        self.owned.check_outputs(tasks)
        self._check_files(tasks)
        stale = list[Task]()
        is_explained = self.options.explain or self.options.explain_tasks
        identities = dict[str, dict[str, str]]()
        for task in tasks:
            identity = self.done.plan(step, task)
            if is_explained:
                identities[task.name] = identity
            record = self.done.find(step, task, identity)
            if record is not None:
                self.done.keep(task, record, is_new=False)
            else:
                stale.append(task)
            self.temporary.add(step, task)
        if is_explained:
            names = [task.name for task in stale]
            before = dict[str, dict[str, str]]()
            for (earlier_step, name), earlier in self.done.before.items():
                if earlier_step == step:
                    before[name] = earlier.identity
            retried = {name for name in names if self.done.is_retried(step, name)}
            explain(self.stage.name, step, identities, before, names, retried, self.options.explain_tasks)
        self._note_versions(step, stale, len(tasks))
        return stale

    def _note_versions(self, step: str, stale: Sequence[Task], count: int) -> None:
        """Say that tasks run again as libraries have other versions, before they do; a whole run has said so itself."""
        if self.options.quiet or self.options.of_run:
            return
        pairs = list[tuple[DoneRecord, dict[str, str]]]()
        for task in stale:
            record = self.done.before.get((step, task.name))
            if record:
                pairs.append((record, self.done.planned[record.id]))
        note_outdated(step, pairs, count)

    def begin(self, step: str, tasks: Sequence[Task]) -> None:
        """Mark the output as unfinished, before tasks of a step run; record which files they are about to write."""
        self.owned.check_reads()
        self.marks.set()
        outputs = self._lasting_outputs(tasks)
        if outputs:
            self.owned.write_ahead(step, outputs)
            self._change_output()

    def inputs_of(self, step: str, task: Task) -> KnownInputs:
        """Return what is known of a task that is about to run."""
        return self.done.inputs_of(step, task)

    def keep(self, task: Task, record: DoneRecord) -> None:
        """Add the record of a task that has run."""
        self.done.keep(task, record)

    def forget_listings(self, tasks: Iterable[Task]) -> None:
        """Drop the listings of the folders that tasks have written to."""
        self.done.tags.forget({path.parent for path in outputs_of(tasks)})

    def result(self, step: str, tasks: Sequence[Task]) -> StepResult:
        """Return the records of the tasks of a step, all of which are done."""
        records = [self.done.records[step, task.name] for task in tasks]
        return StepResult(records, self.ledger.root)

    def has_run(self, step: str, task: str) -> bool:
        """Return whether a task was done in this or an earlier run, maybe with another outcome."""
        return (step, task) in self.done.records or (step, task) in self.done.before

    def note(self, name: str, counts: Counts) -> None:
        """Record counts that are of no task."""
        record = DoneRecord("", name, {}, [], counts)
        self.done.is_changed |= self.done.before.get(record.id) != record
        self.done.records[record.id] = record

    def check_inputs(self) -> None:
        """Raise InputError if an input is not as it was, as tasks may have read one thing and another."""
        list_kept_again()
        reject_unfinished_files(self.done.seen, self.name, self.marks.folders)
        changed = self.done.changed_inputs()
        if changed:
            raise InputError(f"{changed[0]} was changed while {self.stage.name} worked: run the same command again")

    def close(self, counts: Counts) -> None:
        """Remove outputs that were not planned now, compact the ledger, and remove the marks.

        Raises TooManyMalformed; then the output stays marked as unfinished.
        """
        stale = self.owned.stale_tasks()
        for path in self.owned.stale_files():
            self._change_output()
            remove_files([path], self.ledger.root)
        try:
            counts.check_malformed(self.stage.name, self.options.max_malformed)
        except Exception:
            self.marks.stay = True
            self.marks.set("found more malformed or damaged input than --max_malformed allows")
            raise
        self._record_goal(counts)
        ahead = self.owned.ahead_records()
        reads = self.owned.record_reads(self.marks.stay)
        if self.done.is_changed or stale or ahead or reads[READS] != self.done.before.get(READS):
            self.done.records |= reads
            self.ledger.compact(self.done.records.values(), [*stale, *ahead])
        self.ledger.announce(self.marks.folders)
        remove_folder(self.work)
        self.done.remove_leftovers()
        self.marks.remove()
        if not (self.options.quiet or self.options.of_run):
            note_kept(self.stage.name, self.done.kept_versions)

    def _record_goal(self, counts: Counts) -> None:
        """Record the stage as one task, if it asked for that and has run."""
        if self._goal is None or _GOAL in self.done.records:
            return
        outputs = [self.done.written[name_of(path)] for path in self._goal.outputs]
        identity = self.done.identity(self._goal)
        self.done.is_changed = True
        self.done.records[_GOAL] = DoneRecord(*_GOAL, identity, outputs, counts)

    def _change_output(self) -> None:
        """Refuse another input's output, and mark it as unfinished for good, before its first change."""
        if not self.marks.stay:
            self.owned.check_reads()
            self.marks.set()
            self.marks.stay = True
            self.done.is_changed = True
            self.done.records |= self.owned.record_reads(is_changed=True)

    def _lasting_outputs(self, tasks: Iterable[Task]) -> list[Path]:
        """Return the outputs of tasks that are not temporary."""
        return [path for path in outputs_of(tasks) if not self.done.is_temporary(path)]

    def _list_folders_of(self, paths: Iterable[Path]) -> None:
        """List the folders of some files of a bucket, where they are many: see FileTags.list_together."""
        if store_of(self.ledger.root).needs_copies:
            self.done.tags.list_together(paths, [self.work, *self.marks.folders, self.ledger.root])

    def _check_files(self, tasks: Sequence[Task]) -> None:
        """Refuse marked and damaged inputs; hash files of the recorded size and another time, such as copies."""
        inputs = [path for path in paths_read_by(tasks) if not self.done.is_own(path)]
        reject_unfinished_files(inputs, self.name, self.marks.folders)
        outputs = list(map(name_of, self._lasting_outputs(tasks)))
        touched = self.done.tags.touched([*inputs, *outputs, *map(rejects_name, outputs)])
        for path, sha256 in self._hash_files(touched).items():
            self.done.tags.set_hash(path, sha256)
        reject_changed(inputs, self.done.tags, self.ledger)


def find_nothing() -> None:
    """Task: none; a goal is never run."""
