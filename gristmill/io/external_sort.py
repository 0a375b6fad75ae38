"""External sort: records in ascending order, in memory as long as they fit, else by runs on disk."""

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from gristmill.errors import writing
from gristmill.io.files import atomic_write

_IN_FLIGHT = 4  # copies of a record while it is sorted or merged: the record, its order, and what comes of both
_FEWEST = 1024  # records of a block, however small the budget


class ExternalSorter:
    """Sorts records of a structured dtype by some of its fields, stably, within `memory` bytes.

    Use it as a context: `add` records in any number of arrays, then iterate once over arrays of
    sorted ones. Runs are written below `folder`, which is removed at the end.

    >>> import tempfile
    >>> edge = np.dtype([("node", "<u8"), ("other", "<u8")])
    >>> with Sorter(Path(tempfile.mkdtemp()) / "runs", edge, ("node", "other"), memory=1 << 20) as sorter:
    ...     sorter.add(np.array([(2, 9), (1, 5)], edge))
    ...     sorter.add(np.array([(1, 3)], edge))
    ...     [block.tolist() for block in sorter]
    [[(1, 3), (1, 5), (2, 9)]]
    """

    def __init__(self, folder: Path, dtype: np.dtype, keys: tuple[str, ...], memory: int) -> None:
        self.folder, self.dtype, self.keys = folder, dtype, keys
        self.most = max(_FEWEST, memory // (_IN_FLIGHT * dtype.itemsize))  # records held
        self._held: list[NDArray] = []
        self._count = 0
        self._runs: list[Path] = []

    def __enter__(self) -> Self:
        shutil.rmtree(self.folder, ignore_errors=True)  # of a run that was killed
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def add(self, records: NDArray) -> None:
        """Take records (n), which are copied."""
        assert records.dtype == self.dtype, (records.dtype, self.dtype)
        while len(records):
            some, records = np.split(records, [self.most - self._count])
            self._held.append(some.copy())
            self._count += len(some)
            if self._count >= self.most:
                self._spill()

    def __iter__(self) -> Iterator[NDArray]:
        if not self._runs:
            yield from self._sort_held()
            return
        self._spill()
        yield from self._merge()

    def _sort_held(self) -> list[NDArray]:
        """What is held, as one sorted array, or none if nothing is."""
        held, self._held, self._count = self._held, [], 0
        return [self._in_order(held)] if held else []

    def _in_order(self, parts: list[NDArray]) -> NDArray:
        records = np.concatenate(parts)
        parts.clear()
        return records[np.lexsort([records[key] for key in reversed(self.keys)])]

    def _spill(self) -> None:
        for records in self._sort_held():
            path = self.folder / f"{len(self._runs):06}.run"
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(records.view(np.uint8).data)
            self._runs.append(path)

    def _merge(self) -> Iterator[NDArray]:
        """Of every run a block; what is below the smallest of their last records is complete."""
        size = max(_FEWEST, self.most // len(self._runs))
        runs = [_Run(path, self.dtype, size) for path in self._runs]
        while runs := [run for run in runs if run.fill()]:
            first = min(range(len(runs)), key=lambda i: tuple(runs[i].block[-1][key] for key in self.keys))
            bound = runs[first].block[-1]
            # Runs after that one give up what equals the bound only later: it may have more of these to come.
            yield self._in_order([run.take(self._upto(run.block, bound, i <= first)) for i, run in enumerate(runs)])

    def _upto(self, records: NDArray, bound: np.void, equal: bool) -> int:
        """How many of sorted `records` are less than `bound`, or `equal` to it."""
        low, high = 0, len(records)
        for key in self.keys:
            column, value = records[key][low:high], bound[key]
            low, high = low + int(np.searchsorted(column, value)), low + int(np.searchsorted(column, value, "right"))
        return high if equal else low


class _Run:
    """A sorted file, read block by block."""

    def __init__(self, path: Path, dtype: np.dtype, size: int) -> None:
        self.path, self.size, self.read = path, size, 0
        self.block = np.empty(0, dtype)

    def fill(self) -> bool:
        """Have a block to take from, unless the run is at its end."""
        if not len(self.block):
            offset = self.read * self.block.dtype.itemsize
            self.block = np.fromfile(self.path, self.block.dtype, self.size, offset=offset)
            self.read += len(self.block)
        return len(self.block) > 0

    def take(self, count: int) -> NDArray:
        taken, self.block = self.block[:count], self.block[count:]
        return taken


def write_records(path: Path, blocks: Iterable[NDArray]) -> None:
    """Write records one after another, replacing the file only once the last is there."""
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        for records in blocks:
            file.write(np.ascontiguousarray(records).view(np.uint8).data)


def read_records(path: Path, dtype: np.dtype, size: int) -> Iterator[NDArray]:
    """The records of a file, `size` at a time."""
    with path.open("rb") as file:
        while len(records := np.fromfile(file, dtype, size)):
            yield records
