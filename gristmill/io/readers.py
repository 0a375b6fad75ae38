"""Readers: read the documents of a slice of a corpus file; count malformed records and write them to a file."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from gristmill.counts import MALFORMED, READ, Counts
from gristmill.errors import InputError, wrap_read_errors
from gristmill.io.documents import JSONL_SUFFIXES, CorpusFile, DocKey, Document, source_of
from gristmill.io.formats.arrow_values import records
from gristmill.io.formats.json_fields import decode_string, parse_fields
from gristmill.io.formats.malformed import BadRecord, Malformed
from gristmill.io.lines import MAX_LINE_BYTES, CutLine, line_starts, read_lines
from gristmill.io.writers import Rejects
from gristmill.text import utf8_size

SLICE_BYTES = 64 << 20  # larger .jsonl and .parquet files are cut into slices of about this size, one task each
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Slice:
    """Part of a corpus file that one task reads, `start` up to `end`: bytes of a .jsonl, row groups of a .parquet.

    `first_row` is the row in the file of its first record; `size` is its approximate size in bytes, for
    the progress bar; `end` None is the end of the file.
    """

    path: Path
    name: str
    first_row: int = 0
    start: int = 0
    end: int | None = None
    size: int = 0

    @property
    def source(self) -> str:
        return source_of(self.name)

    @property
    def label(self) -> str:
        """Name of the slice, unique in its corpus: `<file>+<start>`."""
        return f"{self.name}+{self.start}"


def plan_slices(file: CorpusFile) -> list[Slice]:
    """Cut a file into slices: .jsonl at lines, .parquet at row groups; other formats are one slice.

    Reads a large file. Raises InputError if a file that must be cut is unreadable.
    """
    return slices_at(file, find_cuts(file, SLICE_BYTES) if is_cut(file) else [(0, 0)])


def is_cut(file: CorpusFile) -> bool:
    """Whether a file is so large that it is cut into several slices, in a format that can be."""
    return file.size > SLICE_BYTES and file.name.endswith((".jsonl", ".parquet"))


def find_cuts(file: CorpusFile, slice_bytes: int) -> list[tuple[int, int]]:
    """Where the slices of a .jsonl or .parquet file start, about `slice_bytes` apart: (byte or row group, row)."""
    if file.name.endswith(".jsonl"):
        return line_starts(file.path, slice_bytes)
    return _row_group_starts(file, slice_bytes)


def slices_at(file: CorpusFile, cuts: list[tuple[int, int]]) -> list[Slice]:
    """The slices of a file that start at `cuts`."""
    ends = [start for start, _ in cuts[1:]] + [None]
    share = file.size // len(cuts)
    return [Slice(file.path, file.name, row, start, end, share) for (start, row), end in zip(cuts, ends, strict=True)]


def read_documents(
    part: Slice, counts: Counts, rejects: Rejects, by_original_source: bool = False
) -> Iterator[Document]:
    """Yield the documents of a slice, each counted as READ under its source.

    A record that is not a document is counted as malformed, with the reason, and added to `rejects`.
    With `by_original_source`, counts under the source of Document.original_key, not the slice's.
    Raises InputError if the file is truncated, corrupt or unreadable, or has no column `text`.
    """
    rows = _read_lines if part.name.endswith(JSONL_SUFFIXES) else _read_table
    for row, record in rows(part):
        try:
            document = _to_document(record, DocKey(part.name, row))
        except Malformed as error:
            raw, size = _what_is_left(record)
            counts.add(part.source, READ, size)
            counts.add(part.source, f"{MALFORMED}: {error.reason}", size)
            counts.add_example(f"{part.path} line {row + 1}: {error}")
            rejects.add(str(part.path), row, error.reason, raw)
        else:
            source = document.original_key.source if by_original_source else part.source
            counts.add(source, READ, utf8_size(document.text))
            yield document


Record = bytes | dict[str, Any] | BadRecord  # a line of JSON, the fields of a record, or neither


def _to_document(record: Record, key: DocKey) -> Document:
    if isinstance(record, BadRecord):
        raise Malformed(record.reason)
    fields = parse_fields(record) if isinstance(record, bytes) else record
    if "text" not in fields:
        raise Malformed("no text")
    text = fields["text"]
    if isinstance(text, msgspec.Raw):
        text = decode_string(text, "text")
    if not isinstance(text, str):
        raise Malformed("text is null" if text is None else "text is not a string")
    return Document(text, key, fields)


def _what_is_left(record: Record) -> tuple[bytes | dict[str, Any], int]:
    """What is stored of a malformed record, and its size in bytes; 0 for the fields of a table's row."""
    if isinstance(record, BadRecord):
        return record.raw, record.size
    return record, len(record) if isinstance(record, bytes) else 0


def _read_lines(part: Slice) -> Iterator[tuple[int, bytes | BadRecord]]:
    """Yield (row, line) of every line that is not blank."""
    for row, line in enumerate(read_lines(part.path, part.start, part.end, MAX_LINE_BYTES), part.first_row):
        if row == 0:
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if isinstance(line, CutLine):
            yield row, BadRecord(f"line over {MAX_LINE_BYTES:,} bytes", line, line.size)
        elif line and not line.isspace():
            yield row, line


def _read_table(part: Slice) -> Iterator[tuple[int, dict[str, Any] | BadRecord]]:
    """Yield (row, record) of a Parquet or Arrow file."""
    row = part.first_row
    try:
        with wrap_read_errors(part.path):
            for batch in _batches(part):
                yield from enumerate(records(batch, "text"), row)
                row += batch.num_rows
    except (pa.ArrowException, OSError) as error:  # Arrow raises OSError for damaged pages
        raise InputError(
            f"{part.path}: not a readable {part.path.suffix} file after row {row:,} ({error}). "
            "Fetch it again, or remove it to continue without it."
        ) from error


def _batches(part: Slice) -> Iterator[pa.RecordBatch]:
    if part.path.suffix == ".parquet":
        with pa.parquet.ParquetFile(part.path, pre_buffer=False) as file:
            _require_text(file.schema_arrow, part.path)
            groups = range(part.start, file.num_row_groups if part.end is None else part.end)
            yield from file.iter_batches(batch_size=1024, row_groups=list(groups))
        return
    with pa.memory_map(str(part.path)) as stored:
        yield from _ipc_batches(stored, part.path)


def _ipc_batches(stored: pa.MemoryMappedFile, path: Path) -> Iterator[pa.RecordBatch]:
    """Yield the batches of an Arrow IPC stream (as Hugging Face datasets saves) or an IPC file."""
    try:
        reader = pa.ipc.open_stream(stored)
    except pa.ArrowInvalid:
        file = pa.ipc.open_file(stored)
        _require_text(file.schema, path)
        yield from map(file.get_batch, range(file.num_record_batches))
    else:
        _require_text(reader.schema, path)
        yield from reader


def _require_text(schema: pa.Schema, path: Path) -> None:
    if "text" not in schema.names:
        columns = ", ".join(schema.names)
        raise InputError(f"{path} has no column 'text', only {columns}: rename the column that holds the text")


def _row_group_starts(file: CorpusFile, slice_bytes: int) -> list[tuple[int, int]]:
    """First row group of each slice, and the row in the file at which it starts."""
    try:
        metadata = pa.parquet.read_metadata(file.path)
    except (pa.ArrowException, OSError) as error:
        raise InputError(
            f"{file.path}: not a readable .parquet file ({error}). Fetch it again, or remove it"
        ) from error
    starts, row, size = [(0, 0)], 0, 0
    for group in range(metadata.num_row_groups):
        if size >= slice_bytes:
            starts.append((group, row))
            size = 0
        row += metadata.row_group(group).num_rows
        size += file.size // metadata.num_row_groups
    return starts
