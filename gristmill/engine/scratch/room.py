"""Room: the share of a scratch that a task has reserved; what the task really takes is watched.

Nobody knows before how much a task will write. So while it works its folder is measured, many times a second, and what
it takes beyond its share is reserved, too, ahead of it. When that is not to be had, the process can write no more: the
task fails as on a full disk, its folder is removed, and it begins again when there is room for twice as much.
"""

import os
import resource
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gristmill.errors import OutputError

_LOOK_SECONDS = 0.02  # between two looks at what a task takes
_STEPS = 16  # in which a task may come to take the whole
_LOOK_SHARE = 20  # a look takes this part of the time, at most
_MORE = 2  # times what an ended task has taken are reserved for the next attempt
_BLOCK_BYTES = 512  # the unit of st_blocks, whatever the file system


class Outgrown(Exception):
    """A task took more than was free beside other tasks; `size` is what to reserve for the next attempt."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


@dataclass
class Room:
    """The `folder` of a task, for which `reserved` of `whole` bytes are kept from others; None: nothing is bounded.

    `extend` reserves so many bytes instead, and says whether they were to be had.
    """

    folder: Path
    reserved: int
    whole: int | None
    extend: Callable[["Room", int], bool]
    is_full: bool = False
    most: int = 0  # bytes that the task was seen to take

    @contextmanager
    def watched(self, name: str) -> Iterator[None]:
        """Context in which the task `name` works: it stays within its room, or is ended.

        Raises Outgrown, or OutputError if it had the whole scratch. While it is ended, this process cannot write files.
        """
        if self.whole is None:
            yield
            return
        limits, error = resource.getrlimit(resource.RLIMIT_FSIZE), None
        ended = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(ended, limits[1]), daemon=True)
        watcher.start()
        try:
            yield
        except Exception as raised:  # whatever a function makes of it that it could not write
            error = raised
        finally:
            ended.set()
            watcher.join()
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        if self.is_full or not self._has_room(self._measure()):
            raise self._outgrown(name) from error
        if error:
            raise error

    def _watch(self, ended: threading.Event, hard_limit: int) -> None:
        """Reserve what the task takes, and what it may take by the next look, until it has ended or is full."""
        before, pause = taken_by(self.folder), 0.0
        while not ended.wait(max(_LOOK_SECONDS, pause)):
            began, taken = time.monotonic(), self._measure()
            growth = taken - before
            with suppress(OutputError):  # of a disk that is full, which the task is told, too
                self.is_full = taken + growth > self.reserved and not self._has_more_room(taken, growth)
            if self.is_full:
                resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard_limit))
                return
            before, pause = taken, _LOOK_SHARE * (time.monotonic() - began)

    def _measure(self) -> int:
        taken = taken_by(self.folder)
        self.most = max(self.most, taken)
        return taken

    def _has_more_room(self, taken: int, growth: int) -> bool:
        """Reserve what is taken and some more, so that this is seldom; or if it is not free, just what is taken."""
        assert self.whole is not None
        return self.extend(self, taken + max(growth, self.whole // _STEPS)) or self._has_room(taken)

    def _has_room(self, size: int) -> bool:
        return size <= self.reserved or self.extend(self, size)

    def _outgrown(self, name: str) -> Exception:
        assert self.whole is not None
        if self.reserved < self.whole:
            return Outgrown(min(_MORE * max(self.most, self.reserved), self.whole))
        return too_small(self.whole, name, self.most)


def too_small(whole: int, name: str, taken: int) -> OutputError:
    """The error of a task for which the whole scratch does not do."""
    return OutputError(
        f"--scratch_size {whole:,} bytes: the task {name} alone needs {taken:,} bytes and more for what it reads and "
        f"writes: wanted {_MORE * max(taken, whole):,}, to begin with"
    )


def taken_by(folder: Path) -> int:
    """Bytes of disk that the files and folders in a folder take, with files that this process removed and has open."""
    names, total, real = [str(folder)], 0, f"{folder.resolve()}/"
    while names:
        with suppress(FileNotFoundError), os.scandir(names.pop()) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    total += _BLOCK_BYTES * entry.stat(follow_symlinks=False).st_blocks
                    names += [entry.path] if entry.is_dir(follow_symlinks=False) else []
    return total + sum(_size_if_removed(descriptor, real) for descriptor in Path("/proc/self/fd").iterdir())


def _size_if_removed(descriptor: Path, folder: str) -> int:
    """Bytes of an open file without a name, if it was in a folder."""
    with suppress(OSError):
        found = descriptor.stat()
        if stat.S_ISREG(found.st_mode) and not found.st_nlink and str(descriptor.readlink()).startswith(folder):
            return _BLOCK_BYTES * found.st_blocks
    return 0
