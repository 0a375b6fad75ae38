"""A run of a stage: plans steps, finds which tasks are stale, executes them, records and publishes what they wrote.

    with open_stage(STAGE, target_dir, options, reads={data_dir: paths}, publishes=[target_dir]) as run:
        slices = cut_corpus(run, files)                       # a step, whose values plan the next one
        return run.finish(run.step("normalize", [slice_task(part) for part in slices]).counts)

Two halves do the work and do not know each other. `staleness` answers whether the record of a task is still true: the
same content of the inputs, arguments and versions, and outputs as recorded. `execution` runs tasks, in this process, in
workers, on other machines. Files in `run.work` are temporary: removed at the end, written again if a task needs them.
"""

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from gristmill.budget import Budget
from gristmill.counts import Counts
from gristmill.engine.execution import task_run
from gristmill.engine.execution.call import Call, Calls
from gristmill.engine.execution.context import ExecutionContext, open_execution_context
from gristmill.engine.execution.local import hash_files
from gristmill.engine.execution.progress import step_progress
from gristmill.engine.execution.staging import RecordedObjectChanged
from gristmill.engine.execution.task_run import TaskRun
from gristmill.engine.options import RunOptions, words_of_work
from gristmill.engine.report import print_summary
from gristmill.engine.staleness.ledger import Ledger, run_name
from gristmill.engine.staleness.lineage import Listed, changed_input, missing_input
from gristmill.engine.staleness.marks import Marks
from gristmill.engine.staleness.outputs import reject_overlapping_folders
from gristmill.engine.staleness.records import DoneRecord, OutputRecord, StepResult
from gristmill.engine.staleness.stage_records import StageRecords
from gristmill.engine.task import Stage, Task, outputs_of
from gristmill.io.files import PART, STATE_DIR
from gristmill.paths import absolute, name_of
from gristmill.storage.files import (
    listed_once,
    reject_read_only,
    reject_unknown_scheme,
    remove_partial_files,
    resolved,
)
from gristmill.storage.lock import stage_lock
from gristmill.storage.stores import store_of


@dataclass
class StageRun:
    """A run of a stage in progress; see open_stage."""

    stage: Stage
    options: RunOptions
    records: StageRecords
    execution: ExecutionContext
    started: float = field(default_factory=time.perf_counter)
    ran: int = 0  # tasks

    @property
    def ledger(self) -> Ledger:
        """Return the ledger of the run."""
        return self.records.ledger

    @property
    def name(self) -> str:
        """Return the unique name of this run, used for locks, marks and temporary files."""
        return self.records.name

    @property
    def output(self) -> str:
        """Return the name without the part of the work."""
        return self.name.partition(PART)[0]

    @property
    def work(self) -> Path:
        """Return the folder for temporary outputs, which are removed when the stage ends."""
        return self.records.work

    def goal(self, arguments: dict[str, Any], outputs: tuple[Path, ...]) -> Counts | None:
        """Return the counts of the stage if an earlier run wrote `outputs` from the same arguments, else None.

        For a stage whose steps depend on the budget: the plan of a finished one may differ now, its result does not.
        """
        return self.records.find_goal(arguments, outputs)

    def step(self, name: str, tasks: Iterable[Task]) -> StepResult:
        """Run the tasks that are not done; return the records of all.

        Raises ConservationError if the counts of a task do not add up, UsageError if a task would overwrite an input.
        """
        tasks = list(tasks)
        assert len({task.name for task in tasks}) == len(tasks), f"{name}: names of tasks repeat"
        stale = self.records.plan(name, tasks)
        if stale:
            self.execution.check_lock()
            self.records.begin(name, stale)
            for step, writers in self.records.temporary.missing_for(stale).items():
                self._execute(step, writers)
            self._execute(name, stale)
        return self.records.result(name, tasks)

    def tag(self, path: Path) -> str:
        """Return the content tag of a file (see lineage.py), which is noted as read."""
        self.records.done.note_read(name_of(path))
        return self.records.done.tags.of(path)

    def check_listed(self, listed: Listed) -> None:
        """Refuse input folders in which files are missing, or foreign: see reject_incomplete."""
        self.records.check_listed(listed)

    def has_run(self, step: str, task: str) -> bool:
        """Return whether a task was done in this or an earlier run, maybe with another outcome."""
        return self.records.has_run(step, task)

    def note(self, name: str, counts: Counts) -> Counts:
        """Record counts that are of no task in the ledger, such as the number of files not read; return them."""
        self.records.note(name, counts)
        return counts

    def finish(self, counts: Counts) -> Counts:
        """End the stage: remove outputs that were not planned now, compact the ledger, print the summary.

        Raises TooManyMalformed, and InputError if an input is not as it was: the output stays marked as unfinished.
        """
        self.execution.check_lock()
        if self.ran:
            self.records.check_inputs()
        self.records.close(counts)
        if not self.options.quiet:
            tasks = sum(1 for step, _ in self.records.done.records if step)
            print_summary(self.stage.name, counts, self.ran, tasks, time.perf_counter() - self.started)
        return counts

    def _execute(self, step: str, tasks: Sequence[Task]) -> None:
        """Run tasks, and keep their records as they end."""
        scratch = self.execution.scratch
        if not scratch.is_private:
            remove_partial_files(outputs_of(tasks))
        budget = Budget.of(self.options.memory_bytes, min(self.options.processes, len(tasks)))

        def call(task: Task) -> Call:  # the inputs are as they were when the step was planned
            known = self.records.inputs_of(step, task)
            this = TaskRun(self.name, step, task, known.states, known.hashes, scratch, budget)
            arguments = {"identity": known.identity, "ledger": self.ledger}
            return Call(run_task, arguments, task.foreign, this, task.sets_aside)

        executor = self.execution.executor
        title = f"{self.stage.name}: {step}"
        with step_progress(title, tasks, self.options, self.name, self.ledger.loose) as advance:
            retried = executor.retried
            for position, record in executor.run(Calls(tasks, call)):
                record.retries = executor.retried - retried
                retried = executor.retried
                self.records.keep(tasks[position], record)
                self.ran += 1
                advance(tasks[position].size, retried)
        self.records.forget_listings(tasks)


def run_task(this: TaskRun, identity: dict[str, str], ledger: Ledger) -> DoneRecord:
    """Run a task in a worker process, and write its done record: after its outputs, so that a kill loses no file."""
    try:
        outcome = task_run.run_task(this)
    except RecordedObjectChanged as error:
        if error.is_missing:
            raise missing_input(error.path) from error
        raise changed_input(error.path) from error
    outputs = list[OutputRecord]()
    for path, info, sha256 in outcome.files:
        outputs.append(OutputRecord(ledger.relative(path), info.size, info.mtime_ns, sha256, info.e_tag))
    record = DoneRecord(
        this.step, this.task.name, identity, outputs, outcome.counts, outcome.value, outcome.core_seconds
    )
    ledger.write(record)
    return record


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
        part: Part of the work that this call does, such as the data set `book`, or `book/0-10`, files of it. It is a
            run of its own, with its own outputs and its own ledger; several may share `publishes`. Refused if a call
            for all of the work, or for a part of this part, has written there.
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
    lock_name = run_name(stage.name, label)  # a call for a part excludes all others, unless locks can be shared
    containing = list[Ledger]()
    if store_of(state).has_file_locks:
        lock_name = name
        containing = ledger.containing
    lock = state / f"{lock_name}.lock"
    paths = [str(resolved(path)) for path in (*reads, *publishes, *files)]
    work = " ".join([name, *words_of_work(sys.argv[1:]), *paths])
    with ExitStack() as stack:
        for whole in reversed(containing):
            stack.enter_context(stage_lock(whole.file.with_suffix(".lock"), options.quiet, shared=True))
        execution = stack.enter_context(open_execution_context(options, lock, work))
        stack.enter_context(_listed_once(reads, [root, *publishes, *files]))
        marks = stack.enter_context(Marks(name, tuple(publishes), tuple(files)))
        hash_touched = partial(hash_files, execution.executor)
        records = StageRecords(stage, ledger, tuple(reads), marks, options, hash_touched, inputs_vary)
        records.open(reads if isinstance(reads, Mapping) else {})
        yield StageRun(stage, options, records, execution)


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
