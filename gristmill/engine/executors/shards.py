"""ShardExecutor: several processes, on several machines, run the tasks of one stage or run; `--shard i/n`.

One process, that which holds the lock, is in charge: it plans, posts each step's tasks on a board and ends the stage.
The others help while they wait for the lock. Each takes its own tasks first (position mod n is i), then any that
nobody runs. If the process in charge dies, one of the others gets the lock, and plans anew with what is done. All
outputs are staged, so that it does no harm if two processes run one task.
"""

import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from gristmill.engine.executors.board import Board, Failure, Heartbeat, Posting, ProcessState
from gristmill.engine.executors.local import Call, LocalExecutor
from gristmill.engine.options import Shard
from gristmill.engine.staging import Scratch
from gristmill.errors import FinishedElsewhere, GristmillError, StorageError
from gristmill.urls import is_remote

ATTEMPTS = 3  # at a task, if the object store fails
_LOCAL_POLL, _REMOTE_POLL = 0.2, 2.0  # seconds between two looks at the board


class ShardExecutor:
    """Runs tasks of run_task together with the other processes that see the board.

    `help` is what a process does while another one is in charge; `run` is for the one that is.
    """

    def __init__(self, local: LocalExecutor, board: Board, shard: Shard, state: ProcessState, scratch: Scratch) -> None:
        self.local, self.board, self.shard, self.state, self.scratch = local, board, shard, state, scratch
        self.posting: Posting | None = None  # of the session in which this process is in charge
        self._helped: set[tuple[str, int]] = set()  # session and step
        self._poll = _REMOTE_POLL if is_remote(board.folder) else _LOCAL_POLL
        self._random = Random(board.name)

    def run(self, calls: Sequence[Call]) -> Iterator[tuple[int, Any]]:
        """As Executor.run; calls without a done record, and those of a step with a single task, run here alone."""
        before = self.posting
        if before is None or len(calls) <= 1 or "ledger" not in calls[0].arguments:
            yield from self.local.run(calls)
            return
        calls = [call.with_absolute_paths() for call in calls]
        name = f"{calls[0].arguments['ledger'].file.stem}: {calls[0].arguments['step']}"
        self.posting = Posting(before.session, before.step + 1, len(calls), name)
        self.board.post(self.posting, calls)
        try:
            yield from self._work(self.posting, calls, is_in_charge=True)
        finally:
            self.board.forget(self.posting)

    def help(self) -> None:
        """Run tasks of the step that is posted until it is over, or wait a moment if there is none to help with."""
        posting = self.board.read()
        is_new = posting is not None and (posting.session, posting.step) not in self._helped
        if posting and posting.state == "working" and posting.tasks and is_new:
            try:
                for _ in self._work(posting, self.board.load(posting), is_in_charge=False):
                    pass
            except FileNotFoundError:  # the step is over
                pass
            self._helped.add((posting.session, posting.step))
        elif posting:
            self._helped.add((posting.session, 0))
        time.sleep(self._poll)

    def reject_finished(self) -> None:
        """Raise FinishedElsewhere, or the error, if the session that this process has helped has ended meanwhile."""
        posting = self.board.read()
        if posting and any(posting.session == session for session, _ in self._helped):
            if posting.failure:
                raise posting.failure.error()
            if posting.state == "finished":
                done = f"{self.state.tasks_done:,} tasks, {self.state.core_seconds:,.0f} core seconds"
                raise FinishedElsewhere(f"{posting.session} has finished the work; this process helped with {done}")

    @contextmanager
    def in_charge(self) -> Iterator[None]:
        """Context: the session of this process, which holds the lock; says on the board how it ended."""
        self.posting = Posting(self.board.name)
        self.board.clear_steps()
        self.board.post(self.posting)
        self.state.is_in_charge = True
        try:
            yield
        except GristmillError as error:
            self._end("failed", Failure(type(error).__name__, str(error)))
            raise
        self._end("finished")

    def _end(self, state: Any, failure: Failure | None = None) -> None:
        assert self.posting
        self.board.post(Posting(self.posting.session, self.posting.step + 1, state=state, failure=failure))
        self.posting = None

    def _work(self, posting: Posting, calls: Sequence[Call], is_in_charge: bool) -> Iterator[tuple[int, Any]]:
        """Run calls that nobody runs until all are done, or the step is over; yield those that are, of all processes.

        The process in charge raises the first error; another one shows it on the board.
        """
        left, pending = self._in_order(len(calls)), dict[Future[Any], int]()
        looked, states = 0.0, dict[int, str]()
        while left:
            if time.monotonic() - looked > self._poll:
                states, looked = self.board.look(posting), time.monotonic()
                if is_in_charge:
                    yield from self._finished_elsewhere(posting, states, left, pending)
                elif self.board.read() != posting:
                    return
                left = [at for at in left if states.get(at) not in ("done", "failed") or at in pending.values()]
            self._submit(posting, calls, states, left, pending)
            if not pending:
                time.sleep(self._poll)
                continue
            for position, result in self.local.take_finished(pending, self._poll):
                self.state.core_seconds += result[1]
                self.state.tasks_done += 1
                self.state.retried += result[2]
                self.state.running = [_name(calls[at]) for at in pending.values()]
                left.remove(position)
                if isinstance(result[0], Failure) and is_in_charge:
                    raise result[0].error()
                self.board.finish(posting, position, result[0])
                yield position, result[0]

    def _submit(
        self,
        posting: Posting,
        calls: Sequence[Call],
        states: dict[int, str],
        left: list[int],
        pending: dict[Future[Any], int],
    ) -> None:
        """Take tasks until there is one for each worker, and one ahead."""
        room, mine = self.local.workers + 1 - len(pending), set(pending.values())
        for position in left if room > 0 else ():
            if position in mine:
                continue
            is_taken = states.get(position) == "taken"
            if is_taken and not self.board.is_left(posting, position):
                continue
            if self.board.take(posting, position, is_left=is_taken):
                call = replace(calls[position], arguments=calls[position].arguments | {"scratch": self.scratch})
                pending[self.local.submit(Call(attempt, {"call": call}))] = position
                self.state.running = [_name(calls[at]) for at in pending.values()]
                room -= 1
            states[position] = "taken"
            if room <= 0:
                return

    def _finished_elsewhere(
        self, posting: Posting, states: dict[int, str], left: list[int], pending: dict[Future[Any], int]
    ) -> Iterator[tuple[int, Any]]:
        others = [at for at in left if at not in pending.values()]
        for position in others:
            if states.get(position) == "failed":
                raise self.board.failure(posting, position).error()
        yield from self.board.results(posting, [at for at in others if states.get(at) == "done"]).items()

    def _in_order(self, tasks: int) -> list[int]:
        """Positions of tasks, this shard's own first, then the others', in another order in each process."""
        own = range(self.shard.index, tasks, self.shard.count)
        others = sorted(set(range(tasks)) - set(own))
        self._random.shuffle(others)
        return [*own, *others]


def attempt(call: Call) -> tuple[Any, float, int]:
    """Run a call in a worker process: its result or Failure, the processor time it took in seconds, and retries."""
    started, retried = time.process_time(), 0
    while True:
        try:
            return call(), time.process_time() - started, retried
        except StorageError as error:
            retried += 1
            if retried == ATTEMPTS:
                return Failure(type(error).__name__, str(error)), time.process_time() - started, retried - 1
        except GristmillError as error:
            return Failure(type(error).__name__, str(error)), time.process_time() - started, retried
        except Exception:  # a fault of ours: the process in charge shows it
            return Failure("GristmillError", traceback.format_exc()), time.process_time() - started, retried


def _name(call: Call) -> str:
    return str(call.arguments["task"].name)


@contextmanager
def shard_executor(local: LocalExecutor, folder: Path, shard: Shard, scratch: Scratch) -> Iterator[ShardExecutor]:
    """Context: an executor that shares its tasks on the board in `folder`; others see that this process lives."""
    board = Board(folder)
    with Heartbeat(board) as state:
        yield ShardExecutor(local, board, shard, state, scratch)
