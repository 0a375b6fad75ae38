"""Scratch: a folder for each process in which tasks work on copies, and the quota of disk that these tasks share.

Before a task begins it reserves the size of the copies of its inputs, and of its outputs as large as what it reads. The
name of its folder ends in that number, so a listing shows what is reserved. Tasks wait until their reservation fits.
"""

import fcntl
import glob
import os
import random
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from gristmill.errors import OutputError, wrap_write_errors
from gristmill.storage.files import is_file
from gristmill.storage.lock import is_held
from gristmill.urls import is_remote

_OWNER = "owner"  # the file in a scratch folder on which its process holds a lock as long as it lives
_WAIT_SECONDS = 0.2


@dataclass(frozen=True)
class Scratch:
    """A folder where tasks work on copies, which reserve `size` bytes at most, all together, if it is given.

    `is_private`: local outputs are staged, too, as other processes may run the same task. `fence`: a file that exists
    as long as the step of the tasks runs; a task that ends later publishes nothing. `heartbeat`: the file that says
    whether the lease of the run is held, for workers of its holder. `group`: a name that processes of one machine, as
    Ray's on a node, have in common: their tasks share the quota.
    """

    folder: Path
    size: int | None = None
    is_private: bool = False
    fence: Path | None = None
    heartbeat: Path | None = None
    group: str = ""

    def may_publish(self) -> bool:
        """Whether a task that has ended may publish its outputs: no other process has taken over the step or run."""
        return (self.fence is None or is_file(self.fence)) and (self.heartbeat is None or is_held(self.heartbeat))

    def with_heartbeat(self, lock: Path) -> "Scratch":
        """The same with a heartbeat of the lease `lock`, or with none if that is a local file: orphans hold it, too."""
        return replace(self, heartbeat=self.folder / f"{lock.name}.heartbeat" if is_remote(lock) else None)

    @contextmanager
    def reserve(self, task: str, inputs: int, outputs: int = 0) -> Iterator[Path]:
        """Context: a new folder for a task with such sizes of copies and outputs, once they fit into the quota.

        A task for which the quota is too small waits until it is alone. Raises OutputError if its inputs do not fit.
        """
        needed = inputs + outputs
        if self.size is not None:
            if inputs > self.size:
                raise OutputError(
                    f"--scratch_size {self.size:,} bytes is too small for the task {task}: expected at least the size "
                    f"of its inputs, {inputs:,} bytes; try {2 * inputs:,}"
                )
            needed = min(needed, self.size)
        folder = self.folder / f"{os.getpid()}-{secrets.token_hex(4)}+{needed}"
        with wrap_write_errors(self.folder):
            while not self._take(folder, needed):
                time.sleep(_WAIT_SECONDS * (0.5 + random.random()))  # at random: two that collide do so once
                _remove_folders_of_dead(self.folder.parent)  # for which nobody else makes room
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _take(self, folder: Path, size: int) -> bool:
        """Make a task's folder if its reservation and all others, those made at this moment included, fit the quota."""
        if self.size is not None and self._reserved() + size > self.size:
            return False
        folder.mkdir(parents=True)
        if self.size is not None and self._reserved() > self.size:
            folder.rmdir()
            return False
        return True

    def _reserved(self) -> int:
        """Bytes that the tasks reserve which share the quota."""
        parent, own = glob.escape(str(self.folder.parent)), glob.escape(self.folder.name)
        folders = f"{parent}/{_prefix()}*-{self.group}/*+*" if self.group else f"{parent}/{own}/*+*"
        return sum(int(name.rpartition("+")[2]) for name in glob.glob(folders))  # noqa: PTH207  # as folders vanish


@contextmanager
def open_scratch(folder: Path | None, size: int | None, is_private: bool = False, group: str = "") -> Iterator[Scratch]:
    """Context: a new scratch folder in `folder`, by default that of temporary files; it is removed at the end.

    What killed runs on a machine of this name left in `folder` is removed, too.
    """
    parent = (folder or Path(tempfile.gettempdir())).absolute()
    _remove_folders_of_dead(parent)
    with ExitStack() as stack:
        is_own = False
        while not is_own:  # another process may take it for a dead one's, and remove it before it is locked
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
    return f"gristmill-scratch-{socket.gethostname()}-"


def _remove_folders_of_dead(parent: Path) -> None:
    """Remove the scratch folders of processes of this machine that have died."""
    for owner in parent.glob(f"{_prefix()}*/{_OWNER}"):
        with suppress(OSError), owner.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # process ids repeat, locks do not
            shutil.rmtree(owner.parent, ignore_errors=True)
