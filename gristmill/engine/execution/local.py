"""LocalExecutor: runs calls in this process or in a pool of worker processes, with the same results."""

import errno
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor
from concurrent.futures import wait as wait_for
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, popen_forkserver, resource_tracker
from multiprocessing.connection import wait as wait_for_end
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow

from gristmill.engine.execution.call import Call, Executor
from gristmill.engine.execution.worker_deaths import (
    MAX_DEATHS,
    READING,
    CurrentDocument,
    Journal,
    KnownDeaths,
    known_deaths,
    use_journal,
)
from gristmill.engine.task import Task
from gristmill.errors import GristmillError, WorkerDied
from gristmill.processes import (
    TERMINATED,
    Terminated,
    delayed_signals,
    exit_in_time,
    exit_with_parent,
    how_ended,
    raised_signals,
)
from gristmill.storage.files import hash_file
from gristmill.storage.lock import hold_worker_lock
from gristmill.wording import count_of

_FOR_FORK_SERVER = "gristmill.engine.execution.fork_server"
_FOR_FORK_SERVER_OF_KERNELS = "gristmill.engine.execution.fork_server_kernels"
_PACKAGES_OF_STAGES = ("preprocessing.", "dedup.")
_GRACE_SECONDS = 3.0  # for interrupted tasks to end; then they are killed
_FILES_NAMED = 3  # of the files that a task reads
_WINDOW = 4  # calls for each worker that are submitted ahead of their turn


class LocalExecutor:
    """Runs calls in this process (one worker, or one call), or in worker processes that live until the context ends.

    Calls of a user's function, and calls that set aside documents on which a worker dies, run in worker processes,
    always. `worker_lock` is the lock file of the stage (see lock.py), of which each worker holds a share.
    """

    retried = 0

    def __init__(self, workers: int, worker_lock: Path | None = None) -> None:
        self.workers = workers
        self.worker_lock = worker_lock
        self._pool: ProcessPoolExecutor | None = None
        self._started = list[BaseProcess]()  # workers of the pool, dead ones included
        self._journal: Journal | None = None
        self._calls = dict[Future[Any], tuple[int, Call]]()  # that are submitted, with their numbers
        self._submitted = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._pool is None:
            return
        if kind is None or issubclass(kind, Exception):
            self._pool.shutdown(wait=True, cancel_futures=True)
            return
        for worker in self._started:  # interrupted: the workers' tasks end, too
            if worker.is_alive():
                with suppress(ProcessLookupError):
                    os.kill(worker.pid or 0, signal.SIGINT)
        self._pool.shutdown(wait=False, cancel_futures=True)
        until = time.monotonic() + _GRACE_SECONDS
        while alive := [worker for worker in self._started if worker.is_alive()]:
            if time.monotonic() > until:
                for worker in alive:
                    worker.kill()
            wait_for_end([worker.sentinel for worker in alive], 0.1)

    def run(self, calls: Sequence[Call]) -> Iterator[tuple[int, Any]]:
        """Run every call; yield (index in `calls`, result) as each one finishes, in any order.

        The first error cancels the calls not yet started and is raised unchanged. Raises WorkerDied if a
        worker process dies, unless the call sets aside the documents on which that happens.
        """
        needs_worker = bool(calls) and (bool(calls[0].foreign) or calls[0].sets_aside)
        if not needs_worker and (self.workers <= 1 or len(calls) <= 1):
            yield from ((position, call()) for position, call in enumerate(calls))
            return
        pending: dict[Future[Any], int] = {}
        try:
            for position, call in enumerate(calls):
                pending[self.submit(call)] = position
                if len(pending) >= _WINDOW * self.workers:  # more would be pickled long before they are run
                    yield from self.take_finished(pending)
            while pending:
                yield from self.take_finished(pending)
        finally:
            for future in pending:
                future.cancel()

    def submit(self, call: Call, known: KnownDeaths | None = None) -> Future[Any]:
        """Run a call in a worker process, which is started if need be; see take_finished.

        `known` are the deaths of workers in earlier attempts at it.
        """
        with delayed_signals(), _explain_start():  # the state of a pool that is interrupted while it starts is unknown
            if self._pool is None:
                self._start_pool(call)
            assert self._pool is not None
            self._submitted += 1
            number = self._submitted
            try:
                moved = call.with_absolute_paths() if call.foreign else call  # it may change the working folder
                future = self._pool.submit(_run_in_worker, moved, number, known or KnownDeaths())
            except (BrokenProcessPool, EOFError, ConnectionError) as error:
                future = Future[Any]()
                future.set_exception(error)
            self._calls[future] = number, call
            return future

    def take_finished(self, pending: dict[Future[Any], int], seconds: float | None = None) -> Iterator[tuple[int, Any]]:
        """Wait until one of the pending calls has finished, for `seconds` at most; remove and yield the finished ones.

        Raises their errors, and WorkerDied if a worker process has died. A call that sets aside documents on which
        workers die is made again instead, alone; the others that were lost are submitted again.
        """
        try:
            for future in sorted(wait_for(pending, seconds, FIRST_COMPLETED).done, key=pending.__getitem__):
                result = future.result()
                self._calls.pop(future, None)
                yield pending.pop(future), result
        except (BrokenProcessPool, EOFError, ConnectionError) as error:  # a worker, or the fork server
            deaths = self._find_deaths()
            self._end_broken_pool()
            calls = {position: self._calls.pop(future) for future, position in pending.items()}
            results = {position: future for future, position in pending.items() if _has_result(future)}
            pending.clear()  # its thread, which gives each the error, would fail with a traceback at a cancelled one
            died = {position: deaths[number] for position, (number, _) in calls.items() if number in deaths}
            for position, death in died.items():
                if not calls[position][1].sets_aside:
                    raise WorkerDied(_describe_death(calls[position][1], *death)) from error
            if not died:  # another program ended it, or the fork server died: no call is known to have been the last
                foreign = next(iter(calls.values()))[1].foreign
                raise WorkerDied(
                    _describe_death(Call(_run_in_worker, {}, foreign), how_ended(self._started))
                ) from error
            for position, (_, call) in calls.items():
                if position in died:
                    yield position, self._run_alone(call, *died[position])
                elif position in results:
                    yield position, results[position].result()
            for position, (_, call) in calls.items():
                if position not in died and position not in results:
                    pending[self.submit(call)] = position

    def _start_pool(self, call: Call) -> None:
        """Start a fork server, whose workers inherit no threads, and import modules once; and a pool of its workers."""
        stages = [name for name in sys.modules if name.startswith(_PACKAGES_OF_STAGES)]  # of all stages of a run
        start_fork_server([call.function.__module__, *stages])
        self._started = list[BaseProcess]()
        context = PoolContext(self._started)
        self._journal = Journal(context, self.workers)
        arguments = (self.worker_lock, self._journal)
        self._pool = ProcessPoolExecutor(self.workers, context, _start_worker, arguments)

    def _run_alone(self, call: Call, how: str, document: CurrentDocument | None) -> Any:
        """Run a call in which a worker has died, while no other runs, until it survives; return its result.

        Each attempt knows where earlier attempts ended. Raises WorkerDied if that names no document.
        """
        known = KnownDeaths()
        while known.add(document, how):
            future = self.submit(call, known)
            try:
                return future.result()
            except (BrokenProcessPool, EOFError, ConnectionError):
                number, _ = self._calls[future]
                how, document = self._find_deaths().get(number, ("", None))
                self._end_broken_pool()
            finally:
                del self._calls[future]
        raise WorkerDied(_describe_death(call, how, document, len(known.dead)))

    def _find_deaths(self) -> dict[int, tuple[str, CurrentDocument | None]]:
        """Return how workers died, and where, by the number of the call; not of workers that the pool ended then."""
        deaths = dict[int, tuple[str, CurrentDocument | None]]()
        for slot, worker in enumerate(self._started):
            if self._journal and worker.exitcode not in (None, 0, -signal.SIGTERM, TERMINATED):
                number, document = self._journal.read(slot)
                deaths[number] = how_ended([worker]), document
        return deaths

    def _end_broken_pool(self) -> None:
        """End the pool of a worker that has died: the next call starts another."""
        # It loses track of a worker that starts while another dies, and would wait for it forever.
        for worker in self._started:
            if worker.pid:  # else it never started
                worker.kill()
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        self._pool = None


def _has_result(future: Future[Any]) -> bool:
    return future.done() and future.exception() is None


def _describe_death(call: Call, how: str, document: CurrentDocument | None = None, deaths: int = 0) -> str:
    """Return where a worker died, and why that may be: by how it ended, and whether it ran a user's function.

    `deaths`: on so many documents workers died before, and these were to be set aside.
    """
    inner = call.arguments.get("call", call)  # of a process that shares its tasks
    task_run = inner.task_run if isinstance(inner, Call) else None
    where = ""
    if call.foreign:
        where = f" in {call.foreign}"
    if document:
        name = document.label.rpartition("+")[0]
        if document.row == READING:
            return _describe_death_of_reader(name, how, call.sets_aside)
        if task_run and not call.foreign:
            where = f" in {task_run.run}"
        where += f" on {name}, row {document.row}"
        if not document.is_alone:
            where += " or soon after"
    elif task_run:
        where += f" in the task {task_run.task.name} of {task_run.run}{_describe_files(task_run.task)}"
    if deaths > MAX_DEATHS:
        return (
            f"worker processes died on {deaths:,} documents of one task, at last{where} ({how}): "
            f"{'fix the function' if call.foreign else 'try fewer --workers'}, as so many are not set aside"
        )
    reason = f"a worker process died{where} ({how})"
    aside = ""
    if document and not call.sets_aside:
        aside = ". With --max_failed 0.001 so many documents on which that happens are set aside"
    if call.foreign:
        return (
            f"{reason}: it ended its own process (os._exit(), a signal, or a crash in a C library), or the machine ran "
            f"out of memory; in that case try fewer --workers{aside}"
        )
    if document:
        return f"{reason}: the machine ran out of memory, or a library crashed. Try fewer --workers{aside}"
    return (
        f"{reason}: most often the machine ran out of memory. Try fewer --workers or a "
        "smaller --memory. (Called from a script of yours? Then call it under `if __name__ == '__main__':`.)"
    )


def _describe_files(task: Task) -> str:
    """Return which files of a corpus a task reads, where its name does not say it."""
    files = list(dict.fromkeys(filter(None, task.names.values())))
    if len(files) < 2:
        return ""
    named = ", ".join(files[:_FILES_NAMED])
    if len(files) > _FILES_NAMED:
        named += f" and {count_of(len(files) - _FILES_NAMED, 'other')}"
    return f", which reads {named}"


def _describe_death_of_reader(file: str, how: str, sets_aside: bool) -> str:
    """Return that a worker died while it read a file, and why that may be."""
    reason = (
        f"a worker process died while {file} was read ({how}): a library crashed on it, or the machine ran out of "
        "memory; in that case try fewer --workers"
    )
    if sets_aside:
        return reason
    return f"{reason}. With --max_failed above 0 a file on which that happens is left out as a damaged one"


class _WorkerHandle(popen_forkserver.Popen):
    """A worker process whose exit code several threads may ask for.

    The fork server sends the code once, through a pipe. The pool's thread and that of the driver ask for it when a
    worker dies: the second to read would take the closed pipe for exit code 255, or the worker for alive.
    """

    def __init__(self, process: BaseProcess) -> None:
        self.reading = threading.Lock()
        super().__init__(process)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        seconds = 0 if flag == os.WNOHANG else None
        has_ended = bool(self.returncode is None and wait_for_end([self.sentinel], seconds))
        with self.reading:
            if has_ended:
                return super().poll(flag)
            return self.returncode


class _Worker(ForkServerProcess):
    """A process of the pool, started by the fork server."""

    @staticmethod
    def _Popen(process: BaseProcess) -> _WorkerHandle:
        return _WorkerHandle(process)


class PoolContext(ForkServerContext):
    """Starts processes by the fork server, and appends each to `started`."""

    def __init__(self, started: list[BaseProcess]) -> None:
        super().__init__()
        self.started = started

    def Process(self, *arguments: Any, **named: Any) -> ForkServerProcess:  # type: ignore[override]
        process = _Worker(*arguments, **named)
        process.name = str(len(self.started))  # its slot in the journal
        self.started.append(process)
        return process


def _start_worker(lock: Path | None, journal: Journal) -> None:
    """Prepare a worker process for calls; `lock` is the lock file of the stage, of which it holds a share."""
    use_journal(journal, int(multiprocessing.current_process().name))
    signal.signal(signal.SIGINT, lambda *_: None)  # between calls; SIG_IGN would be inherited by other programs
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    pyarrow.set_cpu_count(1)  # there is a worker for every core
    exit_in_time()
    exit_with_parent()
    multiprocessing.set_start_method(None, force=True)  # processes of a user's function start as in a script of theirs
    if lock:
        hold_worker_lock(lock)


def _run_in_worker(call: Callable[[], Any], number: int, known: KnownDeaths) -> Any:
    """Run a call, which Ctrl-C interrupts; at SIGTERM it cleans up, and the process exits."""
    try:
        with raised_signals(), known_deaths(number, known):
            return call()
    except Terminated:
        os._exit(TERMINATED)  # at once: an exception would be sent to a driver that may be gone


@contextmanager
def _explain_start() -> Iterator[None]:
    """Context: convert an OSError of starting worker processes to a GristmillError."""
    try:
        yield
    except OSError as error:
        hints = {
            errno.EMFILE: "raise the limit of open files (ulimit -n 1024)",
            errno.ENOENT: "the current folder was removed: change to another one",
        }
        hint = hints.get(error.errno or 0, f"{error}. Set TMPDIR to a folder with a short name, such as /var/tmp")
        raise GristmillError(f"cannot start worker processes: {hint}, or give --workers 1") from error


def hash_files(executor: Executor, paths: Sequence[Path]) -> dict[Path, str]:
    """Return the SHA-256 of files, read by workers. Raises InputError if one cannot be read."""
    hashes = executor.run([Call(hash_file, {"path": path}) for path in paths])
    return {paths[position]: sha256 for position, sha256 in hashes}


_ONE_AT_A_TIME = threading.Lock()


def start_fork_server(modules: list[str]) -> None:
    """Start multiprocessing's fork server, with `modules` imported from the folder of this project.

    The server does not get this process's sys.path: without PYTHONPATH it would import another copy
    of this project, one that is installed or in the working folder.
    """
    preloaded = [_FOR_FORK_SERVER]
    if "gristmill.kernels" in sys.modules:
        preloaded.append(_FOR_FORK_SERVER_OF_KERNELS)
    forkserver.set_forkserver_preload([*preloaded, *modules])
    folders = [str(Path(__file__).resolve().parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PYTHONPATH": os.pathsep.join(folders), "PYTHONSAFEPATH": "1"}
    with _ONE_AT_A_TIME:  # of several threads: the environment is that of the process
        before = {name: os.environ.pop(name, None) for name in variables}
        os.environ.update(variables)
        resource_tracker.ensure_running()  # else the fork server would start it, which clears the mask
        # Server and workers inherit the mask: else Ctrl-C would print tracebacks while they start.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for name, value in before.items():
                del os.environ[name]
                if value is not None:
                    os.environ[name] = value
