"""What this process may use: cores and memory, within the limits of its container (Linux control groups, version 2)."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

_ROOT = Path("/sys/fs/cgroup")


def usable_cores(group: Path | None = None) -> int:
    """Cores that this process may run on, at least one; a quota of 1.5 cores is one.

    `group` is the folder of its control group, by default the one that /proc names.
    """
    cores = float(len(os.sched_getaffinity(0)))
    for folder in _groups(group):
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        if quota.isdecimal() and period.isdecimal():
            cores = min(cores, int(quota) / int(period))
    return max(1, math.floor(cores))


def free_memory(group: Path | None = None) -> int:
    """Bytes that this process and its workers may still take: free on the machine, and in its control group."""
    free = psutil.virtual_memory().available
    for folder in _groups(group):
        limit, used = _read(folder / "memory.max"), _read(folder / "memory.current")
        if limit.isdecimal() and used.isdecimal():
            free = min(free, int(limit) - int(used) + _cached(folder))
    return max(free, 0)


def _cached(folder: Path) -> int:
    """Bytes of files in memory, which the kernel gives back when memory is needed."""
    fields = dict(line.split(" ", 1) for line in _read(folder / "memory.stat").splitlines() if " " in line)
    return int(fields.get("inactive_file", 0))


def _groups(group: Path | None) -> Iterator[Path]:
    """The folder of a control group and its parents, as the limits of each hold."""
    if group is None:
        own = next((line[3:] for line in _read(Path("/proc/self/cgroup")).splitlines() if line.startswith("0::")), "/")
        group = _ROOT / own.lstrip("/")
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(_ROOT))
    else:
        yield group


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
