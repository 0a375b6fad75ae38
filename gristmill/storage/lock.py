"""Lock: one process at a time runs a stage with one output; a second one waits for it and says for whom.

On a disk it is a file lock. In a bucket it is a lease, an object, which runs out when its holder dies: the holder
renews it by writing it again. No clock of another machine is trusted: a process that waits takes the lease over when it
has seen it unchanged for all its time. Every write is conditional on what was there before: one process succeeds.
"""

import fcntl
import glob
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from gristmill.errors import GristmillError, StorageError, TakenOver, require, wrap_write_errors
from gristmill.storage.files import read_files
from gristmill.storage.listings import FileInfo
from gristmill.storage.local import atomic_write_bytes, flush_later
from gristmill.storage.objects import RETRIES, delete_objects, read_object, swap_object
from gristmill.storage.stores import store_of

_WORKERS = "-workers"
_SHORTEST = 0.1  # seconds
_LONGEST = 86_400  # seconds
_POLLS = 30  # of a lease in its time
_RENEWALS = 4  # in this time
_LOOKS = 100  # in this time, of a worker that waits for a renewal
_PROCESS = secrets.token_hex(8)  # in all leases of this process


def lease_seconds() -> float:
    """Return seconds without a sign of life after which a process counts as dead; GRISTMILL_LEASE_SECONDS, or 30."""
    return seconds_in("GRISTMILL_LEASE_SECONDS", 30, ", or give all processes of a run the same")


def seconds_in(variable: str, default: int, hint: str = "") -> float:
    """Return the seconds that an environment variable gives. Raises UsageError for what is none."""
    given = os.environ.get(variable, str(default))
    seconds = 0.0
    with suppress(ValueError):
        seconds = float(given)
    require(
        _SHORTEST <= seconds <= _LONGEST,
        f"{variable} {given!r}: expected seconds, from {_SHORTEST:g} to {_LONGEST:,}; unset it for {default}{hint}",
    )
    return seconds


def _own_name() -> str:
    """Return what a lock says of its holder; `gristmill status` reads it."""
    return f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}"


class Lease:
    """A lease on the object `path`; see `acquire` and `release`.

    `dead` has processes of which another lease has run out: theirs are taken over at once. Those of this one are added.
    `heartbeat`: a local file that says when the lease was renewed last, for `is_held`, and nothing once it is not held.
    """

    def __init__(self, path: Path, dead: set[str] | None = None, heartbeat: Path | None = None) -> None:
        self.path = path
        self.seconds = lease_seconds()
        self.heartbeat = heartbeat
        self.dead = set[str]() if dead is None else dead
        self.holder = ""  # who has it, if it is not this process
        self._name = f"{_own_name()}\n{_PROCESS}\n{secrets.token_hex(8)}\n".encode()
        self._info: FileInfo | None = None  # of the object as this process wrote it
        self._seen: tuple[FileInfo | None, float] = (None, 0.0)  # the other's lease, and since when it is unchanged
        self._renewed = 0.0
        self._is_lost = False
        self._renewal = threading.Lock()
        self._ended = threading.Event()
        self._renewing: threading.Thread | None = None

    def acquire(self) -> bool:
        """Take the lease if nobody has it or it has run out; else say who has it in `holder`. Call it repeatedly."""
        version, data = self._read()
        process = _process_of(data)
        if data and process not in self.dead:  # no data: the empty lock file of a local run that was moved here
            seen, since = self._seen
            if version != seen:
                self._seen = (version, _now())
                self.holder = data.decode(errors="replace").split("\n")[0]
                return False
            if _now() - since < self.seconds:
                return False
        self._renewed = _now()
        self._info = swap_object(self.path, self._content(), version)
        if self._info is None:
            return False
        if process and process != _PROCESS:
            self.dead.add(process)
        self._show(is_held=True)
        self._ended.clear()
        self._renewing = threading.Thread(target=self._renew_often, daemon=True)
        self._renewing.start()
        return True

    def check(self) -> None:
        """Raise OutputError if another process has taken the lease over; renew it first if that is overdue."""
        if not self._is_lost and _now() - self._renewed > self.seconds:
            self._renew()
        if self._is_lost:
            raise TakenOver(
                f"{self.path}: another process has taken over the work, as this one did not answer for "
                f"{self.seconds:g} s. This process stops; run the same command again to resume"
            )

    def release(self) -> None:
        """End the renewals, and delete the object if it is still this process's; if that fails, it runs out."""
        self._ended.set()
        if self._renewing:
            self._renewing.join()
        self._show(is_held=False)
        with suppress(GristmillError, OSError):
            if self._info and not self._is_lost and self._read()[0] == self._info:
                delete_objects([self.path])
        self._info = None

    def _renew_often(self) -> None:
        while not self._ended.wait(self.seconds / _RENEWALS) and not self._is_lost:
            with suppress(GristmillError, OSError):  # the next one may do; `check` says what is wrong
                self._renew()

    def _renew(self) -> None:
        with self._renewal:
            begun = _now()
            info = swap_object(self.path, self._content(), self._info)
            if info is None:  # perhaps an earlier renewal had an effect, and no answer came
                version, data = self._read()
                if version and data.startswith(self._name):
                    info = swap_object(self.path, self._content(), version)
            self._info = info
            self._renewed = begun
            self._is_lost = info is None
            self._show(not self._is_lost)

    def _show(self, is_held: bool) -> None:
        """Tell workers whether the lease is held. Of a scratch that cannot be written a task says what is wrong."""
        with suppress(GristmillError, OSError), flush_later():
            if self.heartbeat:
                atomic_write_bytes(self.heartbeat, f"{self._renewed}".encode() if is_held else b"")

    def _read(self) -> tuple[FileInfo | None, bytes]:
        try:
            data, info = read_object(self.path)
        except FileNotFoundError:
            return None, b""
        return info, data

    def _content(self) -> bytes:
        return self._name + secrets.token_hex(8).encode()


def is_held(heartbeat: Path) -> bool:
    """Return whether the lease with this `heartbeat` is held, as a worker of its holder sees it.

    Holder and workers may have been stopped for so long that another process has taken over: the worker waits until the
    holder has renewed the lease, or ends; so it does if somebody has removed the file. Raises StorageError if neither
    comes, as the store is away.
    """
    deadline = time.monotonic() + max(lease_seconds(), RETRIES["retry_timeout"].total_seconds())
    while time.monotonic() <= deadline:
        with suppress(FileNotFoundError):
            renewed = heartbeat.read_text()
            if not renewed or _now() - float(renewed) < lease_seconds():
                return bool(renewed)
        time.sleep(lease_seconds() / _LOOKS)
    raise StorageError("the store does not renew the lock of this run. Run the same command again to resume")


def _process_of(data: bytes) -> str:
    """Return the process whose lease has this content."""
    return data.decode(errors="replace").partition("\n")[2].partition("\n")[0]


def _now() -> float:
    """Return the seconds that go on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@contextmanager
def stage_lock(
    path: Path,
    quiet: bool = False,
    shared: bool = False,
    while_waiting: Callable[[], None] | None = None,
    dead: set[str] | None = None,
    heartbeat: Path | None = None,
) -> Iterator[Callable[[], None]]:
    """Context: hold the lock file `path`, alone or `shared`; wait for other processes that exclude it.

    Runs of parts of a stage's work share the lock of a run of all of it. In a bucket it is a Lease and never shared:
    runs of parts wait for one another. Yields a function that raises OutputError if the lease is lost.

    `while_waiting` is called again and again until the lock is free; it should return soon. For `dead` and
    `heartbeat` see Lease.
    """
    if store_of(path).has_file_locks:
        with _file_lock(path, quiet, shared, while_waiting):
            yield lambda: None
        return
    with _object_lock(Lease(path, dead, heartbeat), quiet, while_waiting) as lease:
        yield lease.check


@contextmanager
def _object_lock(lease: Lease, quiet: bool, while_waiting: Callable[[], None] | None) -> Iterator[Lease]:
    named = ""
    while not lease.acquire():
        if lease.holder != named and not quiet:
            named = lease.holder
            _say_waiting(named)
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
def _file_lock(path: Path, quiet: bool, shared: bool, while_waiting: Callable[[], None] | None) -> Iterator[None]:
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
            file.write(_own_name().encode())
            workers_path(path).touch()
        parts = f"{glob.escape(path.stem)}+*{_WORKERS}"  # the workers of calls that did parts of the work
        for orphans in path.parent.glob(parts):
            part = orphans.with_name(orphans.name.removesuffix(_WORKERS))
            _wait_for(orphans, any(read_files([part])), quiet)
        _wait_for(workers_path(path), was_killed, quiet)
        try:
            yield
        finally:
            file.truncate(0)


def is_locked(path: Path) -> bool:
    """Return whether a process holds the local lock file `path` alone."""
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
    """Return the lock file that the workers of a run share, next to the stage's own."""
    return path.with_name(path.name + _WORKERS)


def _wait_for(workers: Path, was_killed: bool, quiet: bool) -> None:
    """Wait until the last worker process of an earlier run has ended; say so if that is not at once."""
    with workers.open("rb") as file:
        for _ in range(10):
            if _try_lock(file, fcntl.LOCK_EX):
                return
            time.sleep(0.03)
        if not quiet:
            run = "a run that has just ended"
            if was_killed:
                run = "a run that was killed"
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
