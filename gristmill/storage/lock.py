"""Lock: one process at a time runs a stage with one output; a second one waits for it and says for whom."""

import fcntl
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from gristmill.errors import GristmillError, StorageError, wrap_write_errors
from gristmill.storage.files import read_files
from gristmill.storage.lease import Lease
from gristmill.urls import is_remote

_WORKERS = "-workers"
_POLLS = 30  # of a lease in its time


@contextmanager
def stage_lock(
    path: Path,
    quiet: bool = False,
    shared: bool = False,
    whole: bool = False,
    while_waiting: Callable[[], None] | None = None,
    dead: set[str] | None = None,
    heartbeat: Path | None = None,
) -> Iterator[Callable[[], None]]:
    """Context: hold the lock file `path`, alone or `shared`; wait for other processes that exclude it.

    The lock of the `whole` of a stage is shared by runs of parts of its work. In a bucket it is a lease (lease.py) and
    never shared: runs of parts wait for one another. Yields a function that raises OutputError if the lease is lost.

    `while_waiting` is called again and again until the lock is free; it should return soon. For `dead` and
    `heartbeat` see Lease.
    """
    if is_remote(path):
        with _object_lock(Lease(path, dead, heartbeat), quiet, while_waiting) as lease:
            yield lease.check
        return
    with _file_lock(path, quiet, shared, whole, while_waiting):
        yield lambda: None


@contextmanager
def _object_lock(lease: Lease, quiet: bool, while_waiting: Callable[[], None] | None) -> Iterator[Lease]:
    told = ""
    while not lease.acquire():
        if lease.holder != told and not quiet:
            told = lease.holder
            _say_waiting(told)
        (while_waiting or partial(time.sleep, lease.seconds / _POLLS))()
    try:
        yield lease
    except GristmillError:  # perhaps of what is missing, as another process has taken over and has removed it
        with suppress(StorageError):
            lease.check()
        raise
    finally:
        lease.release()


@contextmanager
def _file_lock(
    path: Path, quiet: bool, shared: bool, whole: bool, while_waiting: Callable[[], None] | None
) -> Iterator[None]:
    """Context: a lock on a local file.

    The operating system releases the lock of a process that ends, in whatever way. The worker processes of a run
    that was killed, or has just ended, may live a moment longer: each holds `worker_lock`, which is waited for, too. A
    run that was killed has left its name in the file.
    """
    with wrap_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered: on a full disk, closing the file would write the buffer again.
        file = path.open("r+b" if path.exists() else "w+b", buffering=0)
    with file:
        _lock(file, quiet, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, while_waiting)
        if shared:
            yield
            return
        was_killed = bool(file.read())
        with wrap_write_errors(path):
            file.truncate(0)
            file.seek(0)
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            file.write(f"process {os.getpid()} on {socket.gethostname()}, since {since}".encode())
            workers_path(path).touch()
        for orphans in path.parent.glob(f"{path.stem}-*{_WORKERS}") if whole else []:  # of parts of the work
            part = orphans.with_name(orphans.name.removesuffix(_WORKERS))
            _wait_for(orphans, any(read_files([part])), quiet)
        _wait_for(workers_path(path), was_killed, quiet)
        try:
            yield
        finally:
            file.truncate(0)


def is_locked(path: Path) -> bool:
    """Whether a process holds the local lock file `path` alone."""
    with path.open("rb") as file:
        return not _try_lock(file, fcntl.LOCK_SH)


def hold_worker_lock(path: Path) -> None:
    """Hold a share of the workers' lock until this process ends; called once in each worker of a run.

    Processes that are forked from it, as a user's function may do, do not hold it: they write no output.
    """
    file = os.open(workers_path(path), os.O_RDONLY | os.O_CREAT)
    fcntl.flock(file, fcntl.LOCK_SH)
    os.register_at_fork(after_in_child=partial(os.close, file))


def workers_path(path: Path) -> Path:
    """The lock file that the workers of a run share, beside the stage's own."""
    return path.with_name(path.name + _WORKERS)


def _wait_for(workers: Path, was_killed: bool, quiet: bool) -> None:
    """Wait until the last worker process of an earlier run has ended; say so if that is not at once."""
    with workers.open("rb") as file:
        for _ in range(10):
            if _try_lock(file, fcntl.LOCK_EX):
                return
            time.sleep(0.03)
        if not quiet:
            run = "a run that was killed" if was_killed else "a run that has just ended"
            _say_waiting(f"worker processes of {run} (fuser {workers} lists them)")
        fcntl.flock(file, fcntl.LOCK_EX)


def _lock(file: BinaryIO, quiet: bool, kind: int, while_waiting: Callable[[], None] | None) -> None:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = ""
        for _ in range(20):  # it writes its name just after it has locked the file
            holder = holder or file.read().decode(errors="replace")
            time.sleep(0 if holder else 0.01)
        if not quiet:
            _say_waiting(holder)
        while while_waiting and not _try_lock(file, kind):
            while_waiting()
        fcntl.flock(file, kind)
        file.seek(0)


def _try_lock(file: BinaryIO, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _say_waiting(holder: str) -> None:
    message = f"waiting for {holder or 'another process'}, which works on the same output"
    print(message, file=sys.stderr, flush=True)
