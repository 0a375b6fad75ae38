"""Exact copies: documents whose text, or matching form, has the same digest as an earlier one.

`digest_slices` writes the digests of documents; `scatter_digests` the records of a bundle of groups to a file for each
range of digests; `join_digests` sorts one range from all bundles and writes the copies in it; `merge_copies` sorts the
copies of all ranges by key.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dedup.candidates.document_ids import SourceRuns, SourceTallies
from dedup.candidates.input_shards import Scope
from dedup.minhash.shingles import MatchOn, digest_texts
from gristmill.batches import batched, partition_of
from gristmill.counts import READ, Counts
from gristmill.engine.slices import SliceGroup, leaves_out_damaged
from gristmill.engine.task import FileSet, Result
from gristmill.io.artefacts import ExternalSorter, read_records, scatter_records, write_records
from gristmill.io.readers import Rejects, Slice, read_documents
from gristmill.text import utf8_size

DIGEST = [("high", "<u8"), ("low", "<u8")]
GROUP_RECORD = np.dtype([*DIGEST, ("row", "<u4"), ("size", "<u4")])  # row within the group; bytes of the text in UTF-8
DIGESTED = "digested"
_BATCH_CHARACTERS, _BATCH_DOCUMENTS = 4 << 20, 4096  # digested together
CORPUS_RECORD = np.dtype([*DIGEST, ("row", "<u8"), ("size", "<u4"), ("file", "<u4")])  # row within the file
COPY_RECORD = np.dtype([("file", "<u4"), ("kept_file", "<u4"), ("row", "<u8"), ("kept_row", "<u8")])
COPY = "copy"
ALONE = "alone"
FIRST = "first"  # of a group of equal documents
BLOCK = 1 << 16  # records read together


@leaves_out_damaged
def digest_slices(group: SliceGroup, on: MatchOn, scope: Scope, output: Path) -> Result:
    """Task: write the GROUP_RECORDs of a group of slices; returns the row in the group of each slice's first row."""
    counts, first_rows = Counts({}, []), list[int]()
    write_records(output, _iter_records(group, on, scope, counts, Rejects(output), first_rows))
    return Result(counts, first_rows)


def _iter_records(
    group: SliceGroup, on: MatchOn, scope: Scope, counts: Counts, rejects: Rejects, first_rows: list[int]
) -> Iterator[NDArray]:
    """GROUP_RECORDs of the slices' documents; appends the row in the group of each slice's first row."""
    end = 0
    for part in group:
        first_rows.append(end)
        for records in _digest_slice(part, on, scope, counts, rejects):
            records["row"] += np.uint32(first_rows[-1])
            end = int(records["row"][-1]) + 1
            yield records


def _digest_slice(part: Slice, on: MatchOn, scope: Scope, counts: Counts, rejects: Rejects) -> Iterator[NDArray]:
    """GROUP_RECORDs of a slice's documents, rows within the slice."""
    salt = part.source.encode() + b"\0" if scope == "per-source" else b""
    for documents in batched(
        read_documents(part, counts, rejects), _BATCH_DOCUMENTS, _BATCH_CHARACTERS, lambda document: len(document.text)
    ):
        records = np.empty(len(documents), GROUP_RECORD)
        records["high"], records["low"] = digest_texts([document.text for document in documents], on, salt).T
        records["row"] = [document.key.row - part.first_row for document in documents]
        records["size"] = [utf8_size(document.text) for document in documents]
        counts.add(part.source, DIGESTED, int(records["size"].sum(dtype=np.int64)), len(records))
        yield records


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
    tallies = SourceTallies(sources, (READ, COPY, FIRST))

    def copy_records(sorted_blocks: Iterable[NDArray]) -> Iterator[NDArray]:
        for copies, firsts, new_firsts in find_copies(sorted_blocks):
            tallies.add(COPY, copies["file"], copies["size"])
            tallies.add(FIRST, new_firsts["file"], new_firsts["size"])
            found = np.empty(len(copies), COPY_RECORD)
            found["file"], found["row"] = copies["file"], copies["row"]
            found["kept_file"], found["kept_row"] = firsts["file"], firsts["row"]
            yield found

    runs = output.with_name(f"{output.name}.runs")
    with ExternalSorter(runs, CORPUS_RECORD, ("high", "low"), memory) as sorter:  # stable: in key order within a group
        for records in read_records(scattered.paths, CORPUS_RECORD, BLOCK):
            tallies.add(READ, records["file"], records["size"])
            sorter.add(records)
        write_records(output, copy_records(_split_blocks(sorter)))
    read, *others = tallies.tallies.values()
    tallies.tallies[ALONE] = read - sum(others)
    return tallies.counts()


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
        sorter.add_all(read_records(found.paths, COPY_RECORD, BLOCK))
        write_records(output, sorter)


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
