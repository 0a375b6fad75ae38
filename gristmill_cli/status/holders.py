"""Holders: who holds the locks of stages and runs, and whether they live; whoever was killed holds his no more."""

import re
import socket
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec
import psutil

from gristmill.storage.files import read_files
from gristmill.storage.lease import lease_seconds
from gristmill.storage.lock import is_locked
from gristmill.urls import is_remote


class Holder(msgspec.Struct, frozen=True):
    """Who holds a lock, or did when he was killed, as he has written it there."""

    words: str
    is_alive: bool = True

    @property
    def process(self) -> tuple[str, int, str] | None:
        """His host, the number of his process, and since when he works."""
        found = re.fullmatch(r"process (\d+) on (.+), since (.+)", self.words)
        return (found[2], int(found[1]), found[3]) if found else None

    @property
    def is_here(self) -> bool:
        """Whether his process would be one of this host."""
        return self.process is not None and self.process[0] == socket.gethostname()


def find_holders(locks: Sequence[Path], unwatched: Collection[Path]) -> dict[Path, Holder]:
    """Who holds each of the locks that are held, or left by processes that were killed.

    Leases of other hosts' processes are watched until they are renewed, or should have been; who holds one of those
    `unwatched` counts as alive.
    """
    contents = {path: data for path in locks for data in read_files([path]) if data}
    found = {path: Holder(data.decode(errors="replace").partition("\n")[0]) for path, data in contents.items()}
    alive = {path: is_locked(path) for path in found if not is_remote(path)}
    alive |= {path: True for path in unwatched if path in found and is_remote(path)}
    for path, holder in found.items():
        if path not in alive and holder.process and holder.is_here:
            alive[path] = psutil.pid_exists(holder.process[1])
    deadline = time.monotonic() + lease_seconds() / 2
    while len(alive) < len(found) and time.monotonic() < deadline:
        time.sleep(min(0.5, lease_seconds() / 8))
        watched = [path for path in found if path not in alive]
        now = {path: data for path in watched for data in read_files([path])}
        alive |= {path: True for path in watched if now.get(path) != contents[path]}
    return {path: msgspec.structs.replace(holder, is_alive=alive.get(path, False)) for path, holder in found.items()}
