"""Readers: a slice of a corpus file in, documents out; malformed records are counted and kept apart."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from gristmill.counts import MALFORMED, READ, Counts
from gristmill.errors import InputError, reading
from gristmill.io.documents import JSONL, CorpusFile, DocKey, Document, source_of
from gristmill.io.lines import line_starts, read_lines
from gristmill.io.writers import Rejects
from gristmill.text import utf8_size

SLICE_BYTES = 64 << 20  # a larger .jsonl or .parquet file is read by several tasks
MAX_LINE = 1 << 30
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_RECORD = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TEXT = msgspec.json.Decoder(str)


@dataclass(frozen=True)
class Slice:
    """The part of a corpus file that one task reads: bytes of a .jsonl, row groups of a .parquet."""

    path: str
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
        """A name for the slice that no other of its corpus has."""
        return f"{self.name}+{self.start}"


class Malformed(Exception):
    """A record that is no document; the message is its reason."""


def plan_slices(file: CorpusFile) -> list[Slice]:
    """Cut a file where tasks may share it: .jsonl at lines, .parquet at row groups, others not at all."""
    if file.size > SLICE_BYTES and file.name.endswith(".jsonl"):
        cuts = line_starts(file.path, SLICE_BYTES)
    elif file.size > SLICE_BYTES and file.name.endswith(".parquet"):
        cuts = _row_group_starts(file)
    else:
        cuts = [(0, 0)]
    ends = [start for start, _ in cuts[1:]] + [None]
    share = file.size // len(cuts)
    return [
        Slice(str(file.path), file.name, row, start, end, share) for (start, row), end in zip(cuts, ends, strict=True)
    ]


def read_documents(part: Slice, counts: Counts, rejects: Rejects, carried: bool = False) -> Iterator[Document]:
    """Every document of a slice, each counted as read under its source.

    A record that is no document is counted as malformed, with its reason, and handed to `rejects`.
    With `carried` the source is that of the key which the document carries (see Document.origin).
    """
    rows = _read_lines if part.name.endswith(JSONL) else _read_table
    for row, record in rows(part):
        try:
            document = _to_document(record, DocKey(part.name, row))
        except Malformed as error:
            size = len(record) if isinstance(record, bytes) else 0
            counts.add(part.source, READ, size)
            counts.add(part.source, f"{MALFORMED}: {error}", size)
            counts.add_example(f"{part.path} line {row + 1}: {error}")
            rejects.add(part.path, row, str(error), record)
        else:
            counts.add(document.origin.source if carried else part.source, READ, utf8_size(document.text))
            yield document


def _to_document(record: bytes | dict[str, Any], key: DocKey) -> Document:
    fields = _parse(record) if isinstance(record, bytes) else record
    if "text" not in fields:
        raise Malformed("no text")
    text = fields["text"]
    if isinstance(text, msgspec.Raw):
        text = _decode_text(text)
    if not isinstance(text, str):
        raise Malformed("text is null" if text is None else "text is not a string")
    return Document(text, key, fields)


def _parse(line: bytes) -> dict[str, Any]:
    if len(line) > MAX_LINE:
        raise Malformed("line over 1 GiB")
    try:
        line.decode()
        return _RECORD.decode(line)
    except UnicodeDecodeError:
        raise Malformed("invalid UTF-8") from None
    except (msgspec.DecodeError, RecursionError):
        raise Malformed(_why_not(line)) from None


def _decode_text(raw: msgspec.Raw) -> str | None:
    try:
        return _TEXT.decode(raw)
    except msgspec.ValidationError:
        raise Malformed("text is null" if bytes(raw) == b"null" else "text is not a string") from None
    except msgspec.DecodeError:
        raise Malformed("lone surrogate") from None


def _why_not(line: bytes) -> str:
    """Ask a lenient parser what is wrong with a line that the strict one refused."""
    try:
        value = json.loads(line)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "lone surrogate"
    except (ValueError, RecursionError):
        return "broken JSON"
    return "broken JSON" if isinstance(value, dict) else "not an object"


def _read_lines(part: Slice) -> Iterator[tuple[int, bytes]]:
    """(row, line) of every line that is not blank."""
    for row, line in enumerate(read_lines(Path(part.path), part.start, part.end), part.first_row):
        if row == 0:
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if line and not line.isspace():
            yield row, line


def _read_table(part: Slice) -> Iterator[tuple[int, bytes | dict[str, Any]]]:
    """(row, record) of a Parquet or Arrow file; of a record that is not UTF-8, the bytes that are not."""
    row = part.first_row
    try:
        with reading(Path(part.path)):
            for batch in _batches(part):
                yield from enumerate(_records(batch), row)
                row += batch.num_rows
    except (pa.ArrowException, OSError) as error:  # Arrow calls damaged pages an OSError
        raise InputError(
            f"{part.path}: not a readable {Path(part.path).suffix} file after row {row:,} ({error}). "
            "Fetch it again, or remove it to go on without it."
        ) from error


def _records(batch: pa.RecordBatch) -> Iterator[bytes | dict[str, Any]]:
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:  # raised before the first record is out: go one by one
        for index in range(batch.num_rows):
            row = batch.slice(index, 1)
            try:
                yield row.to_pylist()[0]
            except UnicodeDecodeError:
                yield row.column("text").cast(pa.binary())[0].as_py() or b"\xff"


def _batches(part: Slice) -> Iterator[pa.RecordBatch]:
    if part.path.endswith(".parquet"):
        with pa.parquet.ParquetFile(part.path, pre_buffer=False) as file:
            _require_text(file.schema_arrow, part.path)
            groups = range(part.start, file.num_row_groups if part.end is None else part.end)
            yield from file.iter_batches(batch_size=1024, row_groups=list(groups))
        return
    with pa.memory_map(part.path) as stored:
        yield from _ipc_batches(stored, part.path)


def _ipc_batches(stored: pa.MemoryMappedFile, path: str) -> Iterator[pa.RecordBatch]:
    """Batches of an Arrow IPC stream (what Hugging Face saves) or file."""
    try:
        reader = pa.ipc.open_stream(stored)
    except pa.ArrowInvalid:
        file = pa.ipc.open_file(stored)
        _require_text(file.schema, path)
        yield from map(file.get_batch, range(file.num_record_batches))
    else:
        _require_text(reader.schema, path)
        yield from reader


def _require_text(schema: pa.Schema, path: str) -> None:
    if "text" not in schema.names:
        columns = ", ".join(schema.names)
        raise InputError(f"{path} has no column 'text', only {columns}: rename the column that holds the text")


def _row_group_starts(file: CorpusFile) -> list[tuple[int, int]]:
    """(row group, row) of the first row group of each slice."""
    try:
        metadata = pa.parquet.read_metadata(file.path)
    except (pa.ArrowException, OSError) as error:
        raise InputError(
            f"{file.path}: not a readable .parquet file ({error}). Fetch it again, or remove it"
        ) from error
    starts, row, size = [(0, 0)], 0, 0
    for group in range(metadata.num_row_groups):
        if size >= SLICE_BYTES:
            starts.append((group, row))
            size = 0
        row += metadata.row_group(group).num_rows
        size += file.size // metadata.num_row_groups
    return starts
