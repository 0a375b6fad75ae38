"""Counts the files that this process opens and the processes that it starts, by an audit hook."""

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_COUNTED: dict[str, Counter[str]] = {}  # by folder, while it is counted
_STARTED: list[list[str]] = []  # lists that get the name of each start
_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec"}
_HOOKS: list[Any] = []  # an audit hook cannot be removed


@contextmanager
def count_opens(root: Path) -> Iterator[Counter[str]]:
    """Yield a counter of how often Python opens each file below `root`, in the context; Arrow's opens are not seen."""
    _add_hook()
    _COUNTED[f"{root}{os.sep}"] = found = Counter()
    try:
        yield found
    finally:
        del _COUNTED[f"{root}{os.sep}"]


@contextmanager
def count_processes() -> Iterator[list[str]]:
    """Yield a list that gets the event's name of each process that this one starts, in the context."""
    _add_hook()
    started: list[str] = []
    _STARTED.append(started)
    try:
        yield started
    finally:
        _STARTED.remove(started)


def _add_hook() -> None:
    if not _HOOKS:
        _HOOKS.append(_audit)
        sys.addaudithook(_audit)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _STARTS:
        for started in _STARTED:
            started.append(event)
    if event == "open" and _COUNTED and isinstance(arguments[0], str | Path):
        path = os.path.abspath(arguments[0])
        for root, found in _COUNTED.items():
            if path.startswith(root):
                found[path] += 1
