"""Records of .parquet and .arrow files, and where a large .parquet file is cut; see arrow_values for their values."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from gristmill.budget import reserve_memory
from gristmill.errors import LIMIT_HINTS, DamagedFile, InputError
from gristmill.io.arrow_values import fields_of, python_rows
from gristmill.io.documents import SliceStart, merge_ranges
from gristmill.io.lines import FIRST, reject_stand_in
from gristmill.io.parquet_files import AFTER_FOOTER, is_signed, open_parquet, read_footer
from gristmill.io.text_records import BadRecord

_BATCH_ROWS = 1024
_BATCH_BYTES = 4 << 20  # of a batch, on average: Python's strings take up to four times that
_BUFFER_BYTES = 1 << 20  # read at a time of a column; without a buffer Arrow reads all of a row group's
_PROBED_ROWS = 16
_MEMORY_A_BYTE = 3  # bytes of memory for a byte of a column's dictionary: Arrow's copies of it, and its page
_STREAM_ENDS = (b"\xff\xff\xff\xff\0\0\0\0", b"\0\0\0\0")  # the second is that of Arrow before 0.15
_BYTES = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}


def parquet_batches(path: Path, start: int, end: int | None) -> Iterator[pa.Schema | pa.RecordBatch]:
    """Yield the schema, then small batches of the row groups from `start` up to `end`; None is the end of the file.

    Raises ArrowException or OSError for a damaged file, InputError for an encrypted one, UsageError for a row group
    that needs too much memory.
    """
    with open_parquet(path, _BUFFER_BYTES) as file:
        yield file.schema_arrow
        metadata = file.metadata
        if start == 0:
            rows = sum(metadata.row_group(number).num_rows for number in range(metadata.num_row_groups))
            if rows != metadata.num_rows:
                raise pa.ArrowInvalid(f"its row groups do not have its {metadata.num_rows:,} rows")
        if end is None:
            end = metadata.num_row_groups
        for number in range(start, end):
            yield from _row_group_batches(file, number, str(path))


def _row_group_batches(file: pa.parquet.ParquetFile, number: int, path: str) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a row group, and hold the memory of its dictionaries and of large values."""
    name = f"{path} row group {number}"
    group = file.metadata.row_group(number)
    dictionaries = sum(_dictionary_bytes(group.column(i)) for i in range(group.num_columns))
    with reserve_memory(dictionaries * _MEMORY_A_BYTE, name):
        rows = _batch_rows(group.num_rows, group.total_byte_size)
        if dictionaries * rows > 4 * _BATCH_BYTES:  # a few values, repeated, are larger than what is stored of them
            probe = next(file.iter_batches(min(rows, _PROBED_ROWS), [number], use_threads=False), None)
            if probe:
                rows = min(rows, _batch_rows(probe.num_rows, probe.nbytes))
            del probe
        missing = group.num_rows
        for batch in file.iter_batches(rows, [number], use_threads=False):
            missing -= batch.num_rows
            bytes_a_row = batch.nbytes // max(batch.num_rows, 1)
            with reserve_memory(batch.nbytes + 3 * bytes_a_row, name):
                yield from _small_batches(batch)
                del batch
        if missing:  # Arrow ends a row group with its shortest column
            raise pa.ArrowInvalid(f"row group {number} lacks {missing:,} rows")
        pa.default_memory_pool().release_unused()


def _dictionary_bytes(column: pa.parquet.ColumnChunkMetaData) -> int:
    """Return about how many bytes the distinct values of a column of a row group take, if it has a page of them."""
    start = column.dictionary_page_offset
    if not start:
        return 0
    stored = max(column.data_page_offset - start, 0)
    ratio = column.total_uncompressed_size / max(column.total_compressed_size, 1)
    return min(int(stored * ratio), column.total_uncompressed_size)


def ipc_batches(path: Path) -> Iterator[pa.Schema | pa.RecordBatch]:
    """Yield the schema, then small batches of an Arrow IPC stream (as Hugging Face datasets saves) or an IPC file.

    Raises ArrowException for a stream without an end, whose last batches may be lost, and for damaged batches.
    """
    with pa.memory_map(str(path)) as stored:
        try:
            reader = pa.ipc.open_stream(stored)
        except pa.ArrowInvalid:
            file = pa.ipc.open_file(stored)
            yield file.schema
            batches: Iterator[pa.RecordBatch] = map(file.get_batch, range(file.num_record_batches))
        else:
            yield reader.schema
            batches = _stream_batches(reader, stored)
        for batch in batches:
            _check(batch)
            yield from _small_batches(batch)


def _stream_batches(reader: pa.RecordBatchReader, stored: pa.MemoryMappedFile) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a stream. Arrow takes one that is cut between two messages for a whole one."""
    end = stored.tell()
    for batch in reader:
        yield batch
        end = stored.tell()
    size = stored.size()
    stored.seek(end)
    if stored.read(min(size - end, 9)) not in _STREAM_ENDS:
        raise pa.ArrowInvalid("the file is truncated, or has data after the end of its stream")


def _check(batch: pa.RecordBatch) -> None:
    """Raise ArrowInvalid if reading a value would leave its buffer. Invalid UTF-8 is left to the record it is in."""
    batch.validate()
    for column in batch.columns:
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:
            kind = _as_bytes(column.type)
            if kind == column.type:
                raise
            column.view(kind).validate(full=True)


def _as_bytes(kind: pa.DataType) -> pa.DataType:
    """Return the type with bytes in place of strings, also within dictionaries, lists, maps and structs."""
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _as_bytes(kind.value_type), kind.ordered)
    if pa.types.is_list(kind):
        return pa.list_(_as_bytes(kind.value_type))
    if pa.types.is_large_list(kind):
        return pa.large_list(_as_bytes(kind.value_type))
    if pa.types.is_map(kind):
        return pa.map_(_as_bytes(kind.key_type), _as_bytes(kind.item_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_as_bytes(field.type)) for field in fields_of(kind)])
    return _BYTES.get(kind, kind)


def damaged_table(path: Path, after: str, error: Exception) -> InputError:
    """Return the error for a file that Arrow cannot read; a DamagedFile if not only memory was lacking."""
    number = getattr(error, "errno", None)
    hint = LIMIT_HINTS.get(number or 0)
    if hint:
        return InputError(f"cannot read {path}: {hint}")
    with suppress(OSError), path.open("rb") as file:
        reject_stand_in(path, file.read(FIRST))
    kind = path.suffix.removeprefix(".")
    detail = f"not a readable .{kind} file{after} ({error}). Fetch it again, or remove it to continue without it."
    if isinstance(error, MemoryError) or number is not None:
        return InputError(f"{path}: {detail}")
    return DamagedFile(path, f"unreadable {kind}", detail)


def _batch_rows(rows: int, size: int) -> int:
    return max(1, min(_BATCH_ROWS, rows * _BATCH_BYTES // max(size, 1)))


def _small_batches(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    rows = _batch_rows(batch.num_rows, batch.nbytes)
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)


def row_group_cuts(path: Path, size: int, slice_bytes: int) -> list[SliceStart]:
    """Return first row group, its first row, and the bytes of each slice of about `slice_bytes` of a file.

    A slice reads its row groups and the footer; the whole file of `size` bytes, if row groups are not in their order.
    """
    try:
        metadata = read_footer(path)
        may_be_encrypted = is_signed(path, metadata)
    except (pa.ArrowException, OSError) as error:
        raise damaged_table(path, "", error) from error
    starts = [(0, 0)]
    row = 0
    size_of_slice = 0
    for group in range(metadata.num_row_groups):
        if size_of_slice >= slice_bytes:
            starts.append((group, row))
            size_of_slice = 0
        row += metadata.row_group(group).num_rows
        size_of_slice += size // metadata.num_row_groups
    if may_be_encrypted:  # then the reader of the first slice says so
        return [SliceStart(*start) for start in starts]
    offsets = [_first_byte(metadata.row_group(group)) for group, _ in starts[1:]]
    if offsets != sorted(set(offsets)):
        return [SliceStart(*start) for start in starts]
    footer = size - metadata.serialized_size - AFTER_FOOTER
    cuts = list[SliceStart]()
    for start, slice_range in zip(starts, pairwise([0, *offsets, footer]), strict=True):
        cuts.append(SliceStart(*start, merge_ranges((slice_range, (footer, None)))))
    return cuts


def _first_byte(group: pa.parquet.RowGroupMetaData) -> int:
    """Return the offset of a row group in its file."""
    offsets = list[int]()
    for i in range(group.num_columns):
        chunk = group.column(i)
        offsets.append(chunk.dictionary_page_offset or chunk.data_page_offset)
    return min(offsets)


def records(batch: pa.RecordBatch, text_column: str) -> Iterator[dict[str, Any] | BadRecord]:
    """Yield the rows of a batch as dicts; a BadRecord, with the bytes of its text, for one with invalid UTF-8."""
    try:
        yield from python_rows(batch)
    except UnicodeDecodeError:  # raised before any record is yielded: convert row by row
        for index in range(batch.num_rows):
            row = batch.slice(index, 1)
            try:
                yield from python_rows(row)
            except UnicodeDecodeError:
                raw = _raw_text(row.column(text_column)) if text_column in row.schema.names else b""
                yield BadRecord("invalid UTF-8", raw, len(raw))


def _raw_text(value: pa.Array) -> bytes:
    """Return the bytes of an array's only value; none if it is not a string."""
    if pa.types.is_dictionary(value.type):
        index = value.indices[0].as_py()
        if index is None:
            return b""
        value = value.dictionary.slice(index, 1)
    kind = value.type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        return b""
    (text,) = value.cast(pa.large_binary()).to_pylist()
    return text or b""
