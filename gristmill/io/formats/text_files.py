"""Records of .csv and .tsv files: a header with the names of the columns, then a record a row, quoted as Excel does."""

import csv
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from gristmill.io.formats.malformed import BadRecord

csv.field_size_limit(1 << 30)  # Python's own limit, 128 KiB, is too small for documents
CsvError = csv.Error
_KEPT = 1024  # characters of a malformed row


def read_csv(lines: Iterable[bytes], delimiter: str) -> tuple[list[str], Iterator[dict[str, str] | BadRecord]]:
    """(columns, records) of the lines of a file; a BadRecord for a row with invalid UTF-8 or too few or many values.

    A blank line has no record, and is no header. Raises CsvError for a header that is not UTF-8 and,
    while the records are read, for quotes that do not match.

    >>> columns, records = read_csv([b"text,id", b'"a, ""b""', b'c",1'], ",")
    >>> columns, list(records)
    (['text', 'id'], [{'text': 'a, "b"\\nc', 'id': '1'}])
    """
    rest = iter(lines)
    first = next(rest, b"").removeprefix(BOM_UTF8)  # before a quote it would be a part of the name
    decoded = (line.decode(errors="surrogateescape") + "\n" for line in chain([first], rest))
    rows = csv.reader(decoded, delimiter=delimiter, strict=True)
    columns = next(filter(None, rows), [])
    if not _is_unicode("".join(columns)):
        raise CsvError("its header is not UTF-8")
    return columns, _records(columns, rows, delimiter)


def _records(columns: list[str], rows: Any, delimiter: str) -> Iterator[dict[str, str] | BadRecord]:
    """The records of a csv.reader after the header, each with the line in which it begins."""
    line = rows.line_num + 1
    try:
        for row in rows:
            if row:
                yield _record(columns, row, delimiter, line)
            line = rows.line_num + 1
    except CsvError as error:
        raise CsvError(f"{error}, in the record that begins in line {line:,}") from error


def _record(columns: list[str], row: list[str], delimiter: str, line: int) -> dict[str, str] | BadRecord:
    text = delimiter.join(row)
    size = len(text.encode(errors="surrogateescape"))
    if len(row) != len(columns):
        reason = f"{'fewer' if len(row) < len(columns) else 'more'} values than columns"
    elif _is_unicode(text):
        return dict(zip(columns, row, strict=True))
    else:
        reason = "invalid UTF-8"
    return BadRecord(reason, text[:_KEPT].encode(errors="surrogateescape"), size, line)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
