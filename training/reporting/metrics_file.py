"""The file metrics.jsonl: its records, read without those that are damaged.

Every record has `kind` (run, step, eval, data) and `step`, the number of steps done.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gristmill.config import INT64
from gristmill.errors import wrap_read_errors

METRICS = "metrics.jsonl"


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a metrics.jsonl, without damaged lines; nothing if there is no such file."""
    yield from read_metrics_and_damage(path)[0]


def read_metrics_and_damage(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the records of a metrics.jsonl, and the number of damaged lines.

    A last line without its end is not counted: the run is writing it, or was killed. Raises InputError where the file
    cannot be read.
    """
    if not path.exists():
        return [], 0
    with wrap_read_errors(path):
        *lines, _ = path.read_bytes().split(b"\n")
    records = [record for line in lines if (record := _parse_record(line)) is not None]
    return records, len(lines) - len(records)


def _parse_record(line: bytes) -> dict[str, Any] | None:
    """A line's record; None if it is damaged."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    found = isinstance(record, dict) and isinstance(record.get("kind"), str) and type(record.get("step")) is int
    return record if found and 0 <= record["step"] <= INT64 else None


def finite(value: Any) -> float | None:
    """A recorded number; None if it is infinite, nan, or no number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= sys.float_info.max else None
