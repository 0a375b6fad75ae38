"""Exact join: sorts text digests to find exact copies, each with the first document of its group.

`scatter_digests` writes the records of a bundle of groups to a file for each digest range; `join_digests` sorts one
range from all bundles and writes the copies in it; `merge_copies` sorts the copies of all ranges by key.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dedup.candidates.document_ids import SourceRuns
from dedup.candidates.text_digests import DIGEST, GROUP_RECORD
from gristmill.batches import partition_of
from gristmill.counts import READ, Counts
from gristmill.engine.task import FileSet
from gristmill.io.external_sort import ExternalSorter, read_records, scatter_records, write_records

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


def scatter_digests(digested: FileSet, groups: tuple[DigestedGroup, ...], outputs: tuple[Path, ...]) -> None:
    """Task: write the records of some groups as CORPUS_RECORDs, those of each range of digests to one of `outputs`.

    `digested` are the files of digest_slices, one for each group.
    """

    def blocks() -> Iterator[tuple[NDArray, NDArray[np.int64]]]:
        for path, group in zip(digested.paths, groups, strict=True):
            for block in read_records(path, GROUP_RECORD, BLOCK):
                yield _corpus_records(block, group), partition_of(block["high"], len(outputs))

    scatter_records(outputs, blocks())


def join_digests(scattered: FileSet, sources: SourceRuns, output: Path, memory: int) -> Counts:
    """Task: write the copies (COPY_RECORDs) among the CORPUS_RECORDs of a digest range, from files in key order.

    Counts documents read, copies, firsts and documents alone.
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
        for path in scattered.paths:
            for records in read_records(path, CORPUS_RECORD, BLOCK):
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
    """Counts documents and bytes of CORPUS_RECORDs by reason and source; `sources` are those of the files."""

    def __init__(self, sources: SourceRuns) -> None:
        self.sources = sources
        self.tallies = {reason: np.zeros((2, len(sources.sources)), np.int64) for reason in (READ, COPY, FIRST)}

    def add(self, reason: str, records: NDArray) -> None:
        """Count records as READ, COPY or FIRST."""
        tally, runs = self.tallies[reason], self.sources.find(records["file"])
        tally[0] += np.bincount(runs, minlength=len(self.sources.sources))
        np.add.at(tally[1], runs, records["size"].astype(np.int64))

    def counts(self) -> Counts:
        """Counts per source of READ, COPY, FIRST, and of the rest, ALONE."""
        counts = Counts({}, [])
        alone = self.tallies[READ] - self.tallies[COPY] - self.tallies[FIRST]
        for reason, tally in {**self.tallies, ALONE: alone}.items():
            for run in np.flatnonzero(tally[0]):
                documents, size = tally[:, run].tolist()
                counts.add(self.sources.sources[run], reason, size, documents)
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
