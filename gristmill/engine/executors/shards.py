"""ShardExecutor: several processes, on several machines, run the tasks of one stage or run; `--shard i/n`.

One process, that which holds the lock, is in charge: it plans, posts each step's tasks on a board and ends the stage.
The others help while they wait for the lock. Each takes its own tasks first (position mod n is i), then any that
nobody runs. If the process in charge dies, one of the others gets the lock, and plans anew with what is done. All
outputs are staged, so that it does no harm if two processes run one task.
"""

import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from msgspec.structs import replace as posted

from gristmill.budget import Budget
from gristmill.engine.executors.board import Board, Failure, Posting, Spent
from gristmill.engine.executors.local import Call, LocalExecutor
from gristmill.engine.executors.presence import Heartbeat, ProcessState
from gristmill.engine.executors.same_code import check_same_code, code_versions
from gristmill.engine.executors.staging import TAKEN_OVER
from gristmill.engine.executors.step_share import StepShare
from gristmill.engine.executors.work import Work
from gristmill.engine.options import RunOptions, Shard
from gristmill.engine.report import log_lines
from gristmill.engine.scratch import Scratch
from gristmill.errors import (
    FinishedElsewhere,
    GristmillError,
    OutputError,
    StorageError,
    TakenOver,
    UsageError,
    WorkerDied,
)
from gristmill.storage.files import is_file
from gristmill.storage.lease import lease_seconds
from gristmill.urls import is_remote

ATTEMPTS = 3  # at a task, if the object store fails
_LOCAL_POLL, _REMOTE_POLL = 0.2, 2.0  # seconds between two looks at the board
_AHEAD = 64  # tasks at most
_POLLS = 8  # at least, in the time after which a process counts as dead


class StepOver(Exception):
    """The step that this process helps with has ended, or its session has."""


class ShardExecutor:
    """Runs tasks of run_task together with the other processes that see the board.

    `help` is what a process does while another one is in charge; `run` is for the one that is. `work` says what all of
    them do: a process helps with the same work only.
    """

    def __init__(
        self, local: LocalExecutor, board: Board, options: RunOptions, work: Work, state: ProcessState, scratch: Scratch
    ) -> None:
        self.local, self.board, self.options, self.work = local, board, options, work
        self.state, self.scratch, self.shard = state, scratch, Shard.parse(options.shard)
        self.posting: Posting | None = None  # of the session in which this process is in charge
        self._running: dict[int, str] = {}  # names of this process's tasks, by position in the step
        self._helped: set[tuple[str, int]] = set()  # session and step; step 0: it was seen
        self._poll = min(_REMOTE_POLL if is_remote(board.folder) else _LOCAL_POLL, lease_seconds() / _POLLS)

    @property
    def retried(self) -> int:
        """How many tasks this process has tried again so far."""
        return self.state.retried

    def run(self, calls: Sequence[Call]) -> Iterator[tuple[int, Any]]:
        """As Executor.run; calls that write no done record run in this process's workers alone."""
        before = self.posting
        if before is None or not calls or "ledger" not in calls[0].arguments:
            yield from self.local.run(calls)
            return
        name = f"{calls[0].arguments['ledger'].file.stem}: {calls[0].arguments['step']}"
        posting = posted(before, step=before.step + 1, tasks=len(calls), name=name)
        self.board.post(posting, calls, before)
        self.posting = posting
        try:
            yield from self._work(posting, calls, is_in_charge=True)
        finally:
            self.board.forget(posting)

    def help(self) -> None:
        """Run tasks of the step that is posted until it is over, or wait a moment if there is none to help with.

        Raises as reject_finished, and UsageError if the process in charge has other versions or other options.
        """
        self.reject_finished()
        posting = self.board.read()
        if posting and posting.state == "working" and posting.work != self.work:
            self._reject_other_options(posting)
        elif posting and posting.state == "working":
            check_same_code(posting.versions, f"process {self.state.process} on {self.state.host}")
            self._helped.add((posting.session, 0))
            if posting.step and (posting.session, posting.step) not in self._helped:
                self._help_with(posting)
                self._helped.add((posting.session, posting.step))
        self.state.running = []
        time.sleep(self._poll)

    def _help_with(self, posting: Posting) -> None:
        """Run tasks of a step until it is over.

        The process in charge removes the fence of a step, then all that it finds of it; what this process has shown
        later is its own to remove.
        """
        try:
            lines = nullcontext() if self.options.quiet else log_lines(lambda: self._line(posting))
            with suppress(StepOver, FileNotFoundError), lines:  # its files are gone
                deque(self._work(posting, self.board.load(posting), is_in_charge=False), maxlen=0)
        except OutputError:  # its folder went while a file was written there
            if self._runs(posting):
                raise
        finally:
            if not self._runs(posting):
                self.board.forget(posting)

    def _line(self, posting: Posting) -> str:
        """What this process does for a step, for its log."""
        state, runs = self.state, ", ".join(self.state.running[:3]) or "none now"
        return f"{posting.name}: helps with {posting.tasks:,} tasks: has run {state.tasks_done:,} so far, runs {runs}"

    def _runs(self, posting: Posting) -> bool:
        """Whether a step is not over."""
        return is_file(self.board.fence(posting))

    def _reject_other_options(self, posting: Posting) -> None:
        """Raise UsageError if a process that is alive does the same part of the work with other options.

        Other parts of the work, and a session whose process has died, are waited for like any lock.
        """
        if posting.work.part == self.work.part and self.board.processes.has_beaten(posting.session):
            raise UsageError(
                f"process {posting.session} works on the same output with other options: "
                f"{self.work.differences(posting.work)}. Give all processes the same command, or wait until it has "
                "ended"
            )

    def reject_finished(self) -> None:
        """Raise FinishedElsewhere, or the error, if a session that this process has helped has ended its work."""
        posting = self.board.read()
        if posting and (posting.session, 0) in self._helped:
            if posting.failure:
                raise posting.failure.error()
            if posting.state == "finished":
                done = f"{self.state.tasks_done:,} tasks, {self.state.core_seconds:,.0f} core seconds"
                raise FinishedElsewhere(f"{posting.session} has finished the work; this process helped with {done}")

    @contextmanager
    def in_charge(self) -> Iterator[None]:
        """Context: the session of this process, which holds the lock; says on the board how it ended.

        If it is killed or interrupted, or one of its workers is, it says nothing: another process goes on.
        """
        before = self.board.read()
        spent = before.spent if before else Spent()
        if before and before.work.part == self.work.part and before.work != self.work and not self.options.quiet:
            changed = self.work.differences(before.work)
            print(f"note: the last session had other options: {changed}; what differs is made anew", file=sys.stderr)
        self.posting = Posting(self.board.name, self.work, spent=spent, versions=code_versions())
        self.board.post(self.posting)
        self.board.clear()
        self.state.is_in_charge = True
        try:
            yield
        except WorkerDied:
            raise
        except Exception as error:
            with suppress(GristmillError):
                self._end("failed", Failure.of(error))
            raise
        self._end("finished")

    def _end(self, state: Literal["finished", "failed"], failure: Failure | None = None) -> None:
        assert self.posting
        states, spent = [*self.board.processes.states().values(), self.state], self.posting.spent
        states = list({(each.host, each.process): each for each in states}.values())
        spent = Spent(
            spent.core_seconds + sum(each.core_seconds + each.own_seconds for each in states),
            spent.tasks + sum(each.tasks_done for each in states),
            spent.retried + sum(each.retried for each in states),
        )
        step = self.posting.step + 1
        ended = posted(self.posting, step=step, tasks=0, state=state, failure=failure, spent=spent)
        self.board.post(ended, before=self.posting)
        self.board.processes.clear(keep=self.board.name)

    def _work(self, posting: Posting, calls: Sequence[Call], is_in_charge: bool) -> Iterator[tuple[int, Any]]:
        """Run calls that nobody runs until all are done, or the step is over; yield those that are, of all processes.

        The process in charge raises the first error; another one shows it on the board.
        """
        share, pending = StepShare(self.board, posting, self.shard, self._poll), dict[Future[Any], int]()
        self._running.clear()
        own = self._own(posting)
        try:
            while not share.is_over:
                if share.is_due:
                    if self.board.read() != posting:
                        raise TakenOver(f"{self.board.folder}: {TAKEN_OVER}") if is_in_charge else StepOver
                    yield from self._look(share, is_in_charge)
                self._submit(share, calls, pending, own)
                if not pending and not share.is_over:
                    time.sleep(self._poll)
                for position, outcome in self.local.take_finished(pending, self._poll) if pending else ():
                    self._count(outcome, position)
                    yield from self._finish(share, position, outcome[0], is_in_charge)
        finally:
            for future in pending:
                future.cancel()

    def _look(self, share: StepShare, is_in_charge: bool) -> Iterator[tuple[int, Any]]:
        """Yield the records of other processes' tasks, in the process in charge; raise their first error."""
        done, failed = share.look()
        if not is_in_charge:
            return
        if failed:
            raise self.board.failure(share.posting, failed[0]).error()
        yield from self.board.results(share.posting, done)

    def _submit(
        self, share: StepShare, calls: Sequence[Call], pending: dict[Future[Any], int], own: Callable[[Call], Call]
    ) -> None:
        """Take tasks until there is one for each worker, and ahead as many as take about a look's time."""
        window = self.local.workers + min(max(1, int(share.speed * self._poll)), _AHEAD)
        while len(pending) < window and (position := share.next()) is not None:
            call = own(calls[position])
            pending[self.local.submit(Call(attempt, {"call": call}, call.foreign))] = position
            self._running[position] = str(call.arguments["task"].name)
            self.state.running = list(self._running.values())

    def _own(self, posting: Posting) -> Callable[[Call], Call]:
        """A function that gives a call the scratch folder and the memory of this process."""
        processes = min(self.options.processes, posting.tasks)
        budget = Budget.of(self.options.memory_bytes, processes)
        scratch = replace(self.scratch, fence=self.board.fence(posting))

        def own(call: Call) -> Call:
            task = call.arguments["task"]
            if task.memory is not None:  # planned by the process in charge, which may have more
                task = replace(task, memory=min(task.memory, budget.whole // processes))
            return replace(call, arguments=call.arguments | {"scratch": scratch, "budget": budget, "task": task})

        return own

    def _finish(self, share: StepShare, position: int, result: Any, is_in_charge: bool) -> Iterator[tuple[int, Any]]:
        """Show what became of a task of this process, and yield its record."""
        is_first, posting = share.end(position), share.posting
        if isinstance(result, Failure) and is_in_charge:
            raise result.error()
        if not is_first:
            return
        self.board.finish(posting, position, None if is_in_charge else result)
        if not is_in_charge and not self._runs(posting):
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
    started, retried = time.process_time(), 0
    while True:
        try:
            return call(), time.process_time() - started, retried
        except StorageError as error:
            if retried + 1 == ATTEMPTS:
                return Failure.of(error), time.process_time() - started, retried
            retried += 1
        except Exception as error:
            if not isinstance(error, GristmillError):  # a fault of ours: the process in charge shows where it is
                error.add_note(traceback.format_exc())
            return Failure.of(error), time.process_time() - started, retried


@contextmanager
def shard_executor(
    local: LocalExecutor, folder: Path, options: RunOptions, work: Work, scratch: Scratch
) -> Iterator[ShardExecutor]:
    """Context: an executor that shares its tasks on the board in `folder`; others see that this process lives."""
    board = Board(folder)
    with Heartbeat(board.processes.folder, board.name) as state:
        yield ShardExecutor(local, board, options, work, state, scratch)
