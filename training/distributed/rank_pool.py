"""Processes that stay: many jobs of several ranks run in them one after another, without the seconds of a start.

They are forked from a server that has imported torch already: eight are there in half a second, and a job
in them begins in milliseconds, where torchrun takes 20 seconds for eight.
"""

import contextlib
import gc
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from gristmill.engine.executor import exit_with_parent, start_fork_server

_GRACE = 1.0  # seconds that the others have to tell their own errors after the first one
_JOBS = 25  # for one process: torch leaves threads and sockets of every group behind
_PRELOAD = ["training.parallel.parallelize"]  # imports torch and all that a model spread over processes needs


class RankError(RuntimeError):
    """A job failed: `rank` is the first that did, and the message holds the traceback of each that told one."""

    def __init__(self, failures: dict[int, str], waiting: list[int]) -> None:
        self.rank = next(iter(failures), -1)
        parts = [f"rank {rank}: {text}" for rank, text in failures.items()]
        if waiting:
            parts.append(f"no answer from rank {', '.join(map(str, waiting))}, which had to be killed")
        super().__init__("\n".join(parts))


@dataclass
class _Rank:
    process: ForkServerProcess
    connection: Connection
    jobs: int = 0


class RankPool:
    """Up to `size` processes, started when a job first wants them and ended with the block, or with this process.

    `timeout`: the seconds a collective waits for the others. `limit`: the seconds a job may take.
    """

    def __init__(self, size: int, threads: int = 1, timeout: float = 30.0, limit: float = 120.0) -> None:
        self.size, self.threads, self.timeout, self.limit = size, threads, timeout, limit
        self._ranks: dict[int, _Rank] = {}
        self._jobs = 0
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._kill(list(self._ranks))

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What `function(*arguments)` returns in each of `size` processes, by rank.

        `function` is a module's own. They have a gloo process group, and the environment torchrun would
        give them. Raises RankError where one raises, dies, or takes longer than `limit`; the processes that have
        not answered by then are killed, and started anew for the next job.
        """
        assert 0 < size <= self.size, f"{size} ranks of {self.size}"
        job = pickle.dumps((function, arguments))
        start_fork_server(_PRELOAD)
        self._kill([rank for rank, worn in self._ranks.items() if worn.jobs >= _JOBS])
        for rank in range(size):
            if rank not in self._ranks:
                self._ranks[rank] = self._start(rank)
        self._jobs += 1
        for rank in range(size):
            self._ranks[rank].jobs += 1
            with contextlib.suppress(BrokenPipeError):  # it died since the last job: read below
                self._ranks[rank].connection.send((self._jobs, size, job))
        return self._collect(size)

    def _collect(self, size: int) -> list[Any]:
        waiting = {self._ranks[rank].connection: rank for rank in range(size)}
        results: dict[int, Any] = {}
        failures: dict[int, tuple[float, str]] = {}  # when, and what: the first is the cause of the others
        deadline = time.monotonic() + self.limit
        try:
            while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
                for connection in ready:
                    assert isinstance(connection, Connection)
                    rank = waiting.pop(connection)
                    good, value, when = self._receive(rank)
                    if good:
                        results[rank] = value
                    else:
                        failures[rank] = when, value
                if failures:
                    deadline = min(deadline, time.monotonic() + _GRACE)
        finally:
            self._kill(list(waiting.values()))  # also where we are interrupted: they would be in the midst of it
        if failures or waiting:
            first_to_last = sorted(failures, key=lambda rank: failures[rank][0])
            raise RankError({rank: failures[rank][1] for rank in first_to_last}, sorted(waiting.values()))
        return [pickle.loads(results[rank]) for rank in range(size)]

    def _receive(self, rank: int) -> tuple[bool, Any, float]:
        try:
            return self._ranks[rank].connection.recv()
        except (EOFError, ConnectionResetError):
            process = self._ranks[rank].process
            process.join(_GRACE)
            self._kill([rank])
            return False, f"died with exit code {process.exitcode}", 0.0

    def _start(self, rank: int) -> _Rank:
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_serve, args=(theirs, rank, self.threads, self._store.port, self.timeout), daemon=True
        )
        process.start()
        theirs.close()
        return _Rank(process, ours)

    def _kill(self, ranks: list[int]) -> None:
        gone = [self._ranks.pop(rank) for rank in ranks]
        for rank in gone:
            rank.process.kill()
        for rank in gone:
            rank.process.join()
            rank.connection.close()


def _serve(connection: Connection, rank: int, threads: int, port: int, timeout: float) -> None:
    """Be a rank: answer each job with (whether it went well, the pickled result or the error's text, the time)."""
    exit_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of the terminal; the parent will end us
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    gc.freeze()  # what was imported stays: the collections between the jobs need not look at it
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=timeout))
    while True:
        try:
            number, size, job = connection.recv()
        except EOFError:
            return
        try:
            with _process_group(dist.PrefixStore(f"job{number}", store), rank, size, timeout):
                answer = _answer(job)
        except Exception:  # no group came about
            answer = False, traceback.format_exc(), time.monotonic()
        gc.collect()  # models and groups refer to each other
        connection.send(answer)


def _answer(job: bytes) -> tuple[bool, bytes | str, float]:
    try:
        function, arguments = pickle.loads(job)
        return True, pickle.dumps(function(*arguments)), 0.0
    except BaseException:  # SystemExit, too, is a job's
        return False, traceback.format_exc(), time.monotonic()  # before the group is left, which the others would meet


@contextlib.contextmanager
def _process_group(store: dist.Store, rank: int, size: int, timeout: float) -> Iterator[None]:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update({key: str(value) for key, value in place.items()})
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
