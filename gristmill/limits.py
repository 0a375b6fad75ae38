"""What this process may use: cores and memory, within the limits of its container (Linux control groups, 1 and 2)."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

_PROCESS = Path("/proc/self")
_MOST_BYTES = 1 << 60  # a larger limit is none: version 1 writes 2^63 - 4096


def usable_cores(process: Path = _PROCESS) -> int:
    """Cores that this process may run on, at least one; a quota of 1.5 cores is one.

    The control groups are those that `process`, its folder in /proc, names.
    """
    cores = float(len(os.sched_getaffinity(0)))
    for folder in _groups(process, "cpu"):
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        if not quota:  # version 1; without a quota it is -1
            quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(period):
            cores = min(cores, int(quota) / int(period))
    return max(1, math.floor(cores))


def free_memory(process: Path = _PROCESS) -> int:
    """Bytes that this process and its workers may still take: free on the machine, and in its control groups.

    The control groups are those that `process`, its folder in /proc, names.
    """
    free = psutil.virtual_memory().available
    for folder in _groups(process, "memory"):
        used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
        limits = [_read(folder / f"memory.{name}") for name in ("max", "high", "limit_in_bytes")]
        limit = min((int(text) for text in limits if text.isdecimal()), default=_MOST_BYTES)
        if limit < _MOST_BYTES and used.isdecimal():
            free = min(free, limit - int(used) + _cached(folder))
    return max(free, 0)


def _cached(folder: Path) -> int:
    """Bytes of files in memory, which the kernel gives back when memory is needed; those of the groups below, too."""
    fields = dict(line.split(" ", 1) for line in _read(folder / "memory.stat").splitlines() if " " in line)
    return int(fields.get("total_inactive_file") or fields.get("inactive_file") or 0)


def _groups(process: Path, controller: str) -> Iterator[Path]:
    """The folders of a process's control group and its parents, of both versions, as the limits of each hold.

    What a container sees may begin at its own group, or at a parent of it that /proc does not tell.
    """
    mounts = dict(_mounts(process, controller))
    for line in _read(process / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        version = "cgroup2" if not controllers else "cgroup" if controller in controllers.split(",") else ""
        if version in mounts:
            root, mounted = mounts[version]
            below = Path(path).relative_to(root) if Path(path).is_relative_to(root) else Path()
            folder = mounted if ".." in below.parts else mounted / below
            yield from (one for one in (folder, *folder.parents) if one.is_relative_to(mounted))


def _mounts(process: Path, controller: str) -> Iterator[tuple[str, tuple[str, Path]]]:
    """(cgroup2 or cgroup, (the group that is the mount's root, where it is mounted)) of a controller's hierarchies."""
    for line in _read(process / "mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        place, kind = before.split(" "), after.split(" ")
        if kind[0] == "cgroup2" or (kind[0] == "cgroup" and controller in kind[-1].split(",")):
            yield kind[0], (place[3], Path(place[4]))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
