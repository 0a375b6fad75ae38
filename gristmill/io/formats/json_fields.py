"""Fields of a line of JSON, each kept as raw JSON, so that it is written back byte for byte.

A record is what Python's json module takes for one: with NaN and Infinity, integers of any length and lone
surrogates in fields other than the text. Of fields with the same name the last one counts, as in that module.
"""

import codecs
import json
import re
from pathlib import Path
from typing import Any

import msgspec

from gristmill.errors import InputError
from gristmill.io.formats.malformed import Malformed
from gristmill.io.formats.nesting import MAX_NESTING, is_too_deep

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_STRING = msgspec.json.Decoder(str)
_BRACKETS = b"[{"
_PIECE = 1 << 20  # bytes of a line that are checked together
_SEVERAL = "several JSON values on a line", "wanted one object a line, and \\n after each"
_SPACE = re.compile(r"[ \t\n\r]*")


def parse_fields(line: bytes) -> dict[str, Any]:
    """The fields of a line of JSON as raw JSON (msgspec.Raw), in their order. Raises Malformed.

    >>> {name: bytes(value) for name, value in parse_fields(b'{"text": "a", "x": [NaN, 1.0]}').items()}
    {'text': b'"a"', 'x': b'[NaN, 1.0]'}
    """
    if not _is_utf8(line):
        raise Malformed("invalid UTF-8")
    try:
        fields = _FIELDS.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:  # msgspec is strict
        _reject_deep(line, MAX_NESTING)
        if isinstance(error, RecursionError):
            raise
        return _split_fields(line.decode())
    _reject_deep_values(line, fields)
    return fields


def _reject_deep_values(line: bytes, fields: dict[str, Any]) -> None:
    """Raise Malformed if a record is nested too deeply; strings, as texts are, and short values are not looked at."""
    rest = len(line)
    for value in fields.values():
        view = memoryview(value)
        rest -= len(view)
        if len(view) > MAX_NESTING and view[0] in _BRACKETS:
            _reject_deep(bytes(view), MAX_NESTING - 1)
    if rest > MAX_NESTING:  # of two fields of a name only the last is in `fields`
        _reject_deep(line, MAX_NESTING)


def _reject_deep(content: bytes, levels: int) -> None:
    if is_too_deep(content, levels):
        raise Malformed("nested too deeply", f"more than {MAX_NESTING} levels")


def _is_utf8(line: bytes) -> bool:
    """Whether a line is UTF-8; a long one is not decoded whole, which may take four times its memory."""
    if line.isascii():
        return True
    view = memoryview(line)
    try:
        if len(line) <= _PIECE:
            line.decode()
            return True
        decoder = codecs.getincrementaldecoder("utf-8")()
        for start in range(0, len(line), _PIECE):
            decoder.decode(view[start : start + _PIECE])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def decode_string(raw: msgspec.Raw, name: str) -> str:
    """Decode the raw string of the field `name`. Raises Malformed if it is no string, or not Unicode text."""
    try:
        return _STRING.decode(raw)
    except msgspec.DecodeError:
        content = bytes(raw)
    if content.startswith(b'"'):
        raise Malformed("lone surrogate")
    raise Malformed(f"{name} is null" if content == b"null" else f"{name} is not a string")


def decode_value(raw: msgspec.Raw) -> Any:
    """Decode the raw JSON of any field; integers of over 4,300 digits, which Python refuses, become floats."""
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return json.loads(bytes(raw), parse_int=_to_number)


def _to_number(digits: str) -> int | float:
    return int(digits) if len(digits) < 4000 else float(digits)


def _skip(_: str) -> None:
    return None


_SPANS = json.JSONDecoder(parse_int=_skip, parse_float=_skip, parse_constant=_skip)  # only the ends of values are used


def _split_fields(text: str) -> dict[str, Any]:
    """Split a record into its fields with Python's parser, which is lenient and slower."""
    start = _space(text, 0)
    try:
        if text[start : start + 1] != "{":
            _SPANS.decode(text)
            raise _no_object(text[start : start + 1])
        fields, end = _fields_from(text, start + 1)
        if (end := _space(text, end)) == len(text):
            return fields
    except UnicodeEncodeError:
        raise Malformed("lone surrogate") from None
    except ValueError:
        raise Malformed("broken JSON") from None
    raise Malformed(*_SEVERAL) if text.startswith("{", end) else Malformed("broken JSON")


def _no_object(start: str) -> Malformed:
    return Malformed("a JSON array", "wanted one object a line") if start == "[" else Malformed("not an object")


def _fields_from(text: str, at: int) -> tuple[dict[str, Any], int]:
    """(fields, end) of an object whose brace is just before `at`. Raises ValueError if it is not JSON."""
    fields: dict[str, Any] = {}
    at = _space(text, at)
    while not (text.startswith("}", at) and not fields):
        start = at
        name, at = _SPANS.raw_decode(text, at)
        at = _space(text, at)
        if text[start : start + 1] != '"' or text[at : at + 1] != ":":
            raise ValueError("wanted a name and a colon")
        name.encode()  # raises UnicodeEncodeError
        at = _space(text, at + 1)
        _, end = _SPANS.raw_decode(text, at)
        fields[name] = msgspec.Raw(text[at:end].encode())
        at = _space(text, end)
        if text[at : at + 1] != ",":
            break
        at = _space(text, at + 1)
    if text[at : at + 1] != "}":
        raise ValueError("wanted a brace")
    return fields, at + 1


def _space(text: str, at: int) -> int:
    """The place of the first character from `at` that is not white space."""
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


def reject_one_value(path: Path, first_line: bytes) -> None:
    """Raise InputError if a .json file begins as one array, or one object over several lines."""
    found = {b"[": "one JSON array", b"{": "one JSON object over several lines"}
    start = b"[" if first_line.startswith(b"[") else first_line
    if start in found:
        raise InputError(
            f"{path} holds {found[start]}: wanted one record a line. If these are documents, convert it: "
            f"jq -c '.[]' {path.name} > {path.stem}.jsonl. If not, move it out of the corpus"
        )
