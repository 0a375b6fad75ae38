"""Scratch folders: a new one for each process, in which each task has a folder and a share of the size."""

import fcntl
import glob
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from gristmill.engine.scratch.room import Room, too_small
from gristmill.errors import wrap_write_errors
from gristmill.storage.files import is_file
from gristmill.storage.lease import is_held
from gristmill.storage.local import locked, locked_for_now
from gristmill.urls import is_remote

_PREFIX = "gristmill-scratch-"
_OWNER = "owner"  # the file in a scratch folder on which its process holds a lock as long as it lives
_WAIT_SECONDS = 0.2


@dataclass(frozen=True)
class Scratch:
    """A folder where tasks work on copies, which take `size` bytes at most, all together, if it is given.

    `is_private`: local outputs are staged, too, as other processes write beside. `fence`: a file that is there as long
    as the step of the tasks runs; what a task that ends later has written is dropped. `heartbeat`: the file
    that says whether the lease of the tasks is held, for workers of its holder; it is a fence, too. `group`: the name
    of processes of this machine, each with a folder beside, whose tasks take `size` bytes together, as Ray's on a node.
    """

    folder: Path
    size: int | None = None
    is_private: bool = False
    fence: Path | None = None
    heartbeat: Path | None = None
    group: str = ""

    def check_room(self, name: str, size: int) -> None:
        """Raise OutputError if the task `name` reads more than the whole size."""
        if self.size is not None and size > self.size:
            raise too_small(self.size, name, size)

    def may_publish(self) -> bool:
        """Whether a task that has ended may put its outputs in their places: no other process has taken over."""
        return (self.fence is None or is_file(self.fence)) and (self.heartbeat is None or is_held(self.heartbeat))

    def with_heartbeat(self, lock: Path) -> "Scratch":
        """The same with a heartbeat of the lease `lock`, or with none if that is a local file: orphans hold it, too."""
        return replace(self, heartbeat=self.folder / f"{lock.name}.heartbeat" if is_remote(lock) else None)

    @contextmanager
    def reserve(self, size: int) -> Iterator[Room]:
        """Context: a new folder for a task, which is removed at the end, when `size` bytes, or all, are free.

        What is reserved is the number in the name of a file beside the folder.
        """
        folder = self.folder / f"{os.getpid()}-{secrets.token_hex(4)}"
        room = Room(folder, -1, self.size, self._extend)
        try:
            while self.size is not None and not self._extend(room, min(size, self.size)):
                time.sleep(_WAIT_SECONDS)
                if self.group:
                    _remove_left(self.folder.parent)  # of one that was killed, for which nobody else makes room
            with wrap_write_errors(self.folder):
                folder.mkdir(parents=True)
            yield room
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            _note(room).unlink(missing_ok=True)

    def _extend(self, room: Room, size: int) -> bool:
        """Reserve `size` bytes for a task instead of what it had; False if they are not free."""
        lock = self.folder / "lock"
        if self.group:
            lock = self.folder.with_name(f"{_prefix()}{self.group}.lock")
        with wrap_write_errors(self.folder), locked_for_now(lock) if self.group else locked(lock):
            names = glob.glob(self._notes)  # noqa: PTH207, as Path.glob raises an error if a folder vanishes
            used = sum(int(name.rpartition("+")[2]) for name in names) - max(room.reserved, 0)
            if self.size is not None and used + size > self.size:
                return False
            before, room.reserved = _note(room), size
            if before.exists():
                before.rename(_note(room))
            else:
                _note(room).touch()
        return True

    @property
    def _notes(self) -> str:
        """A pattern of the files that say what is reserved, of all tasks that take the size together."""
        parent = glob.escape(str(self.folder.parent))
        return f"{parent}/{_prefix()}*-{self.group}/*+*" if self.group else f"{glob.escape(str(self.folder))}/*+*"


def _note(room: Room) -> Path:
    return Path(f"{room.folder}+{room.reserved}")


@contextmanager
def open_scratch(folder: Path | None, size: int | None, is_private: bool = False, group: str = "") -> Iterator[Scratch]:
    """Context: a new scratch folder in `folder`, by default that of temporary files; it is removed at the end.

    What killed runs on a machine of this name left in `folder` is removed, too.
    """
    parent = (folder or Path(tempfile.gettempdir())).absolute()
    _remove_left(parent)
    with ExitStack() as stack:
        is_own = False
        while not is_own:  # another process may take it for one that was left, and remove it before it is locked
            own = parent / f"{_prefix()}{os.getpid()}-{secrets.token_hex(4)}{group and f'-{group}'}"
            stack.callback(shutil.rmtree, own, ignore_errors=True)
            is_own = True
            with suppress(OSError):  # a task that needs it says what is wrong
                own.mkdir(parents=True)
                owner = stack.enter_context((own / _OWNER).open("wb"))
                fcntl.flock(owner, fcntl.LOCK_EX)
                is_own = (own / _OWNER).exists()
        yield Scratch(own, size, is_private, group=group)


def _prefix() -> str:
    """The beginning of the names of scratch folders that processes of this machine have."""
    return f"{_PREFIX}{socket.gethostname()}-"


def _remove_left(parent: Path) -> None:
    """Remove the scratch folders of processes of this machine that have died."""
    for owner in parent.glob(f"{_prefix()}*/{_OWNER}"):
        with suppress(OSError), owner.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # numbers of processes repeat, locks do not
            shutil.rmtree(owner.parent, ignore_errors=True)
