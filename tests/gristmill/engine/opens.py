"""Counts the files that are opened in this process, by an audit hook."""

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_COUNTED: dict[str, Counter[str]] = {}  # by folder, while it is counted
_HOOKS: list[Any] = []  # an audit hook cannot be removed


@contextmanager
def count_opens(root: Path) -> Iterator[Counter[str]]:
    """Yield a counter of how often Python opens each file below `root`, in the context; Arrow's opens are not seen."""
    if not _HOOKS:
        _HOOKS.append(_audit)
        sys.addaudithook(_audit)
    _COUNTED[f"{root}{os.sep}"] = found = Counter()
    try:
        yield found
    finally:
        del _COUNTED[f"{root}{os.sep}"]


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _COUNTED and isinstance(arguments[0], str | Path):
        path = os.path.abspath(arguments[0])
        for root, found in _COUNTED.items():
            if path.startswith(root):
                found[path] += 1
