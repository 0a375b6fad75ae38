"""Exact join: sorts text digests to find exact copies, each with the first document of its group.

`join_digest_ranges` sorts the records of some digest ranges, from all slices, and writes the copies among
them; `merge_copies` sorts the copies of all ranges by key.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from dedup.candidates.text_digests import DIGEST, read_digest_ranges
from gristmill.counts import READ, Counts
from gristmill.engine.stage import MemoryBudget
from gristmill.io.external_sort import ExternalSorter, read_records, write_records
from gristmill.io.files import atomic_write_bytes
from gristmill.io.readers import Slice

CORPUS_RECORD = np.dtype([*DIGEST, ("row", "<u8"), ("size", "<u4"), ("slice", "<u4")])  # row within the file
COPY_RECORD = np.dtype([("file", "<u4"), ("kept_file", "<u4"), ("row", "<u8"), ("kept_row", "<u8")])
COPY = "copy"
FIRST = "first"  # of a group of equal documents
ALONE = "alone"
BLOCK = 1 << 16  # records read together


def join_digest_ranges(
    digested: list[Path], slices: list[Slice], first: int, stop: int, memory: MemoryBudget, output: Path
) -> Counts:
    """Task: write the copies (COPY_RECORDs) among the records of digest ranges first ≤ i < stop of all slices.

    `digested` are the files of digest_slice, one per slice. Counts documents read, copies, firsts and documents alone.
    """
    counter, file_numbers = CopyCounter([part.source for part in slices]), _file_numbers(slices)

    def copy_records(sorted_blocks: Iterable[NDArray]) -> Iterator[NDArray]:
        for copies, firsts, new_firsts in find_copies(sorted_blocks):
            counter.add(COPY, copies)
            counter.add(FIRST, new_firsts)
            found = np.empty(len(copies), COPY_RECORD)
            found["file"], found["row"] = file_numbers[copies["slice"]], copies["row"]
            found["kept_file"], found["kept_row"] = file_numbers[firsts["slice"]], firsts["row"]
            yield found

    runs = output.with_suffix(".runs")
    with ExternalSorter(runs, CORPUS_RECORD, ("high", "low"), memory) as sorter:  # stable: in key order within a group
        for number, path in enumerate(digested):
            for block in read_digest_ranges(path, first, stop, BLOCK):
                records = _corpus_records(block, number, slices[number].first_row)
                counter.add(READ, records)
                sorter.add(records)
        write_records(output, copy_records(_split_blocks(sorter)))
    return counter.counts()


def find_copies(blocks: Iterable[NDArray]) -> Iterator[tuple[NDArray, NDArray, NDArray]]:
    """For each block of CORPUS_RECORDs sorted by digest: its copies, the first of each copy's group, and new firsts.

    A new first is a group's first document, yielded once: with the first copy of the group.

    >>> records = np.zeros(5, CORPUS_RECORD)
    >>> records["low"], records["row"] = [5, 5, 6, 7, 7], [0, 3, 8, 1, 2]
    >>> for arrays in find_copies([records[:2], records[2:4], records[4:]]):
    ...     [found["row"].tolist() for found in arrays]
    [[3], [0], [0]]
    [[], [], []]
    [[2], [1], [1]]
    """
    last = np.empty(0, CORPUS_RECORD)  # first and last record of the group that the previous block ends with
    for block in blocks:
        records = np.concatenate([last, block])
        is_first = np.ones(len(records), bool)
        is_first[1:] = (records["high"][1:] != records["high"][:-1]) | (records["low"][1:] != records["low"][:-1])
        firsts = np.maximum.accumulate(np.where(is_first, np.arange(len(records)), 0))
        is_second = np.arange(len(records)) == firsts + 1
        is_copy = ~is_first
        is_copy[: len(last)] = is_second[: len(last)] = False
        yield records[is_copy], records[firsts[is_copy]], records[firsts[is_second]]
        last = records[sorted({firsts[-1], len(records) - 1})]


def merge_copies(found: list[Path], counts: Counts, memory: MemoryBudget, output: Path) -> Counts:
    """Task: sort the COPY_RECORDs of all digest ranges by key; write `counts` to the .json file of the same name."""
    with ExternalSorter(output.with_suffix(".runs"), COPY_RECORD, ("file", "row"), memory) as sorter:
        for path in found:
            for records in read_records(path, COPY_RECORD, BLOCK):
                sorter.add(records)
        write_records(output, sorter)
    atomic_write_bytes(output.with_suffix(".json"), msgspec.json.encode(counts))
    return Counts({}, [])


class CopyCounter:
    """Counts documents and bytes of CORPUS_RECORDs by reason and slice; `sources` has the source of each slice."""

    def __init__(self, sources: list[str]) -> None:
        self.sources = sources
        self.tallies = {reason: np.zeros((2, len(sources)), np.int64) for reason in (READ, COPY, FIRST)}

    def add(self, reason: str, records: NDArray) -> None:
        """Count records as READ, COPY or FIRST."""
        tally, slices = self.tallies[reason], records["slice"]
        tally[0] += np.bincount(slices, minlength=len(self.sources))
        np.add.at(tally[1], slices, records["size"].astype(np.int64))

    def counts(self) -> Counts:
        """Counts per source of READ, COPY, FIRST, and of the rest, ALONE."""
        counts = Counts({}, [])
        alone = self.tallies[READ] - self.tallies[COPY] - self.tallies[FIRST]
        for reason, tally in {**self.tallies, ALONE: alone}.items():
            for number in np.flatnonzero(tally[0]):
                documents, size = tally[:, number].tolist()
                counts.add(self.sources[number], reason, size, documents)
        return counts


def _corpus_records(records: NDArray, number: int, first_row: int) -> NDArray:
    """CORPUS_RECORDs of the SLICE_RECORDs of slice `number`."""
    converted = np.empty(len(records), CORPUS_RECORD)
    for name in ("high", "low", "size"):
        converted[name] = records[name]
    converted["row"], converted["slice"] = records["row"].astype(np.uint64) + np.uint64(first_row), number
    return converted


def _file_numbers(slices: list[Slice]) -> NDArray[np.uint32]:
    """For each slice the number of its file, in name order from 0."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(part.name for part in slices))}
    return np.array([numbers[part.name] for part in slices], np.uint32)


def _split_blocks(blocks: Iterable[NDArray]) -> Iterator[NDArray]:
    """The same records in blocks of at most BLOCK."""
    for block in blocks:
        for start in range(0, len(block), BLOCK):
            yield block[start : start + BLOCK]
