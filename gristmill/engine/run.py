"""A run of a stage: plans steps, skips the tasks that are done, runs the others, and accounts for all of them.

    with open_stage(STAGE, target_dir, options, reads={data_dir: paths}, publishes=[target_dir]) as run:
        slices = cut_corpus(run, files)                       # a step, whose values plan the next one
        return run.finish(run.step("normalize", [slice_task(part) for part in slices]).counts)

A task is skipped only if its done record has the same identity (content of the inputs, arguments, versions) and its
outputs are as recorded. Files in `run.work` are temporary: removed at the end, and written again if a task needs them.
"""

import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain, product
from pathlib import Path
from typing import Any

import msgspec

from gristmill.budget import Budget, memory_budget
from gristmill.counts import Counts
from gristmill.engine.done_tasks import DoneTasks
from gristmill.engine.executors.context import ExecutionContext, open_execution_context
from gristmill.engine.executors.local import Call, Calls, hash_files
from gristmill.engine.executors.staging import Scratch, staged
from gristmill.engine.ledger import CLAIMS, READS, DoneRecord, Ledger, OutputRecord, StepResult, TaskId, run_name
from gristmill.engine.lineage import Listed, reject_changed, reject_incomplete
from gristmill.engine.options import RunOptions, words_of_work
from gristmill.engine.outputs import Marks, Ownership, reject_overlapping_folders
from gristmill.engine.report import print_summary, step_progress
from gristmill.engine.reruns import explain, note_kept, note_outdated
from gristmill.engine.task import Result, Stage, Task, paths_read_by
from gristmill.errors import InputError, wrap_read_errors
from gristmill.io.files import PART, STATE_DIR, reject_unfinished_files, rejects_name
from gristmill.paths import absolute, name_of
from gristmill.processes import processor_seconds
from gristmill.storage.files import (
    FileInfo,
    file_info,
    listed_once,
    reject_read_only,
    reject_unknown_scheme,
    remove_files,
    remove_folder,
    remove_partial_files,
    resolved,
)
from gristmill.storage.listings import list_kept_again
from gristmill.storage.local import flush_later
from gristmill.storage.lock import stage_lock
from gristmill.storage.stores import store_of

GOAL: TaskId = ("", "goal")  # the record of a stage as one task
_MANY_FOLDERS = 8  # of a bucket; more are listed at once


@dataclass
class StageRun:
    """A run of a stage in progress; see open_stage."""

    stage: Stage
    ledger: Ledger
    options: RunOptions
    place: ExecutionContext
    reads: tuple[Path, ...]
    marks: Marks
    inputs_vary: bool = False
    started: float = field(default_factory=time.perf_counter)
    ran: int = 0  # tasks
    _producers: dict[str, tuple[str, Task]] = field(default_factory=dict)  # of temporary files
    _goal: Task | None = None
    _claimed: list[TaskId] = field(default_factory=list)  # records of outputs about to be written

    def __post_init__(self) -> None:
        self.done = DoneTasks(self.stage, self.ledger, self.work, self.options.accept_versions)
        self.owned = Ownership(self.done, self.reads, self.marks.files, self.inputs_vary)

    @property
    def name(self) -> str:
        """Return the unique name of this run, used for locks, marks and temporary files."""
        return self.ledger.file.stem

    @property
    def output(self) -> str:
        """Return the name without the part of the work."""
        return self.name.partition(PART)[0]

    @property
    def work(self) -> Path:
        """Return the folder for temporary outputs, which are removed when the stage ends."""
        return self.ledger.root / STATE_DIR / f"{self.name}.work"

    def goal(self, arguments: dict[str, Any], outputs: tuple[Path, ...]) -> Counts | None:
        """Return the counts of the stage if an earlier run wrote `outputs` from the same arguments, else None.

        For a stage whose steps depend on the budget: the plan of a finished one may differ now, its result does not.
        """
        self._goal = Task(GOAL[1], explain, arguments, outputs)
        self._check_files(self._goal)
        record = self.done.find(GOAL[0], self._goal, self.done.identity(self._goal))
        if record is None:
            return None
        self.done.records = {}
        for task, earlier in self.done.before.items():
            step, name = task
            if step or not name.startswith(CLAIMS):
                self.done.records[task] = earlier
        return record.counts

    def step(self, name: str, tasks: Iterable[Task]) -> StepResult:
        """Run the tasks that are not done; return the records of all.

        Raises ConservationError if the counts of a task do not add up, UsageError if a task would overwrite an input.
        """
        tasks = list(tasks)
        assert len({task.name for task in tasks}) == len(tasks), f"{name}: names of tasks repeat"
        self._list_folders_of(path for task in tasks for path in task.outputs)
        self.owned.check_outputs(tasks)
        self._check_files(*tasks)
        todo = self._tasks_to_run(name, tasks)
        self._note_versions(name, todo, len(tasks))
        if todo:
            self.owned.check_reads()
            self.place.check_lock()
            self.marks.set()
            outputs = self._lasting_outputs(todo)
            if outputs:
                self._claimed.append(self.owned.claim(name, outputs))
                self._begin()
            self._restore_inputs(todo)
            self._execute(name, todo)
        return StepResult([self.done.records[name, task.name] for task in tasks])

    def _list_folders_of(self, paths: Iterable[Path]) -> None:
        """List many folders of a bucket that have files of this stage at once: each by itself would take a request."""
        if not store_of(self.ledger.root).needs_copies:
            return
        tops = list(map(name_of, (self.work, *self.marks.folders, self.ledger.root)))
        folders_in: dict[str, set[str]] = {top: set() for top in tops}
        for name in map(name_of, paths):
            top = next((top for top in tops if name.startswith(f"{top}/")), None)
            if top is not None:
                folders_in[top].add(name.rpartition("/")[0])
        for folders in folders_in.values():
            if len(folders) > _MANY_FOLDERS:
                self.done.tags.list_whole(os.path.commonpath(folders))

    def _tasks_to_run(self, step: str, tasks: Sequence[Task]) -> list[Task]:
        """Return the tasks that are not done; print why they run, if that is asked for."""
        todo = list[Task]()
        is_explained = self.options.explain or self.options.explain_tasks
        identities = dict[str, dict[str, str]]()
        for task in tasks:
            identity = self.done.plan(step, task)
            if is_explained:
                identities[task.name] = identity
            record = self.done.find(step, task, identity)
            if record:
                self.done.keep(task, record, is_new=False)
            else:
                todo.append(task)
            for path in filter(self.done.is_temporary, task.outputs):
                name = name_of(path)
                self._producers[name] = (step, task)
                self._producers[rejects_name(name)] = (step, task)
        if is_explained:
            names = [task.name for task in todo]
            before = {name: record.identity for (of_step, name), record in self.done.before.items() if of_step == step}
            explain(self.stage.name, step, identities, before, names, self.options.explain_tasks)
        return todo

    def _note_versions(self, step: str, todo: Sequence[Task], count: int) -> None:
        """Say that tasks run again as libraries have other versions, before they do; a whole run has said so itself."""
        if self.options.quiet or self.options.of_run:
            return
        records = [self.done.before.get((step, task.name)) for task in todo]
        pairs = [(record, self.done.planned[record.id]) for record in records if record]
        note_outdated(step, pairs, count)

    def _lasting_outputs(self, tasks: Iterable[Task]) -> list[Path]:
        """Return the outputs of tasks that are not temporary."""
        outputs = list[Path]()
        for task in tasks:
            outputs += [path for path in task.outputs if not self.done.is_temporary(path)]
        return outputs

    def check_listed(self, listed: Listed) -> None:
        """Refuse input folders in which files are missing, or foreign: see reject_incomplete."""
        for folder, paths in listed.items():
            if paths is not None:
                reject_incomplete(folder, paths, self.done.tags)

    def tag(self, path: Path) -> str:
        """Return the content tag of a file (see lineage.py), which is noted as read."""
        self.done.note_read(name_of(path))
        return self.done.tags.of(path)

    def has_run(self, step: str, task: str) -> bool:
        """Return whether a task was done in this or an earlier run, maybe with another outcome."""
        task_id = (step, task)
        return task_id in self.done.records or task_id in self.done.before or task_id in self.done.of_others

    def records_of_others(self) -> list[DoneRecord]:
        """Return the records of calls that did other parts of the stage's work, or all of it, as they are now."""
        if self.ledger.others:
            self.done.read_again()
        return list(chain.from_iterable(self.done.of_others.values()))

    def note(self, name: str, counts: Counts) -> Counts:
        """Record counts that are of no task in the ledger, such as those of files that are not read; return them."""
        record = DoneRecord("", name, {}, [], counts)
        self.done.is_changed |= self.done.before.get(record.id) != record
        self.done.records[record.id] = record
        return counts

    def finish(self, counts: Counts) -> Counts:
        """End the stage: remove outputs that were not planned now, compact the ledger, print the summary.

        Raises TooManyMalformed, and InputError if an input is not as it was: the output stays marked as unfinished.
        """
        self.place.check_lock()
        if self.ran:
            self._reject_changed_inputs()
        stale = self.owned.stale_tasks()
        for path in self.owned.stale_files():
            self._begin()
            remove_files([path], self.ledger.root)
        try:
            counts.check_malformed(self.stage.name, self.options.max_malformed)
        except Exception:
            self.marks.stay = True
            self.marks.set("found more malformed or damaged input than --max_malformed allows")
            raise
        if self._goal and self.done.records.get(GOAL) is None:
            outputs = [self.done.written[name_of(path)] for path in self._goal.outputs]
            identity = self.done.identity(self._goal)
            self.done.is_changed = True
            self.done.records[GOAL] = DoneRecord(*GOAL, identity, outputs, counts)
        reads = self.owned.record_reads(self.marks.stay)
        if self.done.is_changed or stale or reads[READS] != self.done.before.get(READS):
            self.done.records |= reads
            self.ledger.compact(self.done.records.values(), [*stale, *self._claimed])
        self.ledger.announce(self.marks.folders)
        remove_folder(self.work)
        self.done.remove_leftovers()
        self.marks.remove()
        if not self.options.quiet:
            if not self.options.of_run:
                note_kept(self.stage.name, self.done.kept_versions)
            tasks = sum(1 for step, _ in self.done.records if step)
            print_summary(self.stage.name, counts, self.ran, tasks, time.perf_counter() - self.started)
        return counts

    def _reject_changed_inputs(self) -> None:
        """Raise InputError if an input is not as it was, as tasks may have read one thing and another."""
        list_kept_again()
        reject_unfinished_files(self.done.seen, self.name, self.marks.folders)
        changed = self.done.changed_inputs()
        if changed:
            raise InputError(f"{changed[0]} was changed while {self.stage.name} worked: run the same command again")

    def _begin(self) -> None:
        """Refuse another input's output, and mark it as unfinished, before the first change of the output."""
        if not self.marks.stay:
            self.owned.check_reads()
            self.marks.set()
            self.marks.stay = True
            self.done.is_changed = True
            self.done.records |= self.owned.record_reads(is_changed=True)

    def _execute(self, step: str, tasks: Sequence[Task]) -> None:
        """Run tasks, and keep their records as they end."""
        outputs = list[Path]()
        for task in tasks:
            outputs += task.outputs
        if not self.place.scratch.is_private:
            remove_partial_files(outputs)
        budget = Budget.of(self.options.memory_bytes, min(self.options.processes, len(tasks)))
        common = {"step": step, "ledger": self.ledger, "scratch": self.place.scratch, "budget": budget}

        def call(task: Task) -> Call:  # the inputs are as they were when the step was planned
            return Call(run_task, common | {"task": task, **self.done.found(step, task)}, task.foreign)

        with step_progress(f"{self.stage.name}: {step}", tasks, self.options, self.name, self.ledger) as advance:
            retried = self.place.executor.retried
            for position, record in self.place.executor.run(Calls(tasks, call)):
                record.retries = self.place.executor.retried - retried
                retried = self.place.executor.retried
                self.done.keep(tasks[position], record)
                self.ran += 1
                advance(tasks[position].size, self.place.executor.retried)
        self.done.tags.forget({path.parent for path in outputs})

    def _restore_inputs(self, todo: list[Task]) -> None:
        """Run again the tasks whose temporary outputs are needed and were removed at the end of an earlier run."""
        needed: dict[str, dict[str, Task]] = {}
        while todo:
            paths = list(paths_read_by(todo))
            self._list_folders_of(path for path in paths if name_of(path) in self._producers)
            todo = []
            for path in paths:
                step, task = self._producers.get(name_of(path), ("", None))
                if task and task.name not in needed.get(step, {}) and not self.done.is_present(path):
                    needed.setdefault(step, {})[task.name] = task
                    todo.append(task)
        for step in dict.fromkeys(step for step, _ in self._producers.values()):
            if step in needed:
                self._execute(step, list(needed[step].values()))

    def _check_files(self, *tasks: Task) -> None:
        """Refuse marked and damaged inputs; hash files of the recorded size and another time, such as copies."""
        inputs = [path for path in paths_read_by(tasks) if not self.done.is_own(path)]
        reject_unfinished_files(inputs, self.name, self.marks.folders)
        outputs = list(map(name_of, self._lasting_outputs(tasks)))
        touched = self.done.tags.touched([*inputs, *outputs, *map(rejects_name, outputs)])
        for path, sha256 in hash_files(self.place.executor, touched).items():
            self.done.tags.set_hash(path, sha256)
        reject_changed(inputs, self.done.tags, self.ledger)


@contextmanager
def open_stage(
    stage: Stage,
    root: Path,
    options: RunOptions,
    *,
    reads: Listed | Sequence[Path] = (),
    publishes: Sequence[Path] = (),
    files: Sequence[Path] = (),
    label: str = "",
    part: str = "",
    inputs_vary: bool = False,
) -> Iterator[StageRun]:
    """Yield a run of a stage, alone with its output; another process that runs it waits.

    Raises UsageError if an input folder is one of `publishes`, or one of the two lies in the other.

    Args:
        stage: Its name and versions.
        root: Folder with the ledger in its `.gristmill`; most outputs are in it.
        options: Workers, memory and limits.
        reads: The input folders and files; if an earlier run with others wrote this output, the run is refused. Or, by
            folder, the files that were found in it; refused if they are not what the stages that wrote there recorded.
        publishes: Folders that later stages read, each as one corpus; marked as unfinished until the end.
        files: Files of one folder that later stages read one by one; marked as unfinished until the end.
        label: Name of the output, where several calls write different files to one folder.
        part: Part of the work that this call does, such as the data set `book`, or `book/0-10`, files of it. It has a
            ledger of its own; a call for all of it takes over those of all parts.
        inputs_vary: The inputs are a list from which some may be taken and to which some may be added, such as the
            sources of a run; an output is refused only where it was made of none of them.
    """
    options.check()
    for source, target in product(reads, publishes):
        reject_overlapping_folders(source, target)
    reject_read_only([root, *publishes, *files])
    reject_unknown_scheme(root)
    if ".." in root.parts:
        root = absolute(root)
    state = root / STATE_DIR
    ledger = Ledger(state, run_name(stage.name, label, part))
    name = ledger.file.stem
    may_share = store_of(state).has_file_locks  # else a call for a part excludes all others
    lock_name = name if may_share else run_name(stage.name, label)
    lock = state / f"{lock_name}.lock"
    paths = [str(resolved(path)) for path in (*reads, *publishes, *files)]
    work = " ".join([name, *words_of_work(sys.argv[1:]), *paths])
    with ExitStack() as stack:
        for above in reversed(ledger.wholes if may_share else []):
            stack.enter_context(stage_lock(above.file.with_suffix(".lock"), options.quiet, shared=True))
        place = stack.enter_context(open_execution_context(options, lock, work))
        stack.enter_context(_listed_once(reads, [root, *publishes, *files]))
        ledger.take_over(part)
        marks = stack.enter_context(Marks(name, tuple(publishes), tuple(files)))
        run = StageRun(stage, ledger, options, place, tuple(reads), marks, inputs_vary)
        run.owned.reject_foreign_files(map(name_of, files))
        if isinstance(reads, Mapping):
            run.check_listed(reads)
        yield run


def _listed_once(reads: Listed | Sequence[Path], written: Sequence[Path]) -> AbstractContextManager[None]:
    """Return a context in which each input folder in a bucket is listed once, unless something is written there."""
    outputs = list(map(absolute, written))
    folders = list[Path]()
    if isinstance(reads, Mapping):
        for folder, paths in reads.items():
            is_written = any(output.is_relative_to(absolute(folder)) for output in outputs)
            if paths is not None and not is_written:
                folders.append(folder)
    return listed_once(*folders)


def run_task(
    step: str,
    task: Task,
    identity: dict[str, str],
    ledger: Ledger,
    inputs: Mapping[Path, FileInfo],
    hashes: Mapping[Path, str],
    scratch: Scratch | None = None,
    budget: Budget | None = None,
) -> DoneRecord:
    """Run one task and write its done record, in a worker process; `scratch` is for tasks that are staged.

    `budget` is the memory of the worker, within which records are read.

    Raises ConservationError, the task's errors, and InputError if one of the `inputs` is not as it was when the
    task was identified, before or after the task has read it, or the copy of an object has another SHA-256 than
    `hashes` gives.
    """
    in_place = {path: info for path, info in inputs.items() if not store_of(path).needs_copies}
    began = processor_seconds()
    memory = {} if task.memory is None else {"memory": task.memory}
    with staged(task, inputs, scratch, hashes) as copy:
        _reject_changed(in_place, ledger)
        with memory_budget(budget), flush_later():
            result = copy.run(**memory)
        _reject_changed(in_place, ledger)
        if not isinstance(result, Result):
            result = Result(result or Counts({}, []), None)
        counts = copy.name_objects(result.counts)
        counts.check_conserved(f"{ledger.file.stem} {task.name}")
        outputs = list[OutputRecord]()
        for path, info, sha256 in copy.publish(task.outputs):
            outputs.append(OutputRecord(ledger.relative(path), info.size, info.mtime_ns, sha256, info.e_tag))
    spent = round(processor_seconds() - began, 3)
    value = msgspec.to_builtins(result.value)
    record = DoneRecord(step, task.name, identity, outputs, counts, value, spent)
    ledger.write(record)
    return record


def _reject_changed(inputs: Mapping[Path, FileInfo], ledger: Ledger) -> None:
    for path, seen in inputs.items():
        if file_info(path) != seen:
            with wrap_read_errors(path):
                path.stat()
            raise InputError(f"{path} was changed while {ledger.file.stem} worked: run the same command again")
