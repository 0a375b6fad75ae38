"""Exact join: sorts text digests to find exact copies, each with the first document of its group.

`join_digest_ranges` sorts the records of some digest ranges, from all groups, and writes the copies among
them; `merge_copies` sorts the copies of all ranges by key.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dedup.candidates.text_digests import DIGEST, read_digest_ranges
from gristmill.counts import READ, Counts
from gristmill.engine.task import FileSet
from gristmill.io.external_sort import ExternalSorter, read_records, write_records

CORPUS_RECORD = np.dtype([*DIGEST, ("row", "<u8"), ("size", "<u4"), ("file", "<u4")])  # row within the file
COPY_RECORD = np.dtype([("file", "<u4"), ("kept_file", "<u4"), ("row", "<u8"), ("kept_row", "<u8")])
COPY = "copy"
FIRST = "first"  # of a group of equal documents
ALONE = "alone"
BLOCK = 1 << 16  # records read together


class DigestedGroup(NamedTuple):
    """The slices of a group (n), whose digests are in one file."""

    starts: NDArray[np.int64]  # row in the group of each slice's first row
    files: NDArray[np.uint32]  # number of its file
    first_rows: NDArray[np.int64]  # its first row in that file


def join_digest_ranges(
    digested: FileSet, groups: list[DigestedGroup], sources: list[str], first: int, stop: int, output: Path, memory: int
) -> Counts:
    """Task: write the copies (COPY_RECORDs) among the records of digest ranges first ≤ i < stop of all groups.

    `digested` are the files of digest_slices, records and offsets of each group; `sources` those of the files by
    number. Counts documents read, copies, firsts and documents alone.
    """
    counter = CopyCounter(sources)

    def copy_records(sorted_blocks: Iterable[NDArray]) -> Iterator[NDArray]:
        for copies, firsts, new_firsts in find_copies(sorted_blocks):
            counter.add(COPY, copies)
            counter.add(FIRST, new_firsts)
            found = np.empty(len(copies), COPY_RECORD)
            found["file"], found["row"] = copies["file"], copies["row"]
            found["kept_file"], found["kept_row"] = firsts["file"], firsts["row"]
            yield found

    runs = output.with_name(f"{output.name}.runs")
    with ExternalSorter(runs, CORPUS_RECORD, ("high", "low"), memory) as sorter:  # stable: in key order within a group
        for group, path, offsets in zip(groups, digested.paths[::2], digested.paths[1::2], strict=True):
            for block in read_digest_ranges(path, offsets, first, stop, BLOCK):
                records = _corpus_records(block, group)
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


def merge_copies(found: FileSet, output: Path, memory: int) -> None:
    """Task: sort the COPY_RECORDs of all digest ranges by key."""
    runs = output.with_name(f"{output.name}.runs")
    with ExternalSorter(runs, COPY_RECORD, ("file", "row"), memory) as sorter:
        for path in found.paths:
            for records in read_records(path, COPY_RECORD, BLOCK):
                sorter.add(records)
        write_records(output, sorter)


class CopyCounter:
    """Counts documents and bytes of CORPUS_RECORDs by reason and source; `sources` has the source of each file."""

    def __init__(self, sources: list[str]) -> None:
        self.names, self.numbers = np.unique(np.array(sources, dtype=np.str_), return_inverse=True)
        self.tallies = {reason: np.zeros((2, len(self.names)), np.int64) for reason in (READ, COPY, FIRST)}

    def add(self, reason: str, records: NDArray) -> None:
        """Count records as READ, COPY or FIRST."""
        tally, sources = self.tallies[reason], self.numbers[records["file"]]
        tally[0] += np.bincount(sources, minlength=len(self.names))
        np.add.at(tally[1], sources, records["size"].astype(np.int64))

    def counts(self) -> Counts:
        """Counts per source of READ, COPY, FIRST, and of the rest, ALONE."""
        counts = Counts({}, [])
        alone = self.tallies[READ] - self.tallies[COPY] - self.tallies[FIRST]
        for reason, tally in {**self.tallies, ALONE: alone}.items():
            for number in np.flatnonzero(tally[0]):
                documents, size = tally[:, number].tolist()
                counts.add(str(self.names[number]), reason, size, documents)
        return counts


def _corpus_records(records: NDArray, group: DigestedGroup) -> NDArray:
    """CORPUS_RECORDs of GROUP_RECORDs."""
    converted = np.empty(len(records), CORPUS_RECORD)
    for name in ("high", "low", "size"):
        converted[name] = records[name]
    slices = np.searchsorted(group.starts, records["row"], side="right") - 1  # the last of those with equal starts:
    converted["row"] = records["row"] - group.starts[slices] + group.first_rows[slices]  # the others have no record
    converted["file"] = group.files[slices]
    return converted


def _split_blocks(blocks: Iterable[NDArray]) -> Iterator[NDArray]:
    """The same records in blocks of at most BLOCK."""
    for block in blocks:
        for start in range(0, len(block), BLOCK):
            yield block[start : start + BLOCK]
