"""Infinite numbers of tables, as raw JSON: encoders of JSON, which has no word for them, would write null.

They are spelled as Python's own writer and reader of JSON do, `Infinity` and `-Infinity`.
"""

import math
from functools import cache
from operator import is_
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa


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
