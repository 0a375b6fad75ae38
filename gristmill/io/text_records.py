"""Records of text files: the fields of a line of JSON, and the rows of .csv and .tsv files.

A line's fields are kept as raw JSON, so that they are written back byte for byte. A record is what Python's json module
takes for one: with NaN and Infinity, integers of any length and lone surrogates in fields other than the text. Of
fields with the same name the last one counts, as in that module. A .csv has a header with the names of the columns,
then a record a row, quoted as Excel does.
"""

import codecs
import csv
import json
import re
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from gristmill.counts import NO_FIELD
from gristmill.errors import InputError

csv.field_size_limit(1 << 30)  # Python's own limit, 128 KiB, is too small for documents
CsvError = csv.Error
_KEPT = 1024  # characters of a malformed row
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_STRING = msgspec.json.Decoder(str)
_PIECE = 1 << 20  # bytes of a line that are checked together
BROKEN = "broken JSON"
_SEVERAL = "several JSON values on a line", "expected one object per line, and \\n after each"
_NAMED = re.compile(r"\{([^{}]+)\}")
_SPACE = re.compile(r"[ \t\n\r]*")


class Malformed(Exception):
    """A record is not a document. `reason` is one of a few, to count by; `detail` is about this record."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}{detail and ', ' + detail}")
        self.reason = reason


class BadRecord(NamedTuple):
    """A record that cannot be read: why, the beginning of its bytes, their number, and its line."""

    reason: str
    raw: bytes
    size: int
    line: int | None = None


def line_of(record: object, row: int) -> int:
    """Return the line of a record in its file, counted from 1; of a table, its row."""
    return (record.line if isinstance(record, BadRecord) else None) or row + 1


def parse_fields(line: bytes) -> dict[str, Any]:
    """Return the fields of a line of JSON as raw JSON (msgspec.Raw), in their order. Raises Malformed.

    >>> {name: bytes(value) for name, value in parse_fields(b'{"text": "a", "x": [NaN, 1.0]}').items()}
    {'text': b'"a"', 'x': b'[NaN, 1.0]'}
    """
    if not _is_utf8(line):
        raise Malformed("invalid UTF-8")
    try:
        return _FIELDS.decode(line)
    except msgspec.DecodeError:  # msgspec is strict
        return _split_fields(line.decode())
    except RecursionError:
        raise _too_deep() from None


def _is_utf8(line: bytes) -> bool:
    """Return whether a line is UTF-8; a long one is not decoded whole, which may take four times its memory."""
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
    if content == b"null":
        raise Malformed(f"{name} is null")
    raise Malformed(f"{name} is not a string")


def decode_text(line: bytes, column: str) -> str | None:
    """Return the text of a line of JSON without its other fields, in half the time; None where parse_fields must say.

    >>> decode_text(b'{"text": "a", "x": [1.0]}', "text")
    'a'
    """
    try:
        text: str = _text_decoder(column).decode(line).text
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return text


@cache
def _text_decoder(column: str) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(msgspec.defstruct("Record", [("text", str)], rename={"text": column}))


def decode_value(raw: msgspec.Raw) -> Any:
    """Decode the raw JSON of any field; integers of over 4,300 digits, which Python refuses, become floats."""
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return json.loads(bytes(raw), parse_int=_to_number)


def decode_bytes(content: bytes, encoding: str) -> str:
    """Return the text of bytes. Raises Malformed, which names the encoding, if they are not in it."""
    try:
        return content.decode(encoding)
    except UnicodeError:
        raise Malformed(f"invalid {'UTF-8' if encoding == 'utf-8' else encoding}") from None


def join_messages(fields: dict[str, Any], column: str, message: str) -> str:
    """Return the text of a chat: the template `message`, filled in for each of the messages, a list in `column`.

    >>> chat = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "It grinds."}]
    >>> join_messages({"messages": chat}, "messages", "<{role}> {content}\\n")
    '<user> Why?\\n<assistant> It grinds.\\n'
    """
    messages = _value_in(fields, column)
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise Malformed(f"{column} is not a list of messages")
    return "".join(take_text(one, message) for one in messages)


def take_text(fields: dict[str, Any], column: str, encoding: str = "utf-8") -> str:
    """Return the text of a field in other fields, named as `meta.text`, or of a template, `{title}\\n\\n{meta.body}`.

    A field of the whole name comes first. In a template a null is no text, a number is one, a list or an object has a
    line for each of its values, and {*} is all fields. Raises Malformed.

    >>> fields = {"title": "On mills", "meta": {"body": "They grind.", "year": 1860}}
    >>> take_text(fields, "meta.body"), take_text(fields, "{title} ({meta.year})")
    ('They grind.', 'On mills (1860)')
    """
    if _NAMED.search(column):
        text = _NAMED.sub(lambda match: _spell(_value_in(fields, match[1])), column)
    else:
        text = _value_in(fields, column)
    if isinstance(text, bytes):
        text = decode_bytes(text, encoding)
    if text is None:
        raise Malformed(f"{column} is null")
    if not isinstance(text, str):
        raise Malformed(f"{column} is not a string")
    if not _is_unicode(text):
        raise Malformed("lone surrogate")
    return text


def fields_named(column: str) -> list[str]:
    """Return the fields that a template names, or the column itself.

    >>> fields_named("meta.text"), fields_named("{title}: {body}")
    (['meta.text'], ['title', 'body'])
    """
    named = _NAMED.findall(column) or [column]
    return [name for name in named if name != "*"]


def _value_in(fields: dict[str, Any], name: str) -> Any:
    if name == "*":
        return [_value_in(fields, field) for field in fields if field != "*"]
    value: Any = fields
    parts = name.split(".")
    if name in fields:
        parts = [name]
    for part in parts:
        if not isinstance(value, dict) or part not in value:
            raise Malformed(f"{NO_FIELD} {name}", f"only {', '.join(fields) or 'no fields'}"[:200])
        value = value[part]
        try:
            if isinstance(value, msgspec.Raw):
                value = decode_value(value)
        except RecursionError:
            raise _too_deep() from None
    return value


def _spell(value: Any) -> str:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return "\n".join(map(_spell, value))
    if value is None:
        return ""
    return str(value)


def _to_number(digits: str) -> int | float:
    if len(digits) < 4000:
        return int(digits)
    return float(digits)


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
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError as error:
        raise Malformed(
            BROKEN, f"{error.msg.lower().removesuffix(' at')} at character {error.pos + 1:,} of the line"
        ) from None
    if text.startswith("{", end):
        raise Malformed(*_SEVERAL)
    raise Malformed(BROKEN, f"expected the end of the line at character {end + 1:,}")


def _too_deep() -> Malformed:
    return Malformed("nested too deeply", "arrays and objects are nested hundreds of levels deep")


def _no_object(start: str) -> Malformed:
    if start == "[":
        return Malformed("a JSON array", "expected one object per line")
    return Malformed("not an object")


def _fields_from(text: str, at: int) -> tuple[dict[str, Any], int]:
    """Return (fields, end) of an object whose brace is just before `at`. Raises JSONDecodeError."""
    fields: dict[str, Any] = {}
    at = _space(text, at)
    while not (text.startswith("}", at) and not fields):
        start = at
        name, at = _SPANS.raw_decode(text, at)
        at = _space(text, at)
        if text[start : start + 1] != '"' or text[at : at + 1] != ":":
            raise json.JSONDecodeError("expected a name and a colon", text, start)
        name.encode()  # raises UnicodeEncodeError
        at = _space(text, at + 1)
        _, end = _SPANS.raw_decode(text, at)
        fields[name] = msgspec.Raw(text[at:end].encode())
        at = _space(text, end)
        if text[at : at + 1] != ",":
            break
        at = _space(text, at + 1)
    if text[at : at + 1] != "}":
        raise json.JSONDecodeError("expected a comma or a closing brace", text, at)
    return fields, at + 1


def _space(text: str, at: int) -> int:
    """Return the place of the first character from `at` that is not white space."""
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


def reject_one_value(path: Path, first_line: bytes) -> None:
    """Raise InputError if a .json file begins as one array, or one object over several lines."""
    forms = {b"[": "one JSON array", b"{": "one JSON object over several lines"}
    start = b"[" if first_line.startswith(b"[") else first_line
    if start in forms:
        raise InputError(
            f"{path} holds {forms[start]}: expected one record per line. If these are documents, convert it: jq -c "
            f"'.[]' {path.name} > {path.stem}.jsonl. If not, move it out of the corpus"
        )


def read_csv(
    lines: Iterable[bytes], delimiter: str, encoding: str = "utf-8"
) -> tuple[list[str], Iterator[dict[str, str] | BadRecord]]:
    """Return (columns, records) of the lines of a file.

    A BadRecord for a row in another encoding, or with too few or many
    values.

    A blank line has no record, and is no header. Raises CsvError for a header that is not UTF-8 and,
    while the records are read, for quotes that do not match.

    >>> columns, records = read_csv([b"text,id", b'"a, ""b""', b'c",1'], ",")
    >>> columns, list(records)
    (['text', 'id'], [{'text': 'a, "b"\\nc', 'id': '1'}])
    """
    rest = iter(lines)
    first = next(rest, b"").removeprefix(BOM_UTF8)  # before a quote it would be a part of the name
    decoded = (line.decode(encoding, errors="surrogateescape") + "\n" for line in chain([first], rest))
    rows = csv.reader(decoded, delimiter=delimiter, strict=True)
    columns = next(filter(None, rows), [])
    if not _is_unicode("".join(columns)):
        raise CsvError(f"its header is not {encoding.upper()}")
    return columns, _records(columns, rows, delimiter, f"invalid {'UTF-8' if encoding == 'utf-8' else encoding}")


def _records(columns: list[str], rows: Any, delimiter: str, fault: str) -> Iterator[dict[str, str] | BadRecord]:
    """Yield the records of a csv.reader after the header, each with the line in which it begins."""
    line = rows.line_num + 1
    try:
        for row in rows:
            if row:
                yield _record(columns, row, delimiter, line, fault)
            line = rows.line_num + 1
    except CsvError as error:
        raise CsvError(f"{error}, in the record that begins in line {line:,}") from error


def _record(columns: list[str], row: list[str], delimiter: str, line: int, fault: str) -> dict[str, str] | BadRecord:
    text = delimiter.join(row)
    size = len(text.encode(errors="surrogateescape"))
    if len(row) < len(columns):
        reason = "fewer values than columns"
    elif len(row) > len(columns):
        reason = "more values than columns"
    elif _is_unicode(text):
        return dict(zip(columns, row, strict=True))
    else:
        reason = fault
    return BadRecord(reason, text[:_KEPT].encode(errors="surrogateescape"), size, line)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
