"""Values that a user's function sets in a document, as JSON can hold them and the next stage reads them."""

import math
from dataclasses import fields as fields_of
from dataclasses import is_dataclass
from typing import Any

import msgspec
import numpy as np

from gristmill.io.formats.infinite_numbers import keep_infinity
from gristmill.io.formats.json_fields import parse_fields
from gristmill.io.formats.malformed import Malformed
from gristmill.io.formats.nesting import MAX_NESTING, is_too_deep

_TOO_DEEP = "lists and dictionaries lie more than {} deep in one another, or one in itself: no stage reads that"


def record_line(fields: dict[str, Any]) -> bytes:
    """A record as a line of JSON.

    Raises TypeError for a value that has no JSON, or another one in each process, ValueError for one that no stage
    would read as it was given.

    >>> record_line({"a": np.float32(0.5), "b": [float("inf")]})
    b'{"a":0.5,"b":[Infinity]}\\n'
    """
    _reject_equal_names(fields)
    try:
        line = _ENCODER.encode_lines(({name: _plain(value) for name, value in fields.items()},))
    except RecursionError as error:
        raise ValueError(_TOO_DEEP.format(MAX_NESTING)) from error
    is_new = any(not isinstance(value, (str, msgspec.Raw)) for value in fields.values())  # the reader looks at others
    if is_new and is_too_deep(line):
        raise ValueError(_TOO_DEEP.format(MAX_NESTING))
    return line


def _plain(value: Any) -> Any:
    """NumPy's numbers and arrays as Python's, infinite numbers as raw JSON; sets are refused."""
    if isinstance(value, str):
        return value
    return keep_infinity(_of_python(value))


def _of_python(value: Any) -> Any:
    if isinstance(value, msgspec.Raw):
        return _one_value(value)
    if isinstance(value, (set, frozenset)):
        raise TypeError("a set has no order of its own; give a sorted list")
    if isinstance(value, float) and math.isnan(value):
        return msgspec.Raw(b"NaN")
    if isinstance(value, (np.generic, np.ndarray)):
        return _of_python(value.tolist())
    if isinstance(value, (list, tuple)):
        return [*map(_of_python, value)]
    if isinstance(value, dict):
        _reject_equal_names(value)
        return {name: _of_python(each) for name, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _of_python(getattr(value, field.name)) for field in fields_of(value)}
    return value


def _one_value(raw: msgspec.Raw) -> msgspec.Raw:
    """Raw JSON in one line. ValueError if it is not one value: it would be several fields, or records."""
    content = bytes(raw).strip()
    try:
        found = parse_fields(b'{"a":%b}' % content)
    except Malformed as error:
        raise ValueError(f"raw JSON that no stage would read: {error}; give a Python value") from error
    if [(name, bytes(value)) for name, value in found.items()] != [("a", content)]:
        raise ValueError("raw JSON of more than one value; give a Python value")
    return msgspec.Raw(content.translate(_ONE_LINE))


def _reject_equal_names(value: dict[Any, Any]) -> None:
    """Raise ValueError if two keys have one name in JSON, as 1 and "1" have: the next stage would read one of them."""
    if all(isinstance(name, str) for name in value):
        return
    names = [next(iter(msgspec.json.decode(msgspec.json.encode({name: 0})))) for name in value]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"a dictionary has two keys that are {twice!r} in JSON; give each another name")


def _as_text(value: Any) -> str:
    """What tables hold and JSON does not is written as text; an object's address is no value."""
    text = str(value)
    if f"{id(value):x}" in text:
        raise TypeError(f"a {type(value).__name__} has no JSON; give text, numbers, lists or dictionaries")
    return text


_ONE_LINE = bytes.maketrans(b"\r\n", b"  ")  # white space, as a line's end cannot be in a string of JSON
_ENCODER = msgspec.json.Encoder(enc_hook=_as_text)
