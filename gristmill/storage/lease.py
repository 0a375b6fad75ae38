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
from pathlib import Path

from gristmill.errors import GristmillError, OutputError
from gristmill.storage.objects import FileInfo, delete_objects, read_object, swap_object

_RENEWALS = 4  # in this time


def lease_seconds() -> float:
    """Seconds without a sign of life after which a process counts as dead; GRISTMILL_LEASE_SECONDS, or 30."""
    return float(os.environ.get("GRISTMILL_LEASE_SECONDS", "30"))


class Lease:
    """A lease on the object `path`; see `acquire` and `release`."""

    def __init__(self, path: Path) -> None:
        self.path, self.seconds = path, lease_seconds()
        self.holder = ""  # who has it, if it is not this process
        self._name = f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}"
        self._info: FileInfo | None = None  # of the object as this process wrote it
        self._seen: tuple[FileInfo | None, float] = (None, 0.0)  # the other's lease, and since when it is unchanged
        self._lost = ""
        self._ended = threading.Event()
        self._renewing: threading.Thread | None = None

    def acquire(self) -> bool:
        """Take the lease if nobody has it or it has run out; else say who has it in `holder`. Call it repeatedly."""
        found, data = self._read()
        if found is not None:
            seen, since = self._seen
            if found != seen:
                self._seen, self.holder = (found, time.monotonic()), data.decode(errors="replace").split("\n")[0]
                return False
            if time.monotonic() - since < self.seconds:
                return False
        self._info = swap_object(self.path, self._content(), found)
        if self._info is None:
            return False
        self._ended.clear()
        self._renewing = threading.Thread(target=self._renew, daemon=True)
        self._renewing.start()
        return True

    def check(self) -> None:
        """Raise OutputError if another process has taken the lease over, as this one did not renew it in time."""
        if self._lost:
            raise OutputError(f"{self.path}: {self._lost}. This process stops; run the same command again to go on")

    def release(self) -> None:
        """End the renewals, and delete the object if it is still this process's."""
        self._ended.set()
        if self._renewing:
            self._renewing.join()
        if self._info and not self._lost and self._read()[0] == self._info:
            delete_objects([self.path])
        self._info = None

    def _renew(self) -> None:
        renewed = time.monotonic()
        while not self._ended.wait(self.seconds / _RENEWALS):
            try:
                info = swap_object(self.path, self._content(), self._info)
            except (GristmillError, OSError) as error:
                if time.monotonic() - renewed > self.seconds:
                    self._lost = f"the lease could not be renewed in {self.seconds:g} s ({error})"
                    return
                continue
            if info is None:
                self._lost = "another process has taken over the work, as this one did not answer for too long"
                return
            self._info, renewed = info, time.monotonic()

    def _read(self) -> tuple[FileInfo | None, bytes]:
        try:
            data, info = read_object(self.path)
        except FileNotFoundError:
            return None, b""
        return info, data

    def _content(self) -> bytes:
        return f"{self._name}\n{secrets.token_hex(8)}".encode()
