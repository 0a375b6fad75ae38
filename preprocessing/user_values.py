"""Values that a user's function sets in a document, as JSON can hold them."""

from typing import Any

import msgspec
import numpy as np

from gristmill.io.formats.infinite_numbers import keep_infinity


def record_line(fields: dict[str, Any]) -> bytes:
    """A record as a line of JSON. Raises TypeError for a value that has no JSON, or another one in each process.

    >>> record_line({"a": np.float32(0.5), "b": [float("inf")]})
    b'{"a":0.5,"b":[Infinity]}\\n'
    """
    return _ENCODER.encode_lines(({name: _plain(value) for name, value in fields.items()},))


def _plain(value: Any) -> Any:
    """NumPy's numbers and arrays as Python's, infinite numbers as raw JSON; sets are refused."""
    if isinstance(value, (str, msgspec.Raw)):
        return value
    return keep_infinity(_of_python(value))


def _of_python(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        raise TypeError("a set has no order of its own; give a sorted list")
    if isinstance(value, (np.generic, np.ndarray)):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [*map(_of_python, value)]
    if isinstance(value, dict):
        return {name: _of_python(each) for name, each in value.items()}
    return value


def _as_text(value: Any) -> str:
    """What tables hold and JSON does not is written as text; an object's address is no value."""
    text = str(value)
    if f"{id(value):x}" in text:
        raise TypeError(f"a {type(value).__name__} has no JSON; give text, numbers, lists or dictionaries")
    return text


_ENCODER = msgspec.json.Encoder(enc_hook=_as_text)
