"""RawRecord: what the first stage noted of a record of the raw corpus, in words."""

from dataclasses import dataclass
from typing import Any

from gristmill.counts import FAILED, MALFORMED, SKIPPED, WORKER_DIED
from gristmill.io.documents import DocKey

RAW_COLUMNS = ("raw_file", "raw_row", "file", "row", "reason", "value", "detail", "raw_bytes", "bytes")


@dataclass(frozen=True)
class RawRecord:
    """A record of the first stage: its keys in the raw corpus and in what was written, or why it was not written."""

    raw: DocKey
    written: DocKey | None
    outcome: str
    is_skipped: bool = False  # of a web archive: it is no document, and has the key of the next one
    is_readable: bool = True  # a document on which no process died


def raw_record_of(row: dict[str, Any]) -> RawRecord:
    """Return the record that a row of facts, with the columns RAW_COLUMNS, is about."""
    raw = DocKey(row["raw_file"], row["raw_row"])
    if row["row"] is not None:
        key = DocKey(row["file"], row["row"])
        outcome = f"kept as {key}"
        change = row["raw_bytes"] - row["bytes"]
        if change > 0:
            outcome += f", {change:,} bytes shorter"
        elif change < 0:
            outcome += f", {-change:,} bytes longer"
        return RawRecord(raw, key, outcome)
    reason = row["reason"]
    outcome = f"removed: {reason}"
    if row["value"] is not None:
        outcome += f" ({row['value']:.4g})"
    if row["detail"]:
        outcome += f", {row['detail']}"
    is_skipped = reason.startswith(f"{SKIPPED}: ")
    is_readable = not is_skipped and not reason.startswith(f"{MALFORMED}: ") and reason != f"{FAILED}: {WORKER_DIED}"
    return RawRecord(raw, None, outcome, is_skipped, is_readable)
