"""A run of a stage: plans steps, skips the tasks that are done, runs the others, and accounts for all of them.

    with open_stage(STAGE, target_dir, options, reads=[data_dir], publishes=[target_dir]) as run:
        slices = cut_corpus(run, files)                       # a step, whose values plan the next one
        return run.finish(run.step("normalize", [slice_task(part) for part in slices]).counts)

A task is skipped only if its done record has the same identity (content of the inputs, arguments, versions) and its
outputs are as recorded. Files in `run.work` are temporary: removed at the end, and written again if a task needs them.
"""

import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from gristmill.budget import Budget
from gristmill.counts import Counts
from gristmill.engine.claims import Claims, Marks
from gristmill.engine.executors.local import Call, LocalExecutor
from gristmill.engine.lock import stage_lock
from gristmill.engine.options import RunOptions
from gristmill.engine.records import DoneRecord, Ledger, OutputRecord, StepResult, TaskId
from gristmill.engine.report import explain, print_summary, progress_bar
from gristmill.engine.tags import FileTags, matches
from gristmill.engine.task import FileSet, Stage, Task, identify, paths_read_by
from gristmill.engine.worker import run_task
from gristmill.io.files import STATE_DIR, reject_unfinished_files, rejects_path, remove_partial_files, sha256_file
from gristmill.storage.files import file_info, remove_files, remove_folder

GOAL: TaskId = ("", "goal")  # the record of a whole stage


@dataclass
class StageRun:
    """A run of a stage in progress; see open_stage."""

    stage: Stage
    ledger: Ledger
    name: str  # of the stage, its output and its selection: for locks, marks and temporary files
    options: RunOptions
    executor: LocalExecutor
    claims: Claims
    marks: Marks
    started: float = field(default_factory=time.perf_counter)
    tags: FileTags = field(default_factory=FileTags)
    ran: int = 0  # tasks
    _done: dict[TaskId, DoneRecord] = field(default_factory=dict)
    _written: dict[Path, OutputRecord] = field(default_factory=dict)  # outputs of done tasks, by absolute path
    _producers: dict[Path, tuple[str, Task]] = field(default_factory=dict)  # of temporary files
    _set_tags: dict[FileSet, str] = field(default_factory=dict)
    _goal: Task | None = None
    _claimed: list[TaskId] = field(default_factory=list)  # records of outputs about to be written
    _has_begun: bool = False  # to change the output
    _is_changed: bool = False  # the records

    def __post_init__(self) -> None:
        self._work_prefix = os.path.abspath(self.work) + os.sep
        self._before = self.ledger.read()
        self.tags.own = self.ledger.outputs()
        self._known = set(map(Path, self.tags.own))

    @property
    def work(self) -> Path:
        """Folder for temporary outputs, which are removed when the stage ends."""
        return self.ledger.root / STATE_DIR / f"{self.name}.work"

    def goal(self, arguments: dict[str, Any], outputs: tuple[Path, ...]) -> Counts | None:
        """The counts of the whole stage if an earlier run wrote `outputs` from the same arguments, else None.

        For a stage whose steps depend on the budget: the plan of a finished one may differ now, its result does not.
        """
        self._goal = Task(GOAL[1], explain, arguments, outputs)
        self._check_files(self._goal)
        record = self._before.get(GOAL)
        if record and self._is_done(self._goal, identify(self._goal, self.stage.identity, self._tag), record):
            self._done = dict(self._before)
            return record.counts
        return None

    def step(self, name: str, tasks: Iterable[Task]) -> StepResult:
        """Run the tasks that are not done; return the records of all.

        Raises ConservationError if the counts of a task do not add up, UsageError if a task would overwrite an input.
        """
        tasks = list(tasks)
        assert len({task.name for task in tasks}) == len(tasks), f"{name}: names of tasks repeat"
        self.claims.check_outputs(tasks, set(self._written))
        self._check_files(*tasks)
        todo = []
        for task in tasks:
            identity, record = identify(task, self.stage.identity, self._tag), self._before.get((name, task.name))
            if record and self._is_done(task, identity, record):
                self._keep(task, self._refresh(task, record))
            else:
                todo.append(task)
            for path in filter(self._is_temporary, task.outputs):
                self._producers |= {path.absolute(): (name, task), rejects_path(path.absolute()): (name, task)}
            if self.options.explain and todo and todo[-1] is task:
                explain(self.stage.name, task, identity, record)
        if todo:
            self._check_reads()
            self.marks.set()
            if outputs := [path for task in todo for path in task.outputs if not self._is_temporary(path)]:
                self._claimed.append(self.claims.claim_outputs(self.ledger, name, outputs, self._known))
                self._begin()
            self._restore_inputs(todo)
            self._execute(name, todo)
        return StepResult([self._done[name, task.name] for task in tasks])

    def note(self, name: str, counts: Counts) -> Counts:
        """Record counts that are of no task in the ledger, such as those of files that are not read; return them."""
        record = DoneRecord("", name, {}, [], counts)
        self._is_changed |= self._before.get(record.id) != record
        self._done[record.id] = record
        return counts

    def finish(self, counts: Counts) -> Counts:
        """End the stage: remove outputs that were not planned now, compact the ledger, print the summary.

        Raises TooManyMalformed, which leaves the output marked as unfinished.
        """
        stale = self.claims.stale(self._before, self._done)
        for path in self.claims.stale_files(self.ledger, stale, self._before, self._done):
            self._begin()
            remove_files([path])
        try:
            counts.check_malformed(self.stage.name, self.options.max_malformed)
        except Exception:
            self.marks.is_output_changed = True
            self.marks.set("found more malformed or damaged input than --max_malformed allows")
            raise
        if self._goal and self._done.get(GOAL) is None:
            outputs = [self._written[path.absolute()] for path in self._goal.outputs]
            identity, self._is_changed = identify(self._goal, self.stage.identity, self._tag), True
            self._done[GOAL] = DoneRecord(*GOAL, identity, outputs, counts)
        reads = self.claims.record_reads(self.ledger, self._before | self._done)
        left = self.claims.old_claims(self._before)
        if self._is_changed or stale or reads or left:
            self._done |= reads
            self.ledger.compact(self._done.values(), [*stale, *self._claimed, *left])
        remove_folder(self.work)
        self.marks.remove()
        if not self.options.quiet:
            tasks = sum(1 for step, _ in self._done if step)
            print_summary(self.stage.name, counts, self.ran, tasks, time.perf_counter() - self.started)
        return counts

    def _begin(self) -> None:
        """Called before the first change of the output: refuse another input's output, and mark it as unfinished."""
        if self._has_begun:
            return
        self._check_reads()
        self.marks.set()
        self.marks.is_output_changed = True
        self._done |= self.claims.record_reads(self.ledger, self._before)
        self._has_begun = self._is_changed = True

    def _check_reads(self) -> None:
        """Refuse to replace the output of another input."""
        before, done = (any(r.outputs for (step, _), r in of.items() if step) for of in (self._before, self._done))
        self.claims.check_reads(self.ledger, self._before if before else {}, is_same=done)

    def _execute(self, step: str, tasks: Sequence[Task]) -> None:
        identities = [identify(task, self.stage.identity, self._tag) for task in tasks]  # before inputs are read
        remove_partial_files(path for task in tasks for path in task.outputs)
        budget = Budget.of(self.options.memory_bytes, min(self.options.processes, len(tasks)))
        calls = [
            Call(run_task, {
                "step": step, "task": task, "identity": identity, "ledger": self.ledger, "budget": budget,
                "inputs": self.tags.states(path for path in task.inputs if path not in self._written),
            })
            for task, identity in zip(tasks, identities, strict=True)
        ]  # fmt: skip
        with progress_bar(f"{self.stage.name}: {step}", tasks, self.options.quiet) as advance:
            for position, record in self.executor.run(calls):
                self._keep(tasks[position], record)
                self.ran += 1
                self._is_changed = True
                advance(tasks[position].size)
        self.tags.forget({path.absolute().parent for task in tasks for path in task.outputs})

    def _restore_inputs(self, todo: list[Task]) -> None:
        """Run again the tasks whose temporary outputs are needed and were removed at the end of an earlier run."""
        needed: dict[str, dict[str, Task]] = {}
        while todo:
            paths, todo = paths_read_by(todo), []
            for path in paths:
                step, task = self._producers.get(path.absolute(), ("", None))
                if task and task.name not in needed.get(step, {}) and not self._is_present(path):
                    needed.setdefault(step, {})[task.name] = task
                    todo.append(task)
        for step in dict.fromkeys(step for step, _ in self._producers.values()):
            if step in needed:
                self._execute(step, list(needed[step].values()))

    def _is_done(self, task: Task, identity: dict[str, str], record: DoneRecord) -> bool:
        """Whether a record is of this very task, and its outputs are as recorded."""
        paths = [*task.outputs, *map(self.ledger.path, record.outputs[len(task.outputs) :])]
        return (
            record.identity == identity
            and len(paths) == len(record.outputs)
            and all(self._is_intact(path, output) for path, output in zip(paths, record.outputs, strict=True))
        )

    def _is_intact(self, path: Path, output: OutputRecord) -> bool:
        """Whether a file is as recorded; a temporary one may be gone: _restore_inputs sees to those that are needed."""
        return self._is_temporary(path) or self.tags.of(path) == output.sha256

    def _is_present(self, path: Path) -> bool:
        """Whether a temporary file is there, as recorded, and not one that a killed run left with other arguments."""
        output, found = self._written.get(path.absolute()), file_info(path)
        return found is not None and (output is None or matches(found, output))

    def _refresh(self, task: Task, record: DoneRecord) -> DoneRecord:
        """The record with the present modification times of outputs that were copied or touched."""
        for i, path in enumerate(task.outputs):
            found, output = self.tags.stat(path.absolute()), record.outputs[i]
            if found and not matches(found, output) and not self._is_temporary(path):
                record.outputs[i] = msgspec.structs.replace(output, mtime_ns=found.mtime_ns, e_tag=found.e_tag)
                self._is_changed = True
        return record

    def _keep(self, task: Task, record: DoneRecord) -> None:
        """Add a record to those of this run."""
        self._done[record.id] = record
        self._known |= {path.absolute() for path in task.outputs}
        self._written |= {path.absolute(): out for path, out in zip(task.outputs, record.outputs, strict=False)}

    def _check_files(self, *tasks: Task) -> None:
        """Refuse marked inputs; hash files with their recorded size and another modification time, such as copies."""
        paths = list(paths_read_by(tasks))
        reject_unfinished_files(paths, self.name)
        paths += [path for task in tasks for path in task.outputs]
        touched = self.tags.touched(path for path in paths if not self._is_temporary(path))
        for position, sha256 in self.executor.run([Call(sha256_file, {"path": path}) for path in touched]):
            self.tags.set_hash(touched[position], sha256)

    def _tag(self, found: Path | FileSet) -> str:
        if isinstance(found, FileSet):
            if found not in self._set_tags:
                tags = "\n".join(f"{path.name} {self._tag(path)}" for path in found.paths)
                self._set_tags[found] = hashlib.sha256(tags.encode()).hexdigest()
            return self._set_tags[found]
        written = self._written.get(found.absolute())
        return written.sha256 if written else self.tags.of(found)

    def _is_temporary(self, path: Path) -> bool:
        return os.path.abspath(path).startswith(self._work_prefix)


@contextmanager
def open_stage(
    stage: Stage,
    root: Path,
    options: RunOptions,
    *,
    label: str = "",
    selection: str = "",
    plans: str | None = "",
    reads: Sequence[Path] = (),
    publishes: Sequence[Path] = (),
    files: Sequence[Path] = (),
    is_alone: bool = False,
) -> Iterator[StageRun]:
    """Context: a run of a stage, alone with its output; another process that runs it waits.

    Args:
        stage, options: Its name and versions; workers, memory and limits.
        root: Folder whose `.gristmill` holds the ledger; most outputs are in it.
        label: Name of the output, where several calls write different files to one folder.
        selection: Part of the work that this call does, such as a data set, beside others that do other parts.
            PART/SHARE or /SHARE for a share of the files, whose input folders are the same.
        plans: Prefix of the names of tasks that this call plans completely: outputs of others are removed; None: keep.
        reads: The input folders, or files; if an earlier run with others wrote this output, the run is refused.
        publishes: Folders that later stages read as a whole; marked as unfinished until the end.
        files: Files of one folder that later stages read one by one; marked as unfinished until the end.
        is_alone: Whether calls that do other parts of the work wait, too.
    """
    options.check()
    state, name = root / STATE_DIR, f"{stage.name}-{label}" if label else stage.name
    run_name = f"{name}-{selection.strip('/').replace('/', '-')}" if selection else name
    whole, lock = state / f"{name}.lock", state / f"{name if is_alone else run_name}.lock"
    with ExitStack() as stack:
        if lock != whole:
            stack.enter_context(stage_lock(whole, options.quiet, shared=True))
        stack.enter_context(stage_lock(lock, options.quiet, whole=lock == whole))
        executor = stack.enter_context(LocalExecutor(options.processes, lock))
        claims = Claims(selection, plans, tuple(reads), tuple(files))
        marks = stack.enter_context(Marks(run_name, not selection, tuple(publishes), tuple(files)))
        yield StageRun(stage, Ledger(state, name), run_name, options, executor, claims, marks)
