"""Memory and cores: what this process may use, a worker's share of it, and a reserve for one large record at a time.

A reader cannot know beforehand how long the next line is, or how large a row group is in memory. So the workers share
three eighths of a stage's memory; the rest is for the worker whose record needs more than its share. Others that come
to such a record wait until it is done. Limits of a container (Linux control groups, 1 and 2) count.
"""

import ctypes
import fcntl
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import psutil

from gristmill.errors import UsageError

_MIB = 1 << 20
_BUFFER_BYTES = 6 << 20  # of a worker, besides records: of files, compressors, batches of small ones
# Parameters of glibc's mallopt(3), and the largest value that it takes for the first.
_MMAP_THRESHOLD = -3
_TRIM_THRESHOLD = -1
_MAX_MMAP_BYTES = 32 << 20
_PROCESS = Path("/proc/self")
_MAX_BYTES = 1 << 60  # a larger limit is none: version 1 writes 2^63 - 4096


@dataclass(frozen=True)
class Budget:
    """Bytes that a worker may use: `share` at any time, and `reserve` beyond it while it holds the file `lock`.

    `total` is what all workers have together.
    """

    share: int
    reserve: int
    lock: Path
    total: int

    @property
    def limit(self) -> int:
        """Return the bytes that one worker can use."""
        return self.share + self.reserve

    @classmethod
    def of(cls, memory: int, workers: int, lock: Path | None = None) -> "Budget":
        """Return the budget of each of the workers of this process that have `memory` bytes together.

        The lock is in this machine's folder for temporary files by default, and there while it is held.

        >>> budget = Budget.of(1600, 2)
        >>> budget.share, budget.reserve
        (262, 875)
        """
        left = memory - min(memory // 8, workers * _BUFFER_BYTES)
        reserve = 0
        if workers > 1:
            reserve = left * 5 // 8
        lock = lock or Path(tempfile.gettempdir(), f"gristmill-{os.getuid()}-{os.getpid()}.memory")
        return cls((left - reserve) // workers, reserve, lock, memory)

    def on_this_machine(self) -> "Budget":
        """Return the budget with a lock of this machine's workers, as Ray's driver may have made it elsewhere."""
        name = f"{self.lock.stem}-of-{os.getuid()}.memory"
        return replace(self, lock=Path(tempfile.gettempdir(), name))


class MemoryReservation:
    """Memory reserved for a record, from when it is known how large it is until `release`. Without a budget: any size.

    A process that takes the reserve twice, as for two files that it reads side by side, releases it after both.
    """

    def __init__(self) -> None:
        self._gate = _GATE.get()
        self._is_large = False

    def fits(self, size: int) -> bool:
        """Return whether so many bytes can be held at all."""
        return self._gate is None or size <= self._gate.budget.limit

    def refuse(self, what: str, size: int) -> UsageError:
        """The error to raise for `what`, such as a file's line, which needs `size` bytes, more than can be held."""
        assert self._gate is not None
        budget = self._gate.budget
        needed = -(-size * budget.total // budget.limit // _MIB)
        return UsageError(
            f"{what} takes about {-(-size // _MIB):,} MiB of memory, but --memory {_spell(budget.total)} leaves "
            f"{_spell(budget.limit)} to one worker: give --memory {needed}MiB or more"
        )

    def grow(self, size: int) -> None:
        """Reserve `size` bytes; beyond a worker's share, wait until no other worker has the reserve."""
        if self._gate and not self._is_large and size > self._gate.budget.share:
            self._gate.enter()
            self._is_large = True

    def require(self, size: int, what: str) -> None:
        """Reserve `size` bytes for `what`. Raises UsageError if there are not so many."""
        if not self.fits(size):
            raise self.refuse(what, size)
        self.grow(size)

    def release(self) -> None:
        """Release all: others may continue."""
        if self._gate and self._is_large:
            self._gate.leave()
            self._is_large = False


def worker_share() -> int | None:
    """Return the bytes that this worker may use at any time; None: as many as it likes."""
    gate = _GATE.get()
    if gate is None:
        return None
    return gate.budget.share


@contextmanager
def reserve_memory(size: int, what: str) -> Iterator[None]:
    """Context: hold `size` bytes for `what`. Raises UsageError if there are not so many."""
    hold = MemoryReservation()
    hold.require(size, what)
    try:
        yield
    finally:
        hold.release()


@contextmanager
def memory_budget(budget: Budget | None) -> Iterator[None]:
    """Context: a task works within a budget; readers hold memory of it. What they still hold at its end is released."""
    gate: _Gate | None = None
    if budget:
        gate = _Gate(budget)
        _return_freed_blocks(budget.share // 16)
    token = _GATE.set(gate)
    try:
        yield
    finally:
        _GATE.reset(token)
        if gate:
            gate.close()


def _return_freed_blocks(size: int) -> None:
    """Tell malloc to return blocks of `size` bytes to the system when they are freed; glibc keeps up to 32 MiB each."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        size = min(max(size, _MIB), _MAX_MMAP_BYTES)
        libc.mallopt(_MMAP_THRESHOLD, size)
        libc.mallopt(_TRIM_THRESHOLD, 2 * size)


class _Gate:
    """The lock on the reserve, which a process takes once however many records need it."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.holders = 0
        self._file: BinaryIO | None = None

    def enter(self) -> None:
        self.holders += 1
        while self._file is None:
            file = self.budget.lock.open("wb")
            fcntl.flock(file, fcntl.LOCK_EX)
            if _is_at(file, self.budget.lock):
                self._file = file
            else:
                file.close()  # of a holder that has removed it in between

    def leave(self) -> None:
        self.holders -= 1
        if self.holders <= 0:
            self.close()

    def close(self) -> None:
        if self._file is not None:
            self.budget.lock.unlink(missing_ok=True)
            self._file.close()
            self._file = None


def _is_at(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


_GATE: ContextVar[_Gate | None] = ContextVar("memory_gate", default=None)


def usable_cores(process: Path = _PROCESS) -> int:
    """Return the cores that this process may run on, at least one; a quota of 1.5 cores is one.

    The control groups are the groups that `process`, its folder in /proc, names.
    """
    cores = float(len(os.sched_getaffinity(0)))
    for folder in _groups(process, "cpu"):
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        if not quota:  # version 1; without a quota it is -1
            quota = _read(folder / "cpu.cfs_quota_us")
            period = _read(folder / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(period):
            cores = min(cores, int(quota) / int(period))
    return max(1, math.floor(cores))


def free_memory(process: Path = _PROCESS) -> int:
    """Return bytes that this process and its workers may still take: free on the machine, and in its control groups.

    The control groups are the groups that `process`, its folder in /proc, names.
    """
    free = psutil.virtual_memory().available
    for folder in _groups(process, "memory"):
        used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
        limits = [_read(folder / f"memory.{name}") for name in ("max", "high", "limit_in_bytes")]
        limit = min((int(text) for text in limits if text.isdecimal()), default=_MAX_BYTES)
        if limit < _MAX_BYTES and used.isdecimal():
            free = min(free, limit - int(used) + _cached(folder))
    return max(free, 0)


def _cached(folder: Path) -> int:
    """Return bytes of files in memory, which the kernel gives back when memory is needed, also in the groups below."""
    fields = dict[str, str]()
    for line in _read(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        fields[name] = value
    return int(fields.get("total_inactive_file") or fields.get("inactive_file") or 0)


def _groups(process: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of a process's control group and its parents, of both versions, as the limits of each hold.

    What a container sees may begin at its own group, or at a parent of it that /proc does not tell.
    """
    mounts = dict(_mounts(process, controller))
    for line in _read(process / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        version = "cgroup" if controllers else "cgroup2"
        if version in mounts:
            root, mounted = mounts[version]
            folder = mounted
            if Path(path).is_relative_to(root):
                below = Path(path).relative_to(root)
                if ".." not in below.parts:
                    folder = mounted / below
            for group in (folder, *folder.parents):
                if group.is_relative_to(mounted):
                    yield group


def _mounts(process: Path, controller: str) -> Iterator[tuple[str, tuple[str, Path]]]:
    """Yield (cgroup2 or cgroup, (the group that is the mount's root, where it is mounted)) for a controller."""
    for line in _read(process / "mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        kind = after.split(" ")
        if kind[0] == "cgroup2" or (kind[0] == "cgroup" and controller in kind[-1].split(",")):
            yield kind[0], (fields[3], Path(fields[4]))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _spell(size: int) -> str:
    """Return a size as --memory takes it.

    >>> _spell(3 << 20), _spell(1500), _spell(512)
    ('3MiB', '1KiB', '512B')
    """
    if size >= _MIB:
        return f"{size // _MIB}MiB"
    if size >= 1024:
        return f"{size >> 10}KiB"
    return f"{size}B"
