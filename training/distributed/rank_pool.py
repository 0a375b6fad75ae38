"""RankPool: persistent distributed workers, which run functions on several ranks without the cost of a start.

The workers are forked from a server that has imported torch: eight start in half a second, and a job in running
workers in milliseconds, while torchrun takes 20 seconds to start eight.
"""

import contextlib
import gc
import math
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from gristmill.engine.execution.local import start_fork_server
from gristmill.processes import exit_with_parent, keep_objects
from training.distributed.process_group import wait_for_all

_GRACE_SECONDS = 1.0  # after the first error, for the other ranks to return theirs
_LEAVING_TIME = timedelta(seconds=5)  # after a rank's job, for the other ranks to end theirs
_END_SECONDS = 2.0  # after its last job, for an idle worker to end itself
_NO_GROUP = math.inf  # time of the failure of a rank that could not connect to the others: theirs came before
_MAX_JOBS = 25  # per process, which is then replaced: torch leaks threads and sockets of every process group
_PRELOAD = ["training.parallel.parallelize", "torch._dynamo", "torch.distributed.pipelining"]  # what a first step needs
_PRELOAD_ON_CPU = ["training.kernels.cpu.kernels"]


class RankError(RuntimeError):
    """A job failed. `rank` failed first (-1: none before the time limit); the message has every rank's traceback."""

    def __init__(self, failures: dict[int, str], waiting: list[int]) -> None:
        self.rank = next(iter(failures), -1)
        parts = [f"rank {rank}: {text}" for rank, text in failures.items()]
        if waiting:
            plural = "s" * (len(waiting) > 1)
            parts.append(f"rank{plural} {', '.join(map(str, waiting))} did not answer and had to be killed")
        super().__init__("\n".join(parts))


@dataclass
class _RankProcess:
    process: ForkServerProcess
    connection: Connection
    jobs: int = 0


class RankPool:
    """Pool of up to `size` workers of a thread, one per rank; a job starts those that are missing, `__exit__` ends all.

    `timeout`: seconds that a collective waits for other ranks; `job_timeout`: seconds for a job.
    `device`: "cuda" lets the ranks communicate tensors on GPUs too. `preload`: modules that jobs need besides torch's.
    """

    def __init__(
        self,
        size: int,
        timeout: float = 30.0,
        job_timeout: float = 120.0,
        device: str = "cpu",
        preload: Sequence[str] = (),
    ) -> None:
        self.size = size
        self.timeout = timeout
        self.job_timeout = job_timeout
        self.device = device
        self.preload = preload
        self._workers: dict[int, _RankProcess] = {}
        self._jobs = 0
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._end(list(self._workers))

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run `function(*arguments)` on `size` ranks; returns the results by rank.

        `function` and `arguments` are pickled, so the function must be at the top level of a module. Each job has its
        own process group, and torchrun's environment variables. Raises RankError if a rank raises, dies, or does
        not return within `job_timeout` seconds; ranks that have not returned by then are killed, and replaced for
        the next job.
        """
        assert 0 < size <= self.size, f"{size} ranks of {self.size}"
        job = pickle.dumps((function, arguments))
        start_fork_server([*_PRELOAD, *self.preload, *(_PRELOAD_ON_CPU if self.device == "cpu" else [])])
        self._end([rank for rank, worker in self._workers.items() if worker.jobs >= _MAX_JOBS])
        for rank in range(size):
            if rank not in self._workers:
                self._workers[rank] = self._start(rank)
        self._jobs += 1
        for rank in range(size):
            self._workers[rank].jobs += 1
            with contextlib.suppress(BrokenPipeError):  # it died since the last job: _collect reports it
                self._workers[rank].connection.send((self._jobs, size, job))
        return self._collect(size)

    def _collect(self, size: int) -> list[Any]:
        """Wait for the results of ranks 0 … size - 1; raise RankError if one failed."""
        waiting = {self._workers[rank].connection: rank for rank in range(size)}
        results: dict[int, Any] = {}
        failures: dict[int, tuple[float, str]] = {}  # time and traceback; the earliest caused the others
        deadline = time.monotonic() + self.job_timeout
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
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        finally:
            self._kill(list(waiting.values()))  # also on KeyboardInterrupt: these workers are still in the job
        if failures or waiting:
            first_to_last = sorted(failures, key=lambda rank: failures[rank][0])
            raise RankError({rank: failures[rank][1] for rank in first_to_last}, sorted(waiting.values()))
        return [pickle.loads(results[rank]) for rank in range(size)]

    def _receive(self, rank: int) -> tuple[bool, Any, float]:
        """Return a worker's answer, as `_serve` sends it; a dead worker failed at time 0, before all others."""
        try:
            answer = self._workers[rank].connection.recv()
        except (EOFError, ConnectionResetError):
            process = self._workers[rank].process
            process.join(_GRACE_SECONDS)
            answer = False, f"died with exit code {process.exitcode}", 0.0
            self._kill([rank])
        if not answer[0] and answer[2] == _NO_GROUP:
            self._kill([rank])  # torch has numbered its process groups otherwise than the other ranks' from now on
        return answer

    def _start(self, rank: int) -> _RankProcess:
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_serve,
            args=(theirs, rank, self._store.port, self.timeout, self.job_timeout, self.device),
            daemon=True,
        )
        process.start()
        theirs.close()
        return _RankProcess(process, ours)

    def _end(self, ranks: list[int]) -> None:
        """End idle workers: each ends itself, so that it removes semaphores that a job made, or is killed in time."""
        for rank in ranks:
            self._workers[rank].connection.close()
        deadline = time.monotonic() + _END_SECONDS
        for rank in ranks:
            self._workers[rank].process.join(max(0.0, deadline - time.monotonic()))
        self._kill(ranks)

    def _kill(self, ranks: list[int]) -> None:
        workers = [self._workers.pop(rank) for rank in ranks]
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.process.join()
            worker.connection.close()


def _serve(connection: Connection, rank: int, port: int, timeout: float, start_timeout: float, device: str) -> None:
    """A worker's main loop: answers a job with (succeeded, pickled result or traceback, monotonic time of failure).

    `start_timeout`: seconds in which all ranks of a job start; on a busy machine that is more than a collective takes.
    """
    exit_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the workers too: the parent ends them
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # the fork server has it blocked
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=start_timeout))
    while True:
        keep_objects()  # modules stay, those too that a job imports: garbage collection between jobs can skip them
        try:
            number, size, job = connection.recv()
        except EOFError:
            return
        answer = None
        try:
            own = dist.PrefixStore(f"job{number}", store)
            wait_for_all(own, "started", size, timedelta(seconds=start_timeout))
            with _process_group(own, rank, size, timeout, device):
                wait_for_all(own, "connected", size, timedelta(seconds=timeout))
                answer = _run_job(job)
                connection.send(answer)
                if answer[0]:
                    wait_for_all(own, "done", size, _LEAVING_TIME)  # gloo fails where one left that another connects to
        except Exception:  # the process group could not be set up
            if answer is not None:
                raise
            connection.send((False, traceback.format_exc(), _NO_GROUP))
        gc.collect()  # models and process groups are in reference cycles


def _run_job(job: bytes) -> tuple[bool, bytes | str, float]:
    """Run a pickled job; returns its answer as `_serve` sends it."""
    try:
        function, arguments = pickle.loads(job)
        return True, pickle.dumps(function(*arguments)), 0.0
    except BaseException:  # SystemExit ends the job and not the worker
        return False, traceback.format_exc(), time.monotonic()  # before the other ranks' collectives fail


@contextlib.contextmanager
def _process_group(store: dist.Store, rank: int, size: int, timeout: float, device: str) -> Iterator[None]:
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update({key: str(value) for key, value in variables.items()})
    dist.init_process_group(
        _backend(device, size), store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
    )
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _backend(device: str, size: int) -> str:
    """gloo, and for GPUs NCCL, which refuses ranks that share one: they communicate through gloo too."""
    if device == "cpu":
        return "gloo"
    return f"cpu:gloo,cuda:{'nccl' if size <= torch.cuda.device_count() else 'gloo'}"
