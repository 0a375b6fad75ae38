"""Random numbers that depend on seed, purpose and document key alone, and exact sampling with them.

The k-th smallest of the numbers in many files is found by tasks that each read a few: they count the numbers by their
leading bits, and only those that share the k-th one's remain.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gristmill.counts import Counts
from gristmill.engine.run import StageRun
from gristmill.engine.task import FileSet, Result, Task
from gristmill.errors import UsageError
from gristmill.io.external_sort import write_array
from gristmill.io.writers import zstd_compressor
from gristmill.storage.local import atomic_write_bytes
from preprocessing.mixing.shuffle_buckets import decompress, wrap_damage

RandomNumbers = NDArray[np.uint64]
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15  # SplitMix64's increment: 2^64 / golden ratio
_MULTIPLIERS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_64_BITS = (1 << 64) - 1
_BIN_BITS = 12  # leading bits that are counted: 4,096 bins


def check_seed(seed: int) -> None:
    """Raise UsageError for a seed that is negative or has more than 32 bits."""
    if not 0 <= seed < 1 << 32:
        raise UsageError(f"--seed {seed}: expected a whole number from 0 to {(1 << 32) - 1}")


def random_numbers(seed: int, purpose: str, file: str, rows: NDArray[np.int64]) -> RandomNumbers:
    """Return one uniform 64-bit random number for each row of a file, independent between purposes.

    A SplitMix64 stream (Steele, Lea and Flood 2014) starts at the BLAKE2b hash of seed, purpose and file;
    row r gets its output r + 1, computed directly. The order of work therefore changes no number.

    >>> five, both = (random_numbers(1, "part", "book/a", np.array(rows)) for rows in ([5], [4, 5]))
    >>> other = random_numbers(2, "part", "book/a", np.array([5]))
    >>> bool(five[0] == both[1]), bool(five[0] == other[0])
    (True, False)
    """
    one, two = map(np.uint64, _MULTIPLIERS)
    numbers_from_1 = rows.astype(np.uint64) + np.uint64(1)
    state = np.uint64(_start(seed, purpose, file)) + numbers_from_1 * np.uint64(_GOLDEN_GAMMA)
    state = (state ^ (state >> np.uint64(30))) * one
    state = (state ^ (state >> np.uint64(27))) * two
    return state ^ (state >> np.uint64(31))


def random_number(seed: int, purpose: str, file: str, row: int) -> int:
    """Return the number that random_numbers has for one row, several times faster: in integers of Python.

    >>> random_number(1, "part", "book/a", 5) == random_numbers(1, "part", "book/a", np.array([5]))[0]
    np.True_
    """
    one, two = _MULTIPLIERS
    state = (_start(seed, purpose, file) + (row + 1) * _GOLDEN_GAMMA) & _64_BITS
    state = ((state ^ (state >> 30)) * one) & _64_BITS
    state = ((state ^ (state >> 27)) * two) & _64_BITS
    return state ^ (state >> 31)


def _start(seed: int, purpose: str, file: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{purpose}\0{file}".encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class SourceEpochs:
    """Epochs of one source: every document is written `whole` times, a random fraction of them once more.

    `extra_limit` is the largest random number that gets the extra copy; None where no document does.
    """

    whole: int
    extra_limit: int | None = None

    def copies(self, numbers: RandomNumbers) -> NDArray[np.int64]:
        """Return the copies to write of each document, given one random number for each."""
        copies = np.full(len(numbers), self.whole, np.int64)
        if self.extra_limit is not None:
            copies += numbers <= np.uint64(self.extra_limit)
        return copies


def kth_smallest(chunks: Callable[[], Iterable[RandomNumbers]], k: int) -> int | None:
    """Return the k-th smallest number of all chunks (None for k = 0): exactly k numbers are at most this large.

    Radix selection in two passes: a histogram of the leading bits, then a sort of one of its bins. `chunks` is called
    once for each pass, so that memory holds one chunk and one bin at a time. `k` is at most the number of numbers.

    >>> kth_smallest(lambda: [np.array([9, 1], np.uint64), np.array([4], np.uint64)], 2)
    4
    """
    if k <= 0:
        return None
    number, below = find_bin(reduce(np.add, map(histogram_of, chunks())), k)
    candidates = [in_bin(chunk, number) for chunk in chunks()]
    return int(np.sort(np.concatenate(candidates))[k - below - 1])


def histogram_of(numbers: RandomNumbers) -> NDArray[np.int64]:
    """Return how many of the numbers (n) are in each bin (4,096) of their leading bits."""
    return np.bincount(_bins(numbers), minlength=1 << _BIN_BITS)


def find_bin(histogram: NDArray[np.int64], k: int) -> tuple[int, int]:
    """Return the bin of the k-th smallest number (k ≥ 1), and how many numbers are in lower bins."""
    ends = np.cumsum(histogram)
    number = int(np.searchsorted(ends, k))
    return number, int(ends[number] - histogram[number])


def in_bin(numbers: RandomNumbers, number: int) -> RandomNumbers:
    """Return the numbers that are in a bin."""
    return numbers[_bins(numbers) == number]


def _bins(numbers: RandomNumbers) -> NDArray[np.int64]:
    return (numbers >> np.uint64(64 - _BIN_BITS)).astype(np.int64)


def write_numbers(path: Path, numbers: RandomNumbers) -> None:
    """Write numbers (n) to a file, atomically, with a checksum."""
    atomic_write_bytes(path, zstd_compressor().compress(numbers.astype("<u8").tobytes()))


def read_numbers(path: Path) -> RandomNumbers:
    """Return the numbers (n) in a file; InputError if it is missing or damaged."""
    with wrap_damage(path):
        return np.frombuffer(decompress(path.read_bytes()), "<u8")


def select_kth(
    run: StageRun, step: str, files: Mapping[str, Sequence[Path]], ranks: Mapping[str, int], fan_in: int
) -> dict[str, int | None]:
    """Return the ranks[source]-th smallest number in the files of each source, from 1; None for rank 0.

    A source with more than `fan_in` files is narrowed in steps named `step` and what they do.
    """
    numbers: dict[str, int | None] = dict.fromkeys(files)
    paths_of = dict[str, Sequence[Path]]()
    groups_of_large = dict[str, Sequence[FileSet]]()
    for source, paths in files.items():
        if ranks[source]:
            paths_of[source] = paths
            if len(paths) > fan_in:
                groups_of_large[source] = _groups(paths, fan_in)
    if groups_of_large:
        narrowed, ranks = _narrow(run, step, groups_of_large, ranks)
        paths_of |= narrowed
    tasks = []
    for source, paths in paths_of.items():
        arguments = {"files": FileSet(tuple(paths)), "rank": ranks[source]}
        tasks.append(Task(source, find_kth, arguments))
    values = run.step(step, tasks).values(int)
    return numbers | dict(zip(paths_of, values, strict=True))


@dataclass(frozen=True)
class _Group:
    """Some of the files of a source, and the files that narrowing writes for them."""

    source: str
    name: str
    files: FileSet
    histogram: Path
    selected: Path


def _narrow(
    run: StageRun, step: str, groups: Mapping[str, Sequence[FileSet]], ranks: Mapping[str, int]
) -> tuple[dict[str, list[Path]], dict[str, int]]:
    """Return files with the numbers that share the leading bits of a source's k-th smallest, and its rank in them."""
    named = list[_Group]()
    for source, sets in groups.items():
        for i, files in enumerate(sets):
            name = f"{source}/{i}"
            histogram = run.work / f"{step} histograms" / f"{name}.npy"
            selected = run.work / f"{step} selected" / f"{name}.zst"
            named.append(_Group(source, name, files, histogram, selected))
    tasks = []
    histograms_of: dict[str, list[Path]] = {source: [] for source in groups}
    for group in named:
        arguments = {"files": group.files, "output": group.histogram}
        tasks.append(Task(group.name, write_histogram, arguments, (group.histogram,)))
        histograms_of[group.source].append(group.histogram)
    run.step(f"{step}: histograms", tasks)
    tasks = []
    for source, histograms in histograms_of.items():
        arguments = {"histograms": FileSet(tuple(histograms)), "rank": ranks[source]}
        tasks.append(Task(source, choose_bin, arguments))
    bins = run.step(f"{step}: bins", tasks).values(tuple[int, int])
    bin_of = dict[str, int]()
    rank_in_bin = dict(ranks)
    for source, (number, below) in zip(groups, bins, strict=True):
        bin_of[source] = number
        rank_in_bin[source] = ranks[source] - below
    tasks = []
    selected_of: dict[str, list[Path]] = {source: [] for source in groups}
    for group in named:
        arguments = {"files": group.files, "number": bin_of[group.source], "output": group.selected}
        tasks.append(Task(group.name, write_bin, arguments, (group.selected,)))
        selected_of[group.source].append(group.selected)
    run.step(f"{step}: selected", tasks)
    return selected_of, rank_in_bin


def _groups(paths: Sequence[Path], size: int) -> list[FileSet]:
    return [FileSet(tuple(paths[start : start + size])) for start in range(0, len(paths), size)]


def write_histogram(files: FileSet, output: Path) -> None:
    """Task: write how many numbers the files have in each bin of their leading bits."""
    write_array(output, reduce(np.add, map(histogram_of, map(read_numbers, files.paths))))


def choose_bin(histograms: FileSet, rank: int) -> Result:
    """Task: find the bin of the rank-th smallest number, and how many numbers are in lower bins."""
    return Result(Counts({}, []), find_bin(reduce(np.add, map(np.load, histograms.paths)), rank))


def write_bin(files: FileSet, number: int, output: Path) -> None:
    """Task: write the numbers of the files that are in one bin."""
    write_numbers(output, np.concatenate([in_bin(read_numbers(path), number) for path in files.paths]))


def find_kth(files: FileSet, rank: int) -> Result:
    """Task: find the rank-th smallest number in the files."""
    return Result(Counts({}, []), kth_smallest(lambda: map(read_numbers, files.paths), rank))
