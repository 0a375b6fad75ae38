"""Records of .parquet and .arrow files as Python values that JSON can hold, and where a large .parquet file is cut.

Arrow's own conversion of values stops at what Python's datetime cannot hold: nanoseconds, years before 1, after 9999.
Here points in time are ISO 8601 strings (those with a time zone in UTC, with a Z), durations too (P1DT2.500000S).
A map is a list of [key, value]; an extension type is its storage. Other values are as Arrow's to_pylist gives them.
NaN is null, as tables hold it where a value is missing. Infinity and -Infinity are raw JSON, spelled as Python's own
writer does: encoders of JSON, which has no word for them, would write null.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from itertools import islice, pairwise
from operator import is_
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc
import pyarrow.parquet

from gristmill.budget import reserve_memory
from gristmill.errors import LIMIT_HINTS, DamagedFile, InputError
from gristmill.io.documents import Cut, merge_ranges
from gristmill.io.lines import FIRST, reject_stand_in
from gristmill.io.parquet_files import AFTER_FOOTER, is_signed, open_parquet, read_footer
from gristmill.io.text_records import BadRecord

_BATCH_ROWS = 1024
_BATCH_BYTES = 4 << 20  # of a batch, on average: Python's strings take up to four times that
_BUFFER_BYTES = 1 << 20  # read at a time of a column; without a buffer Arrow reads all of a row group's
_PROBED_ROWS = 16
_MEMORY_A_BYTE = 3  # bytes of memory for a byte of a column's dictionary: Arrow's copies of it, and its page
_STREAM_ENDS = (b"\xff\xff\xff\xff\0\0\0\0", b"\0\0\0\0")  # the second is that of Arrow before 0.15
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_BYTES = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}


def parquet_batches(path: Path, start: int, end: int | None) -> Iterator[pa.Schema | pa.RecordBatch]:
    """Yield the schema, then small batches of the row groups from `start` up to `end`; None is the end of the file.

    Raises ArrowException or OSError for a damaged file, InputError for an encrypted one, UsageError for a row group
    that needs too much memory.
    """
    with open_parquet(path, _BUFFER_BYTES) as file:
        yield file.schema_arrow
        metadata = file.metadata
        rows = (metadata.row_group(number).num_rows for number in range(metadata.num_row_groups))
        if start == 0 and sum(rows) != metadata.num_rows:
            raise pa.ArrowInvalid(f"its row groups do not have its {metadata.num_rows:,} rows")
        for number in range(start, metadata.num_row_groups if end is None else end):
            yield from _row_group_batches(file, number, str(path))


def _row_group_batches(file: pa.parquet.ParquetFile, number: int, path: str) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a row group, and hold the memory of its dictionaries and of large values."""
    group = file.metadata.row_group(number)
    dictionaries = sum(_dictionary_bytes(group.column(i)) for i in range(group.num_columns))
    with reserve_memory(dictionaries * _MEMORY_A_BYTE, f"{path} row group {number}"):
        rows = _batch_rows(group.num_rows, group.total_byte_size)
        missing = group.num_rows
        if dictionaries * rows > 4 * _BATCH_BYTES:  # a few values, repeated, are larger than what is stored of them
            probe = next(file.iter_batches(min(rows, _PROBED_ROWS), [number], use_threads=False), None)
            rows = min(rows, _batch_rows(probe.num_rows, probe.nbytes)) if probe else rows
            del probe
        for batch in file.iter_batches(rows, [number], use_threads=False):
            missing -= batch.num_rows
            with reserve_memory(
                batch.nbytes + 3 * batch.nbytes // max(batch.num_rows, 1), f"{path} row group {number}"
            ):
                yield from _small_batches(batch)
                del batch
        if missing:  # Arrow ends a row group with its shortest column
            raise pa.ArrowInvalid(f"row group {number} lacks {missing:,} rows")
        pa.default_memory_pool().release_unused()


def _dictionary_bytes(column: pa.parquet.ColumnChunkMetaData) -> int:
    """About how many bytes the distinct values of a column of a row group take, if it has a page of them."""
    start = column.dictionary_page_offset
    stored = column.data_page_offset - start if start else 0
    ratio = column.total_uncompressed_size / max(column.total_compressed_size, 1)
    return min(int(max(stored, 0) * ratio), column.total_uncompressed_size)


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
            found: Iterator[pa.RecordBatch] = map(file.get_batch, range(file.num_record_batches))
        else:
            yield reader.schema
            found = _stream_batches(reader, stored)
        for batch in found:
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
    """The type with bytes in place of strings, also within dictionaries, lists, maps and structs."""
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _as_bytes(kind.value_type), kind.ordered)
    if pa.types.is_list(kind):
        return pa.list_(_as_bytes(kind.value_type))
    if pa.types.is_large_list(kind):
        return pa.large_list(_as_bytes(kind.value_type))
    if pa.types.is_map(kind):
        return pa.map_(_as_bytes(kind.key_type), _as_bytes(kind.item_type))
    if pa.types.is_struct(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        return pa.struct([field.with_type(_as_bytes(field.type)) for field in fields])
    return _BYTES.get(kind, kind)


def damaged_table(path: Path, after: str, error: Exception) -> InputError:
    """The error for a file that Arrow cannot read; a DamagedFile if not only memory was lacking."""
    if hint := LIMIT_HINTS.get(getattr(error, "errno", None) or 0):
        return InputError(f"cannot read {path}: {hint}")
    with suppress(OSError), path.open("rb") as file:
        reject_stand_in(path, file.read(FIRST))
    kind = path.suffix.removeprefix(".")
    detail = f"not a readable .{kind} file{after} ({error}). Fetch it again, or remove it to continue without it."
    is_damage = not isinstance(error, MemoryError) and getattr(error, "errno", None) is None
    return DamagedFile(path, f"unreadable {kind}", detail) if is_damage else InputError(f"{path}: {detail}")


def _batch_rows(rows: int, size: int) -> int:
    return max(1, min(_BATCH_ROWS, rows * _BATCH_BYTES // max(size, 1)))


def _small_batches(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    rows = _batch_rows(batch.num_rows, batch.nbytes)
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)


def row_group_cuts(path: Path, size: int, slice_bytes: int) -> list[Cut]:
    """First row group, its first row, and the bytes of each slice of about `slice_bytes` of a file of `size` bytes.

    A slice reads its row groups and the footer; the whole file, if row groups are not in their order in it.
    """
    try:
        metadata = read_footer(path)
        may_be_encrypted = is_signed(path, metadata)
    except (pa.ArrowException, OSError) as error:
        raise damaged_table(path, "", error) from error
    starts = [(0, 0)]
    row = 0
    held = 0
    for group in range(metadata.num_row_groups):
        if held >= slice_bytes:
            starts.append((group, row))
            held = 0
        row += metadata.row_group(group).num_rows
        held += size // metadata.num_row_groups
    if may_be_encrypted:  # then the reader of the first slice says so
        return [Cut(*start) for start in starts]
    places = [_first_byte(metadata.row_group(group)) for group, _ in starts[1:]]
    if places != sorted(set(places)):
        return [Cut(*start) for start in starts]
    footer = size - metadata.serialized_size - AFTER_FOOTER
    ranges = pairwise([0, *places, footer])
    return [Cut(*start, merge_ranges((own, (footer, None)))) for start, own in zip(starts, ranges, strict=True)]


def _first_byte(group: pa.parquet.RowGroupMetaData) -> int:
    chunks = (group.column(i) for i in range(group.num_columns))
    return min(chunk.dictionary_page_offset or chunk.data_page_offset for chunk in chunks)


def records(batch: pa.RecordBatch, text_column: str) -> Iterator[dict[str, Any] | BadRecord]:
    """Yield the rows of a batch as dicts; a BadRecord, with the bytes of its text, for one with invalid UTF-8."""
    try:
        yield from _rows(batch)
    except UnicodeDecodeError:  # raised before any record is yielded: convert row by row
        for index in range(batch.num_rows):
            row = batch.slice(index, 1)
            try:
                yield from _rows(row)
            except UnicodeDecodeError:
                raw = _raw_text(row.column(text_column)) if text_column in row.schema.names else b""
                yield BadRecord("invalid UTF-8", raw, len(raw))


def _raw_text(value: pa.Array) -> bytes:
    """The bytes of an array's only value; none if it is not a string."""
    if pa.types.is_dictionary(value.type):
        index = value.indices[0].as_py()
        value = value.dictionary.slice(index or 0, 0 if index is None else 1)
    kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    is_string = any(is_kind(value.type) for is_kind in kinds)
    return next(iter(value.cast(pa.large_binary()).to_pylist()), None) or b"" if is_string else b""


def _rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    infinite = [has_infinity(column) for column in batch.columns]
    if all(_is_plain(field.type) for field in batch.schema) and not any(infinite):
        return batch.to_pylist()
    columns = [to_python(column) for column in batch.columns]
    columns = [[*map(keep_infinity, found)] if it else found for it, found in zip(infinite, columns, strict=True)]
    return [dict(zip(batch.schema.names, values, strict=True)) for values in zip(*columns, strict=True)]


def has_infinity(array: pa.Array) -> bool:
    """Whether a number in an array may be infinite, at any depth; what is behind nulls counts, too."""
    kind = array.type
    if pa.types.is_floating(kind):
        return len(array) > 0 and bool(np.isinf(array.to_numpy(zero_copy_only=False)).any())
    return _holds_floats(kind) and any(map(has_infinity, _children(array)))


@cache
def _holds_floats(kind: pa.DataType) -> bool:
    """Whether values of a type hold floating-point numbers, at any depth."""
    if isinstance(kind, pa.BaseExtensionType):
        return _holds_floats(kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return _holds_floats(kind.value_type)
    return pa.types.is_floating(kind) or any(_holds_floats(kind.field(i).type) for i in range(kind.num_fields))


def _children(array: pa.Array) -> list[pa.Array]:
    """The arrays that hold the values of a nested, dictionary, run-end encoded or extension array."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return [array.storage]
    if pa.types.is_dictionary(kind):
        return [array.dictionary]
    if pa.types.is_run_end_encoded(kind):
        return [array.values]
    if pa.types.is_map(kind):
        return [array.keys, array.items]
    if pa.types.is_struct(kind) or pa.types.is_union(kind):
        return [array.field(i) for i in range(kind.num_fields)]
    return [array.flatten()]  # of a list


def keep_infinity(value: Any) -> Any:
    """A value that JSON can hold; as raw JSON if a number in it is infinite, at any depth.

    >>> bytes(keep_infinity([1.5, {"x": float("-inf")}])), keep_infinity([1.5])
    (b'[1.5,{"x":-Infinity}]', [1.5])
    """
    kept = _spell(value)
    return value if kept is value else msgspec.Raw(msgspec.json.encode(kept, enc_hook=str))


def _spell(value: Any) -> Any:
    """The value itself, or a copy in which infinite numbers are raw JSON."""
    if isinstance(value, float):
        return msgspec.Raw(b"Infinity" if value > 0 else b"-Infinity") if math.isinf(value) else value
    if isinstance(value, list):
        items = [*map(_spell, value)]
        return value if all(map(is_, items, value)) else items
    if isinstance(value, dict):
        items = [*map(_spell, value.values())]
        return value if all(map(is_, items, value.values())) else dict(zip(value, items, strict=True))
    return value


def to_python(array: pa.Array) -> list[Any]:
    """The values of an array as Python values that JSON can hold. Raises UnicodeDecodeError for invalid UTF-8.

    >>> to_python(pa.array([[1], None], pa.list_(pa.timestamp("ns"))))
    [['1970-01-01T00:00:00.000000001'], None]
    """
    convert = None if _is_plain(array.type) else _conversion(array.type)
    return convert(array) if convert else array.to_pylist()


@cache
def _is_plain(kind: pa.DataType) -> bool:
    """Whether Arrow's to_pylist, which is faster, gives all values of a type as JSON can hold them."""
    if pa.types.is_struct(kind):
        return all(_is_plain(kind.field(i).type) for i in range(kind.num_fields))
    return _is_plain(kind.value_type) if _is_list(kind) else _conversion(kind) is None


def _conversion(kind: pa.DataType) -> Callable[[Any], list[Any]] | None:
    return next((convert for is_type, convert in _CONVERSIONS if is_type(kind)), None)


def _is_list(kind: pa.DataType) -> bool:
    is_view = pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind)
    return is_view or pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _from_extension(array: pa.ExtensionArray) -> list[Any]:
    is_scalar = isinstance(array.type, pa.UuidType | pa.Bool8Type)  # whose storage says less
    return array.to_pylist() if is_scalar else to_python(array.storage)


def _from_dictionary(array: pa.DictionaryArray) -> list[Any]:
    indices = array.indices.to_pylist()
    dictionary = array.dictionary
    used = {*indices} - {None}  # other values may be many, or invalid UTF-8
    values = {index: to_python(dictionary.slice(index, 1))[0] for index in used}
    return [values.get(index) for index in indices]


def _from_list(array: pa.Array) -> list[Any]:
    items = iter(to_python(array.flatten()))
    lengths = pc.list_value_length(array).to_pylist()
    return [None if length is None else [*islice(items, length)] for length in lengths]


def _from_map(array: pa.MapArray) -> list[Any]:
    ends = array.offsets.to_pylist()
    is_valid = array.is_valid().to_pylist()
    keys, values = (to_python(found[ends[0] : ends[-1]]) for found in (array.keys, array.items))
    pairs = iter([key, value] for key, value in zip(keys, values, strict=True))
    lists = [[*islice(pairs, end - start)] for start, end in pairwise(ends)]
    return [found if ok else None for found, ok in zip(lists, is_valid, strict=True)]


def _from_struct(array: pa.StructArray) -> list[Any]:
    names = [array.type.field(i).name for i in range(array.type.num_fields)]
    if len({*names}) < len(names):  # as Arrow's own conversion does
        raise ValueError(f"a struct has several fields of one name: {', '.join(names)}")
    columns = [to_python(array.field(i)) for i in range(len(names))]
    rows = zip(*columns, strict=True) if columns else ((),) * len(array)
    return [
        None if is_null else dict(zip(names, values, strict=True))
        for values, is_null in zip(rows, array.is_null().to_pylist(), strict=True)
    ]


def _from_union(array: pa.UnionArray) -> list[Any]:
    children = {code: to_python(array.field(i)) for i, code in enumerate(array.type.type_codes)}
    stop = array.offset + len(array)  # Arrow's own type_codes and offsets are those of the array before it was sliced
    codes = np.frombuffer(array.buffers()[1], np.int8, stop)[array.offset :].tolist() if len(array) else []
    places = list(range(len(array)))
    if array.type.mode == "dense" and places:
        places = np.frombuffer(array.buffers()[2], np.int32, stop)[array.offset :].tolist()
    return [children[code][place] for code, place in zip(codes, places, strict=True)]


def _from_timestamp(array: pa.Array) -> list[Any]:
    zone = "Z" if array.type.tz else ""
    return _moments(array, array.type.unit, lambda text: _with_fraction(text) + zone)


def _from_date(array: pa.Array) -> list[Any]:
    unit = "D" if pa.types.is_date32(array.type) else "ms"
    return _moments(array, unit, lambda text: text.partition("T")[0])


def _from_time(array: pa.Array) -> list[Any]:
    return _moments(array, array.type.unit, lambda text: _with_fraction(text.partition("T")[2]))


def _moments(array: pa.Array, unit: str, write: Callable[[str], str]) -> list[Any]:
    """Write integers since 1970 in ISO 8601, by NumPy, whose years are not limited."""
    texts = np.datetime_as_string(np.array(_integers(array), "i8").view(f"M8[{unit}]")).tolist()
    return [write(text) if ok else None for text, ok in zip(texts, array.is_valid().to_pylist(), strict=True)]


def _with_fraction(text: str) -> str:
    """The point in time with no, 6 or, if it needs them, 9 digits of its second."""
    moment, _, fraction = text.partition(".")
    fraction = fraction.ljust(6, "0")
    fraction = fraction[:6] if not fraction[6:].strip("0") else fraction
    return f"{moment}.{fraction}" if fraction.strip("0") else moment


def _from_duration(array: pa.Array) -> list[Any]:
    unit = array.type.unit
    values = zip(_integers(array), array.is_valid().to_pylist(), strict=True)
    return [_duration(value, _PER_SECOND[unit]) if is_valid else None for value, is_valid in values]


def _duration(value: int, per_second: int) -> str:
    seconds, fraction = divmod(abs(value), per_second)
    days, seconds = divmod(seconds, 86_400)
    digits = f".{fraction:0{len(str(per_second)) - 1}}" if fraction else ""
    rest = f"T{_with_fraction(f'{seconds}{digits}')}S" if seconds or fraction else ""
    return f"{'-' if value < 0 else ''}P{f'{days}D' if days or not rest else ''}{rest}"


def _integers(array: pa.Array) -> list[int]:
    """The integers that the times of an array are stored as; 0 for a null."""
    width = pa.int32() if array.type.bit_width == 32 else pa.int64()
    return array.view(width).fill_null(0).to_pylist()


_types = pa.types
_CONVERSIONS: tuple[tuple[Callable[[pa.DataType], bool], Callable[[Any], list[Any]]], ...] = (
    (lambda kind: isinstance(kind, pa.BaseExtensionType), _from_extension),
    (_types.is_dictionary, _from_dictionary),
    (_types.is_run_end_encoded, lambda array: to_python(pc.run_end_decode(array))),
    (_types.is_struct, _from_struct),
    (_types.is_map, _from_map),
    (_types.is_union, _from_union),
    (_is_list, _from_list),
    (_types.is_timestamp, _from_timestamp),
    (_types.is_date, _from_date),
    (_types.is_time, _from_time),
    (_types.is_duration, _from_duration),
    (_types.is_float16, lambda array: array.cast(pa.float32()).to_pylist()),
)
