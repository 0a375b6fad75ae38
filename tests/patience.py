"""Patience: how long a test waits for other processes before it fails, on a machine that may have other work."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def patience(seconds: float) -> float:
    """`seconds` of an idle machine, as many times longer as there are processes for each core, and twice at least.

    Only a process that hangs is waited for so long: a limit that is too high costs nothing else.
    """
    processes = os.getloadavg()[0]
    return seconds * (2 + processes / (os.cpu_count() or 1))


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Return as soon as `condition` holds; raise AssertionError if that seems never to be."""
    limit = time.monotonic() + patience(seconds)
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


def found_below(folder: Path, pattern: str) -> list[Path]:
    """The files below a folder in which another process works, and may remove folders: none at such a moment."""
    with suppress(FileNotFoundError):
        return list(folder.rglob(pattern))
    return []
