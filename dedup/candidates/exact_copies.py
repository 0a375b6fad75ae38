"""Exact copies: documents whose text, or matching form, has the same digest as an earlier one.

`digest_slices` writes the digests of a group's documents; `join_copies` sorts one range of digests of all groups and
writes the copies in it. A document is named by its group and its row there until RowLocator gives its key.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from dedup.candidates.digest_join import DIGEST, is_repeated, sorted_records, with_group
from dedup.candidates.document_ids import ALONE, SourceRuns, SourceTallies
from dedup.candidates.input_shards import Scope
from dedup.minhash.shingles import MatchOn, digest_texts
from dedup.runs import first_of_runs
from gristmill.batches import batched
from gristmill.counts import READ, Counts
from gristmill.engine.slices import SliceGroup, leaves_out_damaged
from gristmill.engine.task import FileSet, Result
from gristmill.io.documents import rows_of
from gristmill.io.external_sort import write_records
from gristmill.io.readers import read_documents
from gristmill.io.writers import Rejects
from gristmill.text import utf8_size

DIGESTED_ROW = np.dtype([*DIGEST, ("row", "<u4"), ("size", "<u4")])  # row in the group; bytes of the text in UTF-8
CORPUS_ROW = with_group(DIGESTED_ROW)
COPY_RECORD = np.dtype([(name, "<u4") for name in ("group", "row", "kept_group", "kept_row")])
DIGESTED = "digested"
COPY = "copy"
FIRST = "first"  # of a group of equal documents
_BATCH_CHARACTERS = 4 << 20  # that are digested together
_BATCH_DOCUMENTS = 4096  # that are digested together


@leaves_out_damaged
def digest_slices(group: SliceGroup, on: MatchOn, scope: Scope, output: Path) -> Result:
    """Task: write the DIGESTED_ROWs of a group of slices; returns the row in the group of each slice's first row."""
    counts = Counts({}, [])
    first_rows = list[int]()
    write_records(output, _iter_records(group, on, scope, counts, Rejects(output), first_rows))
    return Result(counts, first_rows)


def salt_of(source: str, scope: Scope) -> bytes:
    """Return what is digested before each text, so that texts of other sources, or no others, have other digests."""
    if scope == "per-source":
        return source.encode() + b"\0"
    return b""


def _iter_records(
    group: SliceGroup, on: MatchOn, scope: Scope, counts: Counts, rejects: Rejects, first_rows: list[int]
) -> Iterator[NDArray]:
    """Yield DIGESTED_ROWs of the slices' documents; append the row in the group of each slice's first row."""
    salt = salt_of(group[0].source, scope)
    end = 0
    for part in group:
        first = end
        first_rows.append(first)
        slice_documents = read_documents(part, counts, rejects)
        for batch in batched(slice_documents, _BATCH_DOCUMENTS, _BATCH_CHARACTERS, lambda item: len(item.text)):
            digests = digest_texts([document.text for document in batch], on, salt)
            records = np.empty(len(batch), DIGESTED_ROW)
            records["high"] = digests[:, 0]
            records["low"] = digests[:, 1]
            records["row"] = np.array(rows_of(batch), np.int64) - part.first_row + first
            records["size"] = [utf8_size(document.text) for document in batch]
            size = int(records["size"].sum(dtype=np.int64))
            counts.add(part.source, DIGESTED, size, len(records))
            end = int(records["row"][-1]) + 1
            yield records


class RowLocator(NamedTuple):
    """The slices (n) of a corpus in order, to turn rows in groups into rows in files."""

    starts: NDArray[np.uint64]  # group and row in the group of each slice's first row, packed
    files: NDArray[np.uint32]  # number of its file
    first_rows: NDArray[np.int64]  # its first row in that file

    @classmethod
    def of(cls, groups: Sequence[SliceGroup], starts: Sequence[Sequence[int]], numbers: dict[str, int]) -> Self:
        """Build it from groups, the values of digest_slices, and the numbers of files by name."""
        packed = list[int]()
        for group_number, starts_of_group in enumerate(starts):
            packed += [group_number << 32 | start for start in starts_of_group]
        files = list[int]()
        first_rows = list[int]()
        for group in groups:
            for part in group:
                files.append(numbers[part.name])
                first_rows.append(part.first_row)
        return cls(np.array(packed, np.uint64), np.array(files, np.uint32), np.array(first_rows, np.int64))

    def find(self, groups: NDArray[np.uint32], rows: NDArray[np.uint32]) -> tuple[NDArray[np.uint32], NDArray]:
        """Return the numbers of files (n) and rows there (n, int64), given groups (n) and rows in the groups (n)."""
        packed = groups.astype(np.uint64) << np.uint64(32) | rows
        numbers = np.searchsorted(self.starts, packed, side="right") - 1  # the last of equal starts: others are empty
        rows_in_slices = (packed - self.starts[numbers]).astype(np.int64)
        return self.files[numbers], rows_in_slices + self.first_rows[numbers]


def join_copies(scattered: FileSet, sources: SourceRuns, output: Path, memory: int) -> Counts:
    """Task: write the copies (COPY_RECORDs) among the CORPUS_ROWs of a digest range, from files in corpus order.

    Counts documents read, copies, firsts and documents alone; `sources` are those of groups.
    """
    tallies = SourceTallies(sources, (READ, COPY, FIRST))

    def copies_in(blocks: Iterable[NDArray]) -> Iterator[NDArray]:
        for copies, firsts, new_firsts in find_copies(blocks):
            tallies.add(COPY, copies["group"], copies["size"])
            tallies.add(FIRST, new_firsts["group"], new_firsts["size"])
            records = np.empty(len(copies), COPY_RECORD)
            records["group"] = copies["group"]
            records["row"] = copies["row"]
            records["kept_group"] = firsts["group"]
            records["kept_row"] = firsts["row"]
            yield records

    def counted() -> Iterator[NDArray]:
        for block in sorted_records(scattered.paths, CORPUS_ROW, ("high", "low"), output, memory):
            tallies.add(READ, block["group"], block["size"])
            yield block

    write_records(output, copies_in(counted()))
    read, *others = tallies.tallies.values()
    tallies.tallies[ALONE] = read - sum(others)
    return tallies.counts()


def find_copies(blocks: Iterable[NDArray]) -> Iterator[tuple[NDArray, NDArray, NDArray]]:
    """Yield for each block of records sorted by digest its copies, the first of each copy's group, and new firsts.

    Records are CORPUS_ROWs, or others with a digest. A new first is a group's first document, yielded once: with the
    first copy of the group.

    >>> records = np.zeros(5, CORPUS_ROW)
    >>> records["low"], records["row"] = [5, 5, 6, 7, 7], [0, 3, 8, 1, 2]
    >>> for arrays in find_copies([records[:2], records[2:4], records[4:]]):
    ...     [array["row"].tolist() for array in arrays]
    [[3], [0], [0]]
    [[], [], []]
    [[2], [1], [1]]
    """
    last: NDArray | None = None  # first and last record of the group that the previous block ends with
    for block in blocks:
        last = block[:0] if last is None else last
        records = np.concatenate([last, block])
        is_copy = is_repeated(records)
        firsts = first_of_runs(~is_copy)
        is_second = np.arange(len(records)) == firsts + 1
        is_copy[: len(last)] = False
        is_second[: len(last)] = False
        yield records[is_copy], records[firsts[is_copy]], records[firsts[is_second]]
        last = records[sorted({firsts[-1], len(records) - 1})]
