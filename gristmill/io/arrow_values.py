"""Values of Arrow arrays as Python values that JSON can hold.

Arrow's own conversion of values stops at what Python's datetime cannot hold: nanoseconds, years before 1, after 9999.
Here points in time are ISO 8601 strings (in UTC, with a Z, if they have a time zone), durations too (P1DT2.500000S).
A map is a list of [key, value]; an extension type is its storage. Other values are as Arrow's to_pylist gives them.
NaN is null, as tables hold it where a value is missing. Infinity and -Infinity are raw JSON, spelled as Python's own
writer does: encoders of JSON, which has no word for them, would write null.
"""

import math
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice, pairwise
from operator import is_
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def fields_of(kind: pa.DataType) -> list[pa.Field]:
    """Return the fields of a nested type."""
    return [kind.field(i) for i in range(kind.num_fields)]


def python_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return the rows of a batch. Raises UnicodeDecodeError for invalid UTF-8."""
    infinite = [has_infinity(column) for column in batch.columns]
    if all(_is_plain(field.type) for field in batch.schema) and not any(infinite):
        return batch.to_pylist()
    columns = list[list[Any]]()
    for column, may_be_infinite in zip(batch.columns, infinite, strict=True):
        values = to_python(column)
        columns.append(list(map(keep_infinity, values)) if may_be_infinite else values)
    names = batch.schema.names
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def has_infinity(array: pa.Array) -> bool:
    """Return whether a number in an array may be infinite, at any depth; what is behind nulls counts, too."""
    kind = array.type
    if pa.types.is_floating(kind):
        return len(array) > 0 and bool(np.isinf(array.to_numpy(zero_copy_only=False)).any())
    return _holds_floats(kind) and any(map(has_infinity, _children(array)))


@cache
def _holds_floats(kind: pa.DataType) -> bool:
    """Return whether values of a type hold floating-point numbers, at any depth."""
    if isinstance(kind, pa.BaseExtensionType):
        return _holds_floats(kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return _holds_floats(kind.value_type)
    return pa.types.is_floating(kind) or any(_holds_floats(field.type) for field in fields_of(kind))


def _children(array: pa.Array) -> list[pa.Array]:
    """Return the arrays that hold the values of a nested, dictionary, run-end encoded or extension array."""
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
    """Return a value that JSON can hold; as raw JSON if a number in it is infinite, at any depth.

    >>> bytes(keep_infinity([1.5, {"x": float("-inf")}])), keep_infinity([1.5])
    (b'[1.5,{"x":-Infinity}]', [1.5])
    """
    spelled = _spell(value)
    if spelled is value:
        return value
    return msgspec.Raw(msgspec.json.encode(spelled, enc_hook=str))


def _spell(value: Any) -> Any:
    """Return the value itself, or a copy in which infinite numbers are raw JSON."""
    if isinstance(value, float) and math.isinf(value):
        return msgspec.Raw(b"Infinity" if value > 0 else b"-Infinity")
    if isinstance(value, list):
        items = list(map(_spell, value))
        return value if all(map(is_, items, value)) else items
    if isinstance(value, dict):
        items = list(map(_spell, value.values()))
        return value if all(map(is_, items, value.values())) else dict(zip(value, items, strict=True))
    return value


def to_python(array: pa.Array) -> list[Any]:
    """Return the values of an array as Python values that JSON can hold. Raises UnicodeDecodeError for invalid UTF-8.

    >>> to_python(pa.array([[1], None], pa.list_(pa.timestamp("ns"))))
    [['1970-01-01T00:00:00.000000001'], None]
    """
    convert = None if _is_plain(array.type) else _conversion(array.type)
    return convert(array) if convert else array.to_pylist()


@cache
def _is_plain(kind: pa.DataType) -> bool:
    """Return whether Arrow's to_pylist, which is faster, gives all values of a type as JSON can hold them."""
    if pa.types.is_struct(kind):
        return all(_is_plain(field.type) for field in fields_of(kind))
    if _is_list(kind):
        return _is_plain(kind.value_type)
    return _conversion(kind) is None


def _conversion(kind: pa.DataType) -> Callable[[Any], list[Any]] | None:
    """Return the function that converts arrays of a type; None if Arrow's to_pylist does."""
    for is_type, convert in _CONVERSIONS:
        if is_type(kind):
            return convert
    return None


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
    lists = list[list[Any] | None]()
    for length in pc.list_value_length(array).to_pylist():
        lists.append(None if length is None else list(islice(items, length)))
    return lists


def _from_map(array: pa.MapArray) -> list[Any]:
    ends = array.offsets.to_pylist()
    first = ends[0]
    keys = to_python(array.keys[first : ends[-1]])
    values = to_python(array.items[first : ends[-1]])
    pairs = [[key, value] for key, value in zip(keys, values, strict=True)]
    lists = list[list[Any] | None]()
    for (start, end), is_valid in zip(pairwise(ends), array.is_valid().to_pylist(), strict=True):
        lists.append(pairs[start - first : end - first] if is_valid else None)
    return lists


def _from_struct(array: pa.StructArray) -> list[Any]:
    names = [field.name for field in fields_of(array.type)]
    if len({*names}) < len(names):  # as Arrow's own conversion does
        raise ValueError(f"a struct has several fields of one name: {', '.join(names)}")
    columns = [to_python(array.field(i)) for i in range(len(names))]
    rows = zip(*columns, strict=True) if columns else ((),) * len(array)
    structs = list[dict[str, Any] | None]()
    for values, is_null in zip(rows, array.is_null().to_pylist(), strict=True):
        structs.append(None if is_null else dict(zip(names, values, strict=True)))
    return structs


def _from_union(array: pa.UnionArray) -> list[Any]:
    if not len(array):
        return []
    children = {code: to_python(array.field(i)) for i, code in enumerate(array.type.type_codes)}
    stop = array.offset + len(array)  # Arrow's own type_codes and offsets belong to the array before it was sliced
    codes = np.frombuffer(array.buffers()[1], np.int8, stop)[array.offset :].tolist()
    positions = list(range(len(array)))
    if array.type.mode == "dense":
        positions = np.frombuffer(array.buffers()[2], np.int32, stop)[array.offset :].tolist()
    return [children[code][position] for code, position in zip(codes, positions, strict=True)]


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
    moments = np.array(_integers(array), "i8").view(f"M8[{unit}]")
    texts = np.datetime_as_string(moments).tolist()
    return [write(text) if is_valid else None for text, is_valid in _with_validity(texts, array)]


def _with_validity(values: list[Any], array: pa.Array) -> Iterator[tuple[Any, bool]]:
    return zip(values, array.is_valid().to_pylist(), strict=True)


def _with_fraction(text: str) -> str:
    """Return the point in time with no, 6 or, if it needs them, 9 digits of its second."""
    moment, _, fraction = text.partition(".")
    fraction = fraction.ljust(6, "0")
    if not fraction[6:].strip("0"):
        fraction = fraction[:6]
    return f"{moment}.{fraction}" if fraction.strip("0") else moment


def _from_duration(array: pa.Array) -> list[Any]:
    per_second = _PER_SECOND[array.type.unit]
    values = _with_validity(_integers(array), array)
    return [_duration(value, per_second) if is_valid else None for value, is_valid in values]


def _duration(value: int, per_second: int) -> str:
    """Return a duration in ISO 8601.

    >>> _duration(-90_061_500, 1000), _duration(0, 1000)
    ('-P1DT3661.500000S', 'P0D')
    """
    seconds, fraction = divmod(abs(value), per_second)
    days, seconds = divmod(seconds, 86_400)
    text = "-P" if value < 0 else "P"
    has_time = bool(seconds or fraction)
    if days or not has_time:
        text += f"{days}D"
    if fraction:
        digits = len(str(per_second)) - 1
        text += f"T{_with_fraction(f'{seconds}.{fraction:0{digits}}')}S"
    elif seconds:
        text += f"T{seconds}S"
    return text


def _integers(array: pa.Array) -> list[int]:
    """Return the integers that the times of an array are stored as; 0 for a null."""
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
