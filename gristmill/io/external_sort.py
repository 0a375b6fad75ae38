"""Files of fixed-size records: external merge sort, in memory or with sorted runs on disk, holding, scattering."""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from gristmill.errors import wrap_write_errors
from gristmill.storage.local import atomic_write

MAX_SCATTERED = 256  # files that scatter_records may write at the same time: processes can open few
MAX_HELD = 1 << 18  # records that HeldRecords has in memory
_COPIES = 4  # copies of each record in memory during a sort or merge
_MIN_BLOCK = 1024  # minimum records in a block, even beyond the memory budget


class ExternalSorter:
    """Stable external sort of records of a structured dtype by the fields `keys`, within `memory` bytes.

    Use it as a context: call `add` with arrays of records any number of times, then iterate once over
    arrays of sorted records. Runs are written to `folder`, which is removed when the context ends.

    >>> import tempfile
    >>> edge = np.dtype([("node", "<u8"), ("other", "<u8")])
    >>> with ExternalSorter(Path(tempfile.mkdtemp()) / "runs", edge, ("node", "other"), memory=1 << 20) as sorter:
    ...     sorter.add(np.array([(2, 9), (1, 5)], edge))
    ...     sorter.add(np.array([(1, 3)], edge))
    ...     [block.tolist() for block in sorter]
    [[(1, 3), (1, 5), (2, 9)]]
    """

    def __init__(self, folder: Path, dtype: np.dtype, keys: tuple[str, ...], memory: int) -> None:
        self.folder = folder
        self.dtype = dtype
        self.keys = keys
        self.capacity = max(_MIN_BLOCK, memory // (_COPIES * dtype.itemsize))  # records held
        self._held: list[NDArray] = []
        self._count = 0
        self._runs: list[Path] = []

    def __enter__(self) -> Self:
        shutil.rmtree(self.folder, ignore_errors=True)  # left by a process that was killed
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def add(self, records: NDArray) -> None:
        """Add records (n) of `dtype`; they are copied. Raises OutputError if a run cannot be written."""
        assert records.dtype == self.dtype, (records.dtype, self.dtype)
        while len(records):
            part, records = np.split(records, [self.capacity - self._count])
            self._held.append(part.copy())
            self._count += len(part)
            if self._count >= self.capacity:
                self._spill()

    def add_all(self, blocks: Iterable[NDArray]) -> None:
        """Add blocks of records, as `add`."""
        for records in blocks:
            self.add(records)

    def __iter__(self) -> Iterator[NDArray]:
        if not self._runs:
            yield from self._sort_held()
            return
        self._spill()
        yield from self._merge()

    def _sort_held(self) -> list[NDArray]:
        """Return the records in memory as one sorted array; an empty list if there are none."""
        held = self._held
        self._held = []
        self._count = 0
        if not held:
            return []
        return [self._sort(held)]

    def _sort(self, parts: list[NDArray]) -> NDArray:
        records = np.concatenate(parts)
        parts.clear()
        return records[np.lexsort([records[key] for key in reversed(self.keys)])]

    def _spill(self) -> None:
        for records in self._sort_held():
            path = self.folder / f"{len(self._runs):06}.run"
            with wrap_write_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(records.view(np.uint8).data)
            self._runs.append(path)

    def _merge(self) -> Iterator[NDArray]:
        """Merge block by block: all records up to the smallest of the current blocks' last records can be yielded."""
        # What is sorted of the blocks is in memory besides them, so that there is a copy more.
        size = max(_MIN_BLOCK, self.capacity * _COPIES // ((_COPIES + 1) * len(self._runs)))
        runs = [_Run(path, self.dtype, size) for path in self._runs]
        while True:
            runs = [run for run in runs if run.fill()]
            if not runs:
                return
            last_records = [run.block[-1] for run in runs]
            first = min(range(len(runs)), key=lambda number: self._sort_key(last_records[number]))
            bound = last_records[first]
            parts = list[NDArray]()
            for number, run in enumerate(runs):
                # For a stable sort, records equal to the bound in later runs wait: run `first` may have more of them.
                parts.append(run.take(self._count_up_to(run.block, bound, equal=number <= first)))
            yield self._sort(parts)

    def _sort_key(self, record: np.void) -> tuple[Any, ...]:
        return tuple(record[key] for key in self.keys)

    def _count_up_to(self, records: NDArray, bound: np.void, equal: bool) -> int:
        """Return the number of sorted `records` below `bound`, or with `equal` at most `bound`."""
        low = 0
        high = len(records)
        for key in self.keys:
            column = records[key][low:high]
            first = low
            low = first + int(np.searchsorted(column, bound[key]))
            high = first + int(np.searchsorted(column, bound[key], "right"))
        if equal:
            return high
        return low


class _Run:
    """A sorted run on disk, read block by block."""

    def __init__(self, path: Path, dtype: np.dtype, size: int) -> None:
        self.path = path
        self.size = size
        self.read = 0
        self.block = np.empty(0, dtype)

    def fill(self) -> bool:
        """Read the next block if the current one is used up; False at the end of the run."""
        if not len(self.block):
            offset = self.read * self.block.dtype.itemsize
            self.block = np.fromfile(self.path, self.block.dtype, self.size, offset=offset)
            self.read += len(self.block)
        return len(self.block) > 0

    def take(self, count: int) -> NDArray:
        """Remove the first `count` records of the block and return them."""
        taken = self.block[:count]
        self.block = self.block[count:]
        return taken


class HeldRecords:
    """Records that wait, in memory or, if they are many, in a file, which is removed at the end."""

    def __init__(self, path: Path, limit: int = MAX_HELD) -> None:
        self._path = path
        self._limit = limit
        self._held = list[NDArray]()
        self._count = 0
        self._dtype = np.dtype(np.uint8)

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.unlink(missing_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._path.unlink(missing_ok=True)

    def add(self, records: NDArray) -> None:
        """Append records, of one dtype."""
        self._dtype = records.dtype
        self._held.append(records.copy())
        self._count += len(records)
        if self._count > self._limit:
            with wrap_write_errors(self._path), self._path.open("ab") as file:
                for block in self._held:
                    file.write(block.view(np.uint8).data)
            self._held = []
            self._count = 0

    def take(self) -> Iterator[NDArray]:
        """Yield all records, in their order, and forget them."""
        if self._path.exists():
            with self._path.open("rb") as file:
                while len(records := np.fromfile(file, self._dtype, self._limit)):
                    yield records
            self._path.unlink()
        yield from self._held
        self._held = []
        self._count = 0


def write_records(path: Path, blocks: Iterable[NDArray]) -> None:
    """Write arrays of records to a file atomically."""
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        for records in blocks:
            file.write(np.ascontiguousarray(records).view(np.uint8).data)


def scatter_records(paths: Sequence[Path], blocks: Iterable[tuple[NDArray, NDArray[np.integer]]]) -> None:
    """Write each record to one of up to MAX_SCATTERED files, atomically, in their order.

    `blocks` are records (n) and the number of each one's file (n).
    """
    assert len(paths) <= MAX_SCATTERED, len(paths)
    with ExitStack() as stack:
        files = list[BinaryIO]()
        for path in paths:
            temporary = stack.enter_context(atomic_write(path))
            files.append(stack.enter_context(temporary.open("wb")))
        for records, numbers in blocks:
            ordered = records[np.argsort(numbers, kind="stable")]
            ends = np.cumsum(np.bincount(numbers, minlength=len(paths)))
            for file, part in zip(files, np.split(ordered, ends[:-1]), strict=True):
                if len(part):
                    file.write(part.view(np.uint8).data)


def read_records(paths: Path | Iterable[Path], dtype: np.dtype, size: int) -> Iterator[NDArray]:
    """Yield the records of a file, or of several one after another, in arrays of up to `size` records."""
    if isinstance(paths, Path):
        paths = [paths]
    for path in paths:
        with path.open("rb") as file:
            while True:
                records = np.fromfile(file, dtype, size)
                if not len(records):
                    break
                yield records


def write_array(path: Path, array: NDArray) -> None:
    """Write an array to a .npy file atomically."""
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        np.save(file, array)
