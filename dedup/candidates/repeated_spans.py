"""Repeated spans of a corpus: found by sorted joins of digests of their blocks and windows, then cut out of documents.

`digest_blocks` writes the blocks of a group of slices; `join_blocks` sorts one range of their digests and writes which
repeat, and which are open; `split_open` gives each group its own open ones, whose windows `digest_open` writes and
`join_windows` resolves; `split_cuts` and `split_kept` give each group what it loses and what others lose for it;
`write_cut` cuts it; `name_kept` names documents in the table. A document is named by its group and its row there.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dedup.candidates.digest_join import BLOCK, DIGEST, sorted_records, with_group
from dedup.candidates.exact_copies import RowLocator, find_copies
from dedup.spans.blocks import PIECE_BYTES, Piece, cut_pieces, digest_windows, find_blocks
from dedup.spans.cuts import keeps_any, plan_cuts, spans_of_rows, without
from dedup.spans.joins import (
    FIRST_PLACE,
    OPEN,
    PLACE,
    SPAN,
    STRETCH,
    KeepSpan,
    join_open,
    reduce_spans,
    resolve_blocks,
    span_of,
    stretches_of,
)
from gristmill.batches import batched
from gristmill.counts import Counts
from gristmill.engine.slices import SliceGroup, leaves_out_damaged
from gristmill.engine.task import FileSet, Result
from gristmill.io.artefacts import open_table_writer, stream_table
from gristmill.io.documents import DocKey
from gristmill.io.external_sort import HeldRecords, read_records, write_records
from gristmill.io.readers import read_chosen, read_documents
from gristmill.io.writers import Rejects, open_jsonl_writer
from gristmill.text import utf8_size

_ROWS = 1 << 14  # of the table, written together
EMPTIED = "all of it repeated"
FRAGMENT = "fragment"
GROUP_BLOCK = np.dtype([*DIGEST, ("row", "<u4"), ("offset", "<u4"), ("windows", "<u4")])
CORPUS_BLOCK = with_group(GROUP_BLOCK)
GROUP_WINDOW = np.dtype([*DIGEST, ("row", "<u4"), ("offset", "<u4")])
CORPUS_WINDOW = with_group(GROUP_WINDOW)
PLACES_SCHEMA = pa.schema(
    {
        "file": pa.string(),
        "row": pa.int64(),
        "start": pa.int64(),
        "bytes": pa.int64(),
        "first_group": pa.uint32(),
        "first_row": pa.uint32(),
        "kept_start": pa.int64(),
        "removed": pa.bool_(),
    }
)
SCHEMA = pa.schema(
    {
        "file": pa.string(),
        "row": pa.int64(),
        "start": pa.int64(),
        "bytes": pa.int64(),
        "kept_file": pa.string(),
        "kept_row": pa.int64(),
        "kept_start": pa.int64(),
        "removed": pa.bool_(),
    }
)


@leaves_out_damaged
def digest_blocks(group: SliceGroup, size: int, leave_alone: tuple[str, ...], output: Path) -> Result:
    """Task: write the GROUP_BLOCKs of a group of slices; return the row in the group of each slice's first row.

    Documents of the sources in `leave_alone` have none, and are not read.
    """
    counts = Counts({}, [])
    first_rows = list[int]()
    if group[0].source in leave_alone:
        write_records(output, [])
        return Result(counts, [0] * len(group))
    pieces = _iter_pieces(group, size, counts, Rejects(output), first_rows)
    batches = batched(pieces, PIECE_BYTES, PIECE_BYTES, lambda piece: len(piece.data))
    write_records(output, (find_blocks(batch, size, GROUP_BLOCK) for batch in batches))
    return Result(counts, first_rows)


def _iter_pieces(
    group: SliceGroup, size: int, counts: Counts, rejects: Rejects, first_rows: list[int]
) -> Iterator[Piece]:
    """Yield the pieces of all documents; append the row in the group of each slice's first row."""
    end = 0
    for part in group:
        first = end
        first_rows.append(first)
        for document in read_documents(part, counts, rejects):
            data = document.text.encode()
            counts.add(part.source, "digested", len(data))
            row = first + document.key.row - part.first_row
            end = row + 1
            del document  # a long one is gone before the next is read
            yield from cut_pieces(data, row, size)
            del data


def join_blocks(scattered: FileSet, keep: KeepSpan, output: Path, memory: int) -> None:
    """Task: write the SPANs among the CORPUS_BLOCKs of a digest range, from files in corpus order."""
    blocks = sorted_records(scattered.paths, CORPUS_BLOCK, ("high", "low"), output, memory // 2)
    with HeldRecords(output.with_name(f"{output.name}.held")) as held:
        write_records(output, resolve_blocks(blocks, keep, held))


def split_open(spans: FileSet, outputs: tuple[Path, ...], memory: int) -> None:
    """Task: write each group's open SPANs, by place, to its file of `outputs`."""
    blocks = sorted_records(spans.paths, SPAN, PLACE, outputs[0], memory)
    _write_by_group(blocks, "group", outputs, join_open)


def digest_open(group: SliceGroup, first_rows: Sequence[int], spans: Path, size: int, output: Path) -> Counts:
    """Task: write the GROUP_WINDOWs of a group's open SPANs."""
    pieces = _iter_open(group, first_rows, spans, size)
    batches = batched(pieces, PIECE_BYTES, PIECE_BYTES, lambda piece: len(piece.data))
    write_records(output, (digest_windows(batch, size, GROUP_WINDOW) for batch in batches))
    return Counts({}, [])


def _iter_open(group: SliceGroup, first_rows: Sequence[int], spans: Path, size: int) -> Iterator[Piece]:
    """Yield the pieces of the open SPANs, each of their windows once."""
    rows = np.unique(np.concatenate([np.empty(0, np.uint32), *_distinct_rows(spans)])).astype(np.int64)
    of_rows = spans_of_rows(read_records(spans, SPAN, BLOCK))
    for part, first in zip(group, first_rows, strict=True):
        following = [start for start in first_rows if start > first]
        end = following[0] if following else 1 << 32
        chosen = rows[(rows >= first) & (rows < end)]
        for document in read_chosen(part, (chosen - first + part.first_row).tolist()):
            row, of_row = next(of_rows)
            data = document.text.encode()
            del document  # a long one is gone before the next is read
            for offset, windows in zip(of_row["offset"].tolist(), of_row["windows"].tolist(), strict=True):
                yield from cut_pieces(data, row, size, offset, windows)
            del data


def _distinct_rows(spans: Path) -> Iterator[NDArray[np.uint32]]:
    for block in read_records(spans, SPAN, BLOCK):
        yield np.unique(block["row"])


def join_windows(scattered: FileSet, keep: KeepSpan, output: Path, memory: int) -> None:
    """Task: write the SPANs, of a window each, among the CORPUS_WINDOWs of a digest range."""
    blocks = sorted_records(scattered.paths, CORPUS_WINDOW, ("high", "low"), output, memory // 2)
    write_records(output, resolve_windows(blocks, keep))


def resolve_windows(blocks: Iterable[NDArray], keep: KeepSpan) -> Iterator[NDArray]:
    for copies, firsts, new_firsts in find_copies(blocks):
        yield span_of(copies, firsts, 1)
        if keep == "none":
            yield span_of(new_firsts, new_firsts, 1)


def split_cuts(spans: FileSet, size: int, outputs: tuple[Path, ...], memory: int) -> None:
    """Task: write each group's SPANs that are not open, by place, to its file of `outputs`."""

    def choose(of_group: Iterable[NDArray]) -> Iterator[NDArray]:
        return reduce_spans((records[records["first_group"] != OPEN] for records in of_group), size)

    _write_by_group(sorted_records(spans.paths, SPAN, PLACE, outputs[0], memory), "group", outputs, choose)


def split_kept(spans: FileSet, size: int, outputs: tuple[Path, ...], memory: int) -> None:
    """Task: write each group's STRETCHes for which other documents lose text to its file of `outputs`."""

    def choose(of_group: Iterable[NDArray]) -> Iterator[NDArray]:
        for records in of_group:
            is_own = (records["group"] == records["first_group"]) & (records["row"] == records["first_row"])
            yield stretches_of(records[~is_own], size)

    blocks = sorted_records(spans.paths, SPAN, FIRST_PLACE, outputs[0], memory)
    _write_by_group(blocks, "first_group", outputs, choose)


def _write_by_group(
    blocks: Iterable[NDArray],
    field: str,
    outputs: Sequence[Path],
    choose: Callable[[Iterable[NDArray]], Iterator[NDArray]],
) -> None:
    """Write what `choose` makes of each group's records, which are sorted by group, to its file of `outputs`."""
    written = 0
    for group, segments in groupby(_segments(blocks, field), key=lambda segment: int(segment[field][0])):
        if group == OPEN:
            break
        for output in outputs[written:group]:
            write_records(output, [])
        write_records(outputs[group], choose(segments))
        written = group + 1
    for output in outputs[written:]:
        write_records(output, [])


def _segments(blocks: Iterable[NDArray], field: str) -> Iterator[NDArray]:
    """Yield the records of blocks, split by group."""
    for block in blocks:
        yield from np.split(block, np.flatnonzero(np.diff(block[field])) + 1)


@leaves_out_damaged
def write_cut(
    group: SliceGroup,
    outputs: tuple[Path, ...],
    first_rows: Sequence[int],
    cuts: Path,
    kept: Path,
    size: int,
    min_left: int,
    min_share: float,
    rows: Path,
) -> Result:
    """Task: write the documents of each slice without their repeated spans, and a table of what each lost.

    A document that lost something and has fewer than `min_left` bytes, or less than `min_share` of its bytes, is left
    out, unless others lost `size` bytes or more for what it has left. The value is how many spans went, and out of how
    many documents.
    """
    counts = Counts({}, [])
    spans = 0
    documents = 0
    cutter = _Cutter(cuts, kept, size, min_left, min_share)
    with open_table_writer(rows, PLACES_SCHEMA) as write:
        lost = _LostRows(write)
        for part, output, first in zip(group, outputs, first_rows, strict=True):
            with open_jsonl_writer(output) as sink:
                for document in read_documents(part, counts, Rejects(output)):
                    size_before = utf8_size(document.text)
                    left = cutter.cut(first + document.key.row - part.first_row, document.text)
                    if left:
                        lost.add(document.key, left.cuts, bool(left.reason))
                        spans += len(left.cuts)
                        documents += 1
                        document.replace_text(left.text)
                    if left and left.reason:
                        counts.add(part.source, left.reason, size_before)
                    else:
                        sink.write(document.to_json())
                        counts.add_written(part.source, utf8_size(document.text), size_before)
                    del document, left  # a long one is gone before the next is read
        lost.flush()
    return Result(counts, (spans, documents))


class _Left(NamedTuple):
    """The rest of a document: its text, the CUTs, and why the document goes, if it does."""

    text: str
    cuts: NDArray
    reason: str


class _Cutter:
    """Cuts the documents of a group, which are given by ascending rows."""

    def __init__(self, cuts: Path, kept: Path, size: int, min_left: int, min_share: float) -> None:
        self._spans = _RowReader(cuts, SPAN)
        self._kept = _RowReader(kept, STRETCH)
        self._size = size
        self._min_left = min_left
        self._min_share = min_share

    def cut(self, row: int, text: str) -> _Left | None:
        """Return what is left of a document; None if nothing is cut."""
        spans = self._spans.read(row)
        if not len(spans):
            return None
        data = text.encode()
        cuts = plan_cuts(data, spans, self._size)
        if not len(cuts):
            return None
        length = len(data)
        left = without(data, cuts)
        del data  # a long document is in memory as few times as can be
        is_fragment = len(left) < self._min_left or len(left) < self._min_share * length
        reason = ""
        if not left or left.isspace():
            reason = EMPTIED
        elif is_fragment and not keeps_any(self._kept.read(row), cuts, self._size, length):
            reason = FRAGMENT
        return _Left(left.decode(), cuts, reason)


class _LostRows:
    """Rows of the table of what documents lost, which are written some thousands at a time."""

    def __init__(self, write: Callable[[dict[str, pa.Array]], None]) -> None:
        self._write = write
        self._held = list[tuple[DocKey, NDArray, bool]]()
        self._rows = 0

    def add(self, key: DocKey, cuts: NDArray, is_removed: bool) -> None:
        """Add the CUTs of a document."""
        self._held.append((key, cuts, is_removed))
        self._rows += len(cuts)
        if self._rows >= _ROWS:
            self.flush()

    def flush(self) -> None:
        """Write what was added."""
        if not self._held:
            return
        keys, of_documents, are_removed = zip(*self._held, strict=True)
        cuts = np.concatenate(of_documents)
        sizes = [len(of_document) for of_document in of_documents]
        files = pa.array([key.file for key in keys])
        self._write(
            {
                "file": files.take(pa.array(np.repeat(np.arange(len(keys)), sizes))),
                "row": pa.array(np.repeat([key.row for key in keys], sizes)),
                "start": pa.array(cuts["start"]),
                "bytes": pa.array(cuts["end"] - cuts["start"]),
                "first_group": pa.array(cuts["first_group"].astype(np.uint32)),
                "first_row": pa.array(cuts["first_row"].astype(np.uint32)),
                "kept_start": pa.array(cuts["first_offset"]),
                "removed": pa.array(np.repeat(are_removed, sizes)),
            }
        )
        self._held = []
        self._rows = 0


class _RowReader:
    """Records of a file that are sorted by row, asked for by ascending rows."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self._of_rows = spans_of_rows(read_records(path, dtype, BLOCK))
        self._empty = np.empty(0, dtype)
        self._next = next(self._of_rows, None)

    def read(self, row: int) -> NDArray:
        """Return the records of a row; none if it has none."""
        while self._next is not None and self._next[0] < row:
            self._next = next(self._of_rows, None)
        return self._next[1] if self._next is not None and self._next[0] == row else self._empty


def name_kept(lost: Path, names: list[str], places: RowLocator, keep: KeepSpan, table: Path) -> None:
    """Task: write the table of what documents lost, with the document that kept it, if one did."""
    values = pa.array(names, pa.string())
    columns = ["file", "row", "start", "bytes", "removed"]
    with open_table_writer(table, SCHEMA) as write:
        for rows in stream_table(lost, PLACES_SCHEMA.names):
            named = {name: rows.column(name) for name in columns}
            if keep == "first":
                groups = rows.column("first_group").to_numpy()
                files, kept_rows = places.find(groups, rows.column("first_row").to_numpy())
                named["kept_file"] = values.take(pa.array(files))
                named["kept_row"] = pa.array(kept_rows)
                named["kept_start"] = rows.column("kept_start")
            else:
                for name in ("kept_file", "kept_row", "kept_start"):
                    named[name] = pa.nulls(rows.num_rows, SCHEMA.field(name).type)
            write({name: named[name] for name in SCHEMA.names})
