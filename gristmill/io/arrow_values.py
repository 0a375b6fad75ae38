"""Records of an Arrow batch as Python values that JSON can hold, for every Arrow type and every value of it.

Arrow's own conversion stops at what Python's datetime cannot hold: nanoseconds, years before 1 and after 9999.
Here points in time are ISO 8601 strings (those with a time zone in UTC, with a Z), durations too (P1DT2.500000S).
A map is a list of [key, value]; an extension type is its storage. Other values are as Arrow's to_pylist gives them.
NaN is null, as tables hold it where a value is missing. Infinity and -Infinity are raw JSON, spelled as Python's own
writer does: encoders of JSON, which has no word for them, would write null.
"""

import math
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from operator import is_
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.io.text_records import BadRecord

_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


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
                raw = _raw_text(row.column(text_column))
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
    indices, dictionary = array.indices.to_pylist(), array.dictionary
    used = {*indices} - {None}  # other values may be many, or invalid UTF-8
    values = {index: to_python(dictionary.slice(index, 1))[0] for index in used}
    return [values.get(index) for index in indices]


def _from_list(array: pa.Array) -> list[Any]:
    spans, values = _spans(array), array.values
    low, high = _extent(spans)
    items = to_python(values.slice(low, high - low))
    return [None if span is None else items[span[0] - low : span[1] - low] for span in spans]


def _from_map(array: pa.MapArray) -> list[Any]:
    spans = _spans(array)
    low, high = _extent(spans)
    keys, values = (to_python(child.slice(low, high - low)) for child in (array.keys, array.items))
    pairs = [[key, value] for key, value in zip(keys, values, strict=True)]
    return [None if span is None else pairs[span[0] - low : span[1] - low] for span in spans]


def _spans(array: pa.Array) -> list[tuple[int, int] | None]:
    """Where the values of each list start and end in the array of all values; None for a null."""
    if pa.types.is_fixed_size_list(array.type):
        size = array.type.list_size
        spans = [((array.offset + i) * size, (array.offset + i + 1) * size) for i in range(len(array))]
    elif pa.types.is_list_view(array.type) or pa.types.is_large_list_view(array.type):
        sizes = zip(array.offsets.to_pylist(), array.sizes.to_pylist(), strict=True)
        spans = [(start, start + size) for start, size in sizes]
    else:
        spans = list(pairwise(array.offsets.to_pylist()))
    return [span if is_valid else None for span, is_valid in zip(spans, array.is_valid().to_pylist(), strict=True)]


def _extent(spans: list[tuple[int, int] | None]) -> tuple[int, int]:
    found = [span for span in spans if span is not None and span[0] < span[1]]
    return min((start for start, _ in found), default=0), max((end for _, end in found), default=0)


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


def _from_float16(array: pa.Array) -> list[Any]:
    values = array.to_numpy(zero_copy_only=False).astype(float).tolist()
    return [value if is_valid else None for value, is_valid in zip(values, array.is_valid().to_pylist(), strict=True)]


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
    (_types.is_float16, _from_float16),
)
