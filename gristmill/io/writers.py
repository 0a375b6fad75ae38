"""Writers: .jsonl, .jsonl.gz, .jsonl.zst and .parquet files, written atomically, and of malformed records.

Values in a .parquet are as JSON has them: an object is a struct, a list a list, whole numbers int64, others double;
points in time are text. A field that a record lacks is null. A field has one type in all records; whole and other
numbers mix.
"""

import base64
import gzip
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import msgspec
import pyarrow as pa
import pyarrow.parquet
import zstandard

from gristmill.batches import batched
from gristmill.errors import UsageError, wrap_write_errors
from gristmill.io.documents import LINE_FORMATS, compression_of, parse_name
from gristmill.io.files import rejects_path
from gristmill.io.lines import read_lines
from gristmill.io.text_records import decode_value
from gristmill.storage.local import atomic_write

ZSTD_LEVEL = 3
_BATCH_ROWS = 1024  # of lines that are Python values together
_BATCH_BYTES = 4 << 20  # of lines that are Python values together
_GROUP_BYTES = 32 << 20  # of lines in a row group, or of one line
_FAULTS = (pa.ArrowException, OverflowError, TypeError, UnicodeEncodeError)


class Sink(Protocol):
    """Anything that bytes can be written to."""

    def write(self, data: bytes | memoryview, /) -> Any:
        """Append `data`."""


@contextmanager
def open_jsonl_writer(path: Path, zstd_level: int = ZSTD_LEVEL) -> Iterator[Sink]:
    """Yield a sink for the lines of a file; publish the file when the block ends without an error.

    The suffix .gz or .zst selects the compression. The same lines give the same bytes: no time stamp,
    one thread, a fixed level. No other compression or format is written: see documents.normal_name.
    """
    compression = compression_of(path.name)
    parts = parse_name(path.name)
    assert compression in ("", "gz", "zst") and (parts is None or parts.format in LINE_FORMATS), path
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        if compression == "zst":
            with zstd_compressor(zstd_level).stream_writer(file, closefd=False) as sink:
                yield sink
        elif compression == "gz":
            with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0, compresslevel=6) as sink:
                yield sink
        else:
            yield file


def zstd_compressor(level: int = ZSTD_LEVEL) -> zstandard.ZstdCompressor:
    """Return a compressor for all .zst output; its frames have a checksum, so that readers detect damage."""
    return zstandard.ZstdCompressor(level=level, write_checksum=True)


class Rejects:
    """Writer of the malformed records found while writing `output`, as JSON lines in `output`.malformed; of None, none.

    Each line has the file, the line number (from 1), the reason, and the record itself as `raw`, or
    as `raw_base64` if it is not UTF-8. The constructor removes the file of an earlier run; the first call of
    `add` creates a new one.
    """

    def __init__(self, output: Path | None) -> None:
        self.path: Path | None = None
        if output is not None:
            self.path = rejects_path(output)
        # most often there is none, and unlink takes a lock that other processes wait for
        if self.path and os.path.lexists(self.path):
            with wrap_write_errors(self.path):
                self.path.unlink(missing_ok=True)

    def note(self, row: int, reason: str, size: int, url: str = "") -> None:
        """Do nothing: a subclass may note the row of a record that is no document, why, its size in bytes and url."""

    def add(self, file: str, line: int, reason: str, record: bytes | dict[str, Any]) -> None:
        """Append a malformed record: its file, its line_of that file, the reason, and its bytes or fields."""
        if self.path is None:
            return
        if isinstance(record, bytes):
            raw = record
        else:
            raw = msgspec.json.encode(record, enc_hook=str)
        entry: dict[str, Any] = {"file": file, "line": line, "reason": reason}
        try:
            entry["raw"] = raw.decode()
        except UnicodeDecodeError:
            entry["raw_base64"] = base64.b64encode(raw).decode()
        with wrap_write_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as stored:
                stored.write(msgspec.json.Encoder().encode_lines((entry,)))


def schema_of(pieces: Iterable[Path], name: str) -> pa.Schema:
    """Return the schema of the records in some .jsonl.zst files, written for the file `name`.

    UsageError for a field whose values have types that no column holds.
    """
    schema = pa.schema([])
    for records, _ in _batches(pieces):
        types = {field: column.type for field, column in _columns(records, {}, name).items()}
        schema = merge_schemas([(name, schema), (name, pa.schema(types))])
    return schema


def merge_schemas(schemas: Sequence[tuple[str, pa.Schema]]) -> pa.Schema:
    """Return one schema for records of all, by the names of their files.

    UsageError if a field has types that do not mix.
    """
    merged = pa.schema([])
    for name, schema in schemas:
        try:
            merged = pa.unify_schemas([merged, schema], promote_options="permissive")
        except pa.ArrowException as error:
            raise _unwritable(name, f"{error}") from error
    return merged


def write_documents(pieces: Iterable[Path], schema: pa.Schema, target: Path) -> None:
    """Write the records of some .jsonl.zst files, in their order, as one Parquet file, atomically."""
    with atomic_write(target) as temporary, pa.parquet.ParquetWriter(temporary, schema, compression="zstd") as writer:
        held = list[pa.RecordBatch]()
        size = 0
        for records, read in _batches(pieces):
            columns = _columns(records, {field.name: field.type for field in schema}, target.name)
            held.append(pa.RecordBatch.from_pydict(columns, schema))
            size += read
            if size >= _GROUP_BYTES:
                writer.write_table(pa.Table.from_batches(held))
                held = []
                size = 0
        if held:
            writer.write_table(pa.Table.from_batches(held))


def _batches(pieces: Iterable[Path]) -> Iterator[tuple[list[dict[str, Any]], int]]:
    """Yield records of some files, a few at a time, and the bytes of their lines."""
    lines = chain.from_iterable(map(read_lines, pieces))
    for batch in batched(lines, count=_BATCH_ROWS, size=_BATCH_BYTES, size_of=lambda line: len(line) + 1):
        records = [decode_value(msgspec.Raw(line)) for line in batch]
        yield records, sum(map(len, batch)) + len(batch)


def _columns(records: list[dict[str, Any]], types: dict[str, pa.DataType], name: str) -> dict[str, pa.Array]:
    """Return the columns of records, of their own types or of `types`, which then are all columns."""
    columns = dict[str, pa.Array]()
    for field in types or dict.fromkeys(chain.from_iterable(records)):
        try:
            columns[field] = pa.array([record.get(field) for record in records], types.get(field))
        except _FAULTS as error:
            raise _unwritable(name, f"field {field!r}: {error}") from error
    return columns


def reject_unwritable(schema: pa.Schema, name: str) -> None:
    """Raise UsageError for fields with objects that have no fields, which Parquet cannot hold."""
    for field in schema:
        if _has_empty_struct(field.type):
            raise _unwritable(name, f"field {field.name!r} has objects without fields")


def _has_empty_struct(kind: pa.DataType) -> bool:
    children = [kind.field(i).type for i in range(kind.num_fields)]
    return (pa.types.is_struct(kind) and not children) or any(map(_has_empty_struct, children))


def _unwritable(name: str, fault: str) -> UsageError:
    return UsageError(
        f"{name} cannot be written as Parquet, whose fields have one type each: {fault}. Change it with your own "
        "function (gristmill apply), or try --format jsonl"
    )
