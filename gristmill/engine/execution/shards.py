"""ShardExecutor: several processes, on several machines, run the tasks of one stage or run; `--shard i/n`.

The process that holds the lock is in charge: it plans, posts each step's tasks in a queue and ends the stage. The
others help while they wait for the lock. Each takes its own tasks first (position mod n is i), then any that nobody
runs. If the process in charge dies, another one gets the lock, and plans anew with what is done. All outputs are
staged, so it does no harm if two processes run one task.
"""

import hashlib
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

from msgspec.structs import replace as changed

from gristmill.budget import Budget
from gristmill.engine.execution.call import Call
from gristmill.engine.execution.local import LocalExecutor
from gristmill.engine.execution.progress import log_lines
from gristmill.engine.execution.staging import TAKEN_OVER, Scratch
from gristmill.engine.execution.task_queue import Failure, Heartbeat, OpenTasks, ProcessState, StepManifest, TaskQueue
from gristmill.engine.options import RunOptions, TaskShard
from gristmill.engine.task import LIBRARIES, library_version
from gristmill.errors import (
    FinishedElsewhere,
    GristmillError,
    OutputError,
    StorageError,
    TakenOver,
    UsageError,
    WorkerDied,
)
from gristmill.processes import processor_seconds
from gristmill.storage.files import is_file
from gristmill.storage.lock import lease_seconds
from gristmill.storage.stores import store_of
from gristmill.wording import count_of

_ATTEMPTS = 3  # at a task, if the object store fails
_POLLS = 8  # at least, in the time after which a process counts as dead
_PACKAGES = ("gristmill", "preprocessing", "dedup")
_ALWAYS = ("numpy", "numba", "msgspec")  # work in every stage; what decides bytes of some stages is in LIBRARIES
_AHEAD = 1  # tasks taken besides one for each worker, so that none waits


class StepOver(Exception):
    """The step that this process helps with has ended, or its session has."""


class ShardExecutor:
    """Runs tasks of run_task together with the other processes that see the queue.

    `help` is what a process does while another one is in charge; `run` is for the one that is. A process helps with its
    own `work` only; for any other it waits, and then plans its own.
    """

    def __init__(
        self, local: LocalExecutor, queue: TaskQueue, options: RunOptions, work: str, state: ProcessState,
        scratch: Scratch,
    ) -> None:  # fmt: skip
        self.local = local
        self.queue = queue
        self.options = options
        self.work = work
        self.state = state
        self.scratch = scratch
        self.shard = TaskShard.parse(options.shard)
        self.manifest: StepManifest | None = None  # of the session in which this process is in charge
        self._running: dict[int, str] = {}  # names of this process's tasks, by position in the step
        self._helped: set[tuple[str, int]] = set()  # session and step; step 0: the session was seen
        self._poll = min(store_of(queue.folder).poll_seconds, lease_seconds() / _POLLS)

    @property
    def retried(self) -> int:
        """Return how many tasks this process has tried again so far."""
        return self.state.retried

    def run(self, calls: Sequence[Call]) -> Iterator[tuple[int, Any]]:
        """Run calls as Executor.run does; calls that run no task of a stage run in this process's workers alone."""
        before = self.manifest
        first = calls[0].task_run if calls else None
        if before is None or first is None:
            yield from self.local.run(calls)
            return
        name = f"{first.run}: {first.step}"
        self.manifest = manifest = changed(before, step=before.step + 1, tasks=len(calls), name=name)
        self.queue.post(manifest, calls, before)
        try:
            yield from self._work(manifest, calls, is_in_charge=True)
        finally:
            self.queue.remove(manifest)

    def help(self) -> None:
        """Run tasks of the step that is posted until it is over, or wait a moment if there is none to help with.

        Raises as reject_finished, and UsageError if the process in charge has other versions.
        """
        self.reject_finished()
        manifest = self.queue.read()
        if manifest and manifest.state == "working" and manifest.work == self.work:
            check_same_code(manifest.versions, f"process {self.state.process} on {self.state.host}")
            self._helped.add((manifest.session, 0))
            if manifest.step and (manifest.session, manifest.step) not in self._helped:
                self._help_with(manifest)
                self._helped.add((manifest.session, manifest.step))
        self.state.running = []
        time.sleep(self._poll)

    def _help_with(self, manifest: StepManifest) -> None:
        """Run tasks of a step until it is over; remove what this process has written after that."""

        def line() -> str:
            now = ", ".join(self.state.running[:3]) or "idle"
            tasks = count_of(manifest.tasks, "task")
            return f"{manifest.name}: helping with {tasks}: {self.state.tasks_done:,} done, now {now}"

        try:
            logged = nullcontext() if self.options.quiet else log_lines(line)
            with suppress(StepOver, FileNotFoundError), logged:
                deque(self._work(manifest, self.queue.load(manifest), is_in_charge=False), maxlen=0)
        except OutputError:  # its folder was removed while a file was written there
            if self._runs(manifest):
                raise
        finally:
            if not self._runs(manifest):
                self.queue.remove(manifest)

    def _runs(self, manifest: StepManifest) -> bool:
        """Return whether a step is not over."""
        return is_file(self.queue.fence(manifest))

    def reject_finished(self) -> None:
        """Raise FinishedElsewhere, or the error, if a session that this process has helped has ended its work."""
        manifest = self.queue.read()
        if manifest and (manifest.session, 0) in self._helped:
            if manifest.failure:
                raise manifest.failure.error()
            if manifest.state == "finished":
                done = f"{count_of(self.state.tasks_done, 'task')}, {self.state.core_seconds:,.0f} core seconds"
                raise FinishedElsewhere(f"{manifest.session} has finished the work; this process helped with {done}")

    @contextmanager
    def in_charge(self) -> Iterator[None]:
        """Context: the session of this process, which holds the lock; its manifest says how it ended.

        If it is killed or interrupted, or one of its workers is, that says nothing: another process resumes the work.
        """
        self.manifest = StepManifest(self.queue.name, self.work, versions=code_versions())
        self.queue.post(self.manifest)
        self.queue.clear()
        self.state.is_in_charge = True
        try:
            yield
        except WorkerDied:
            raise
        except Exception as error:
            with suppress(GristmillError):
                self._end(changed(self.manifest, state="failed", failure=Failure.of(error)))
            raise
        self._end(changed(self.manifest, state="finished"))

    def _end(self, ended: StepManifest) -> None:
        self.queue.post(changed(ended, step=ended.step + 1, tasks=0), before=self.manifest)
        self.queue.processes.clear(keep=self.queue.name)

    def _work(self, manifest: StepManifest, calls: Sequence[Call], is_in_charge: bool) -> Iterator[tuple[int, Any]]:
        """Run calls that nobody runs until all are done, or the step is over; yield the results, of all processes.

        The process in charge raises the first error; another one shows it in the queue.
        """
        tasks = OpenTasks(self.queue, manifest, self.shard, self._poll)
        pending = dict[Future[Any], int]()
        self._running.clear()
        own = self._own(manifest)
        try:
            while not tasks.is_over:
                if tasks.is_due:
                    if self.queue.read() != manifest:
                        if is_in_charge:
                            raise TakenOver(f"{self.queue.folder}: {TAKEN_OVER}")
                        raise StepOver
                    done, failed = tasks.look()
                    if is_in_charge and failed:
                        raise self.queue.failure(manifest, failed[0]).error()
                    if is_in_charge:
                        yield from self.queue.results(manifest, done)
                while len(pending) < self.local.workers + _AHEAD and (position := tasks.next()) is not None:
                    call = own(calls[position])
                    future = self.local.submit(Call(attempt, {"call": call}, call.foreign, None, call.sets_aside))
                    pending[future] = position
                    self._running[position] = call.task_run.task.name if call.task_run else ""
                    self.state.running = list(self._running.values())
                if not pending and not tasks.is_over:
                    time.sleep(self._poll)
                if not pending:
                    continue
                for position, outcome in self.local.take_finished(pending, self._poll):
                    self._count(outcome, position)
                    yield from self._finish(tasks, position, outcome[0], is_in_charge)
        finally:
            for future in pending:
                future.cancel()

    def _own(self, manifest: StepManifest) -> Callable[[Call], Call]:
        """Return a function that gives a call the scratch folder and the memory of this process."""
        processes = min(self.options.processes, manifest.tasks)
        budget = Budget.of(self.options.memory_bytes, processes)
        scratch = replace(self.scratch, fence=self.queue.fence(manifest))

        def own(call: Call) -> Call:
            assert call.task_run is not None, "only tasks of stages are shared"
            this = call.task_run.on(scratch, budget)
            if this.task.memory is not None:  # planned by the process in charge, which may have more
                memory = min(this.task.memory, budget.total // processes)
                this = replace(this, task=replace(this.task, memory=memory))
            return replace(call, task_run=this)

        return own

    def _finish(self, tasks: OpenTasks, position: int, result: Any, is_in_charge: bool) -> Iterator[tuple[int, Any]]:
        """Show what became of a task of this process, and yield its record."""
        is_first = tasks.end(position)
        manifest = tasks.manifest
        if isinstance(result, Failure) and is_in_charge:
            raise result.error()
        if not is_first:
            return
        self.queue.finish(manifest, position, None if is_in_charge else result)
        if not is_in_charge and not self._runs(manifest):
            raise StepOver
        yield position, result

    def _count(self, outcome: tuple[Any, float, int], position: int) -> None:
        self.state.core_seconds += outcome[1]
        self.state.tasks_done += not isinstance(outcome[0], Failure)
        self.state.retried += outcome[2]
        del self._running[position]
        self.state.running = list(self._running.values())


def attempt(call: Call) -> tuple[Any, float, int]:
    """Run a call in a worker process: its result or Failure, the processor time it took in seconds, and retries."""
    started = processor_seconds()
    retried = 0
    while True:
        try:
            return call(), processor_seconds() - started, retried
        except Exception as error:
            if not isinstance(error, StorageError) or retried + 1 == _ATTEMPTS:
                if not isinstance(error, GristmillError):  # a fault of ours: the process in charge shows where it is
                    error.add_note(traceback.format_exc())
                return Failure.of(error), processor_seconds() - started, retried
            retried += 1


@contextmanager
def shard_executor(
    local: LocalExecutor, folder: Path, options: RunOptions, work: str, scratch: Scratch
) -> Iterator[ShardExecutor]:
    """Context: an executor that shares its tasks by the queue in `folder`; others see that this process lives."""
    queue = TaskQueue(folder)
    with Heartbeat(queue.processes.folder, queue.name) as state:
        yield ShardExecutor(local, queue, options, work, state, scratch)


@cache
def code_versions() -> dict[str, str]:
    """Return the version of each thing that decides bytes, by name; that of our code is a hash of its sources."""
    root = Path(__file__).resolve().parents[3]
    paths = list[Path]()
    for package in _PACKAGES:
        paths += (root / package).rglob("*.py")
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    versions = {"gristmill": digest.hexdigest()[:12], "Python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    for name in (*_ALWAYS, *LIBRARIES):
        try:
            versions[name] = library_version(name)
        except PackageNotFoundError:  # ftfy need not be installed
            versions[name] = "none"
    return versions


def check_same_code(expected: Mapping[str, str], where: str) -> None:
    """Raise UsageError if this process has other versions than the process in charge, whose are `expected`."""
    own = code_versions()
    other = list[str]()
    for name, version in expected.items():
        if own.get(name) != version:
            other.append(f"{name} {own.get(name)} instead of {version}")
    if other:
        raise UsageError(
            f"{where} has {', '.join(other)}: its files could have other bytes. Install the same versions everywhere"
        )
