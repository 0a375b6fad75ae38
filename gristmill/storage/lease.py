"""Lease: a lock that is an object, for processes on several machines; it runs out when its holder dies.

The holder renews it by writing it again. No clock of another machine is trusted: a process that waits takes the lease
over when it has seen it unchanged for its whole time. Every write is conditional on what was there before, so only
one process succeeds.
"""

import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

from gristmill.arguments import seconds_in
from gristmill.errors import GristmillError, StorageError, TakenOver
from gristmill.storage.local import atomic_write_bytes, flush_later
from gristmill.storage.objects import FileInfo, delete_objects, read_object, swap_object
from gristmill.storage.repeats import RETRIES

_RENEWALS = 4  # in this time
_LOOKS = 100  # in this time, of a worker that waits for a renewal
_PROCESS = secrets.token_hex(8)  # in all leases of this process


def lease_seconds() -> float:
    """Seconds without a sign of life after which a process counts as dead; GRISTMILL_LEASE_SECONDS, or 30."""
    return seconds_in("GRISTMILL_LEASE_SECONDS", 30, ", or give all processes of a run the same")


class Lease:
    """A lease on the object `path`; see `acquire` and `release`.

    `dead` has processes of which another lease has run out: theirs are taken over at once. Those of this one are added.
    `heartbeat`: a local file that says when the lease was renewed last, for `is_held`, and nothing once it is not held.
    """

    def __init__(self, path: Path, dead: set[str] | None = None, heartbeat: Path | None = None) -> None:
        self.path, self.seconds, self.heartbeat = path, lease_seconds(), heartbeat
        self.dead = set[str]() if dead is None else dead
        self.holder = ""  # who has it, if it is not this process
        name = f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}"
        self._name = f"{name}\n{_PROCESS}\n{secrets.token_hex(8)}\n".encode()
        self._info: FileInfo | None = None  # of the object as this process wrote it
        self._seen: tuple[FileInfo | None, float] = (None, 0.0)  # the other's lease, and since when it is unchanged
        self._renewed = 0.0
        self._is_lost = False
        self._renewal = threading.Lock()
        self._ended = threading.Event()
        self._renewing: threading.Thread | None = None

    def acquire(self) -> bool:
        """Take the lease if nobody has it or it has run out; else say who has it in `holder`. Call it repeatedly."""
        found, data = self._read()
        process = _process_of(data)
        if data and process not in self.dead:  # no data: the empty lock file of a local run that was moved here
            seen, since = self._seen
            if found != seen:
                self._seen, self.holder = (found, _now()), data.decode(errors="replace").split("\n")[0]
                return False
            if _now() - since < self.seconds:
                return False
        self._renewed = _now()
        self._info = swap_object(self.path, self._content(), found)
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
                f"{self.seconds:g} s. This process stops; run the same command again to go on"
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
            with suppress(GristmillError, OSError):  # the next one may do; `check` tells what is wrong
                self._renew()

    def _renew(self) -> None:
        with self._renewal:
            begun = _now()
            info = swap_object(self.path, self._content(), self._info)
            if info is None:  # perhaps an earlier renewal had an effect, and no answer came
                found, data = self._read()
                if found and data.startswith(self._name):
                    info = swap_object(self.path, self._content(), found)
            self._info, self._renewed, self._is_lost = info, begun, info is None
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
    """Whether the lease with this `heartbeat` is held, as a worker of its holder sees it.

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
    raise StorageError("the store does not renew the lock of this run. Run the same command again to go on")


def _process_of(data: bytes) -> str:
    """The process whose lease has this content."""
    return data.decode(errors="replace").partition("\n")[2].partition("\n")[0]


def _now() -> float:
    """Seconds that go on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
