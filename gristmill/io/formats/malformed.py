"""Malformed and BadRecord: why a record is not a document, and what is left of it."""

from typing import NamedTuple


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
    """The line of a record in its file, counted from 1; of a table, its row."""
    return (record.line if isinstance(record, BadRecord) else None) or row + 1
