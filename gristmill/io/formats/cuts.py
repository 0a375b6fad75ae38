"""Cuts: where the slices of a file start, and which bytes of the file each of them reads."""

from abc import ABC, abstractmethod
from typing import NamedTuple

Ranges = tuple[tuple[int, int | None], ...]
"""Ranges of bytes of a file, each from a byte up to another, or to the end."""
WHOLE: Ranges = ((0, None),)


class Cut(NamedTuple):
    """Where a slice starts: a byte of a .jsonl, a row group of a .parquet; its first row; the bytes it reads."""

    start: int
    row: int
    ranges: Ranges = WHOLE


ONE_SLICE = [Cut(0, 0)]


class ReadInParts(ABC):
    """A dataclass in a task's arguments that names a file of which no more than some bytes are read."""

    @property
    @abstractmethod
    def ranges(self) -> Ranges:
        """The bytes that are read, of every path in it."""


def merge(ranges: Ranges) -> Ranges:
    """The same bytes in ascending ranges that do not touch; empty ones are left out.

    >>> merge(((5, 9), (0, 3), (3, 4), (8, None), (2, 2)))
    ((0, 4), (5, None))
    """
    merged: list[tuple[int, int | None]] = []
    for start, end in sorted((pair for pair in ranges if pair[0] != pair[1]), key=lambda pair: pair[0]):
        if merged and (merged[-1][1] is None or start <= merged[-1][1]):
            first, last = merged.pop()
            start, end = first, None if last is None or end is None else max(last, end)
        merged.append((start, end))
    return tuple(merged)
