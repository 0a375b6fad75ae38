"""Selection: the k-th smallest of the random numbers in many files, exactly, by tasks that each read a few.

The numbers of a source with many files are narrowed first: tasks count them by their leading bits, and only those that
share the k-th one's remain.
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import chain
from pathlib import Path

import numpy as np
import zstandard

from gristmill.counts import Counts
from gristmill.engine.run import StageRun
from gristmill.engine.task import FileSet, Result, Task
from gristmill.errors import InputError, wrap_read_errors
from gristmill.io.external_sort import write_array
from gristmill.io.writers import zstd_compressor
from gristmill.storage.local import atomic_write_bytes
from preprocessing.mixing.sampling import RandomNumbers, find_bin, histogram_of, in_bin, kth_smallest


def write_numbers(path: Path, numbers: RandomNumbers) -> None:
    """Write numbers (n) to a file, atomically, with a checksum."""
    atomic_write_bytes(path, zstd_compressor().compress(numbers.astype("<u8").tobytes()))


def read_numbers(path: Path) -> RandomNumbers:
    """The numbers (n) in a file; InputError if it is missing or damaged."""
    try:
        with wrap_read_errors(path):
            return np.frombuffer(zstandard.ZstdDecompressor().decompress(path.read_bytes()), "<u8")
    except (zstandard.ZstdError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is damaged ({error}): run pass1 again") from error


def select_kth(
    run: StageRun, step: str, files: Mapping[str, Sequence[Path]], ranks: Mapping[str, int], fan_in: int
) -> dict[str, int | None]:
    """The ranks[source]-th smallest number in the files of each source, counted from 1; None for rank 0.

    A source with more than `fan_in` files is narrowed in steps named `step` and what they do.
    """
    chosen = {source: paths for source, paths in files.items() if ranks[source]}
    large = {source: _groups(paths, fan_in) for source, paths in chosen.items() if len(paths) > fan_in}
    narrowed, ranks = _narrow(run, step, large, ranks) if large else ({}, ranks)
    found = run.step(step, [
        Task(source, find_kth, {"files": FileSet(tuple(narrowed.get(source, paths))), "rank": ranks[source]})
        for source, paths in chosen.items()
    ])  # fmt: skip
    return dict.fromkeys(files) | dict(zip(chosen, found.values(int), strict=True))


def _narrow(
    run: StageRun, step: str, groups: Mapping[str, Sequence[FileSet]], ranks: Mapping[str, int]
) -> tuple[dict[str, list[Path]], dict[str, int]]:
    """Files with the numbers of each source that share the leading bits of its k-th smallest, and its rank in them."""
    named = [(source, f"{source}/{i}", files) for source, sets in groups.items() for i, files in enumerate(sets)]
    counted: dict[str, list[Path]] = {source: [] for source in groups}
    chosen: dict[str, list[Path]] = {source: [] for source in groups}
    for source, name, _ in named:
        counted[source].append(run.work / f"{step} histograms" / f"{name}.npy")
        chosen[source].append(run.work / f"{step} selected" / f"{name}.zst")
    run.step(f"{step}: histograms", [
        Task(name, write_histogram, {"files": files, "output": output}, (output,))
        for (_, name, files), output in zip(named, chain(*counted.values()), strict=True)
    ])  # fmt: skip
    bins = run.step(f"{step}: bins", [
        Task(source, choose_bin, {"histograms": FileSet(tuple(paths)), "rank": ranks[source]})
        for source, paths in counted.items()
    ])  # fmt: skip
    found = dict(zip(groups, bins.values(tuple[int, int]), strict=True))
    run.step(f"{step}: selected", [
        Task(name, write_bin, {"files": files, "number": found[source][0], "output": output}, (output,))
        for (source, name, files), output in zip(named, chain(*chosen.values()), strict=True)
    ])  # fmt: skip
    return chosen, dict(ranks) | {source: ranks[source] - below for source, (_, below) in found.items()}


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
