"""Files of a run's numbers: metrics.jsonl, read without damaged lines, and summary.json."""

import json
import math
import statistics
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gristmill.config import INT64
from gristmill.errors import InputError, wrap_read_errors
from gristmill.paths import spell_urls
from gristmill.storage.files import exists, read_file
from gristmill.storage.local import atomic_write_bytes

METRICS = "metrics.jsonl"


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a metrics.jsonl, without damaged lines; nothing if there is no such file."""
    yield from read_metrics_and_damage(path)[0]


def read_metrics_and_damage(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the records of a metrics.jsonl, and the number of damaged lines.

    A last line without its end is not counted: the run is writing it, or was killed. Raises InputError where the file
    cannot be read.
    """
    if not exists(path):
        return [], 0
    with wrap_read_errors(path):
        *lines, _ = read_file(path).split(b"\n")
    records = list[dict[str, Any]]()
    for line in lines:
        record = _parse_record(line)
        if record is not None:
            records.append(record)
    return records, len(lines) - len(records)


def last_with(records: Iterable[dict[str, Any]], key: str) -> dict[str, Any] | None:
    """Return the last record that has a value of this key; None if none has."""
    last = None
    for record in records:
        if record.get(key) is not None:
            last = record
    return last


def _parse_record(line: bytes) -> dict[str, Any] | None:
    """Return a line's record; None if it is damaged."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_ours = isinstance(record, dict) and isinstance(record.get("kind"), str) and type(record.get("step")) is int
    return record if is_ours and 0 <= record["step"] <= INT64 else None


def finite(value: Any) -> float | None:
    """Return a recorded number; None if it is infinite, nan, or no number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= sys.float_info.max else None


def table_of(record: Any, key: str) -> dict[str, Any]:
    """Return a table in a record, or in a part of one; {} if it has none."""
    value = record.get(key) if isinstance(record, dict) else None
    return value if isinstance(value, dict) else {}


_PARTS = ("sources", "lengths", "holdouts")


@dataclass(frozen=True)
class Summary:
    """The final numbers of a run. Losses in nats/token, NaN of a diverged run, in the file null; `bits_per_byte` is
    NaN, too, where the bytes of the holdout's text are not known. `tokens_per_second` is the median over the steps.
    `elapsed_seconds` and `device_hours`: what the run has taken until its last step. `sources`, `lengths` and
    `holdouts` are the last evaluation's, as in metrics.jsonl; they are not in the file where there are none.
    """

    steps: int
    train_loss: float
    holdout_loss: float
    bits_per_byte: float
    unigram_loss: float
    tokens_per_second: float
    parameters: int
    processes: int
    checkpoint: str
    elapsed_seconds: float = 0.0
    device_hours: float = 0.0
    sources: dict[str, Any] = field(default_factory=dict)
    lengths: dict[str, Any] = field(default_factory=dict)
    holdouts: dict[str, Any] = field(default_factory=dict)


def write_summary(
    out_dir: Path, steps: int, unigram_loss: float, parameters: int, processes: int, checkpoint: Path
) -> Summary:
    """Write `out_dir`/summary.json from the last records of `out_dir`/metrics.jsonl and the values given.

    Raises InputError where that file has lost them.
    """
    records = list(read_metrics(out_dir / METRICS))
    logged = [record for record in records if record["kind"] == "step"]
    evaluations = [record for record in records if record["kind"] == "eval"]
    if not logged or not evaluations:
        raise InputError(
            f"{out_dir / METRICS} has lost the steps or evaluations of this finished run; expected one of each "
            "for summary.json; restore the file, or train on with more --optim.steps"
        )
    evaluated = evaluations[-1]
    timed = last_with(logged, "elapsed_seconds") or {}
    summary = Summary(
        steps=steps,
        train_loss=_number(logged[-1]["loss"]),
        holdout_loss=_number(evaluated["loss"]),
        bits_per_byte=_number(evaluated.get("bits_per_byte")),
        unigram_loss=unigram_loss,
        tokens_per_second=statistics.median(record["tokens_per_second"] for record in logged),
        parameters=parameters,
        processes=processes,
        checkpoint=spell_urls(str(checkpoint)),
        elapsed_seconds=timed.get("elapsed_seconds", 0.0),
        device_hours=timed.get("device_hours", 0.0),
        **{part: evaluated.get(part, {}) for part in _PARTS},
    )
    values = {key: finite(value) if isinstance(value, float) else value for key, value in asdict(summary).items()}
    values = {key: value for key, value in values.items() if value or key not in _PARTS}
    atomic_write_bytes(out_dir / "summary.json", json.dumps(values, indent=2).encode() + b"\n")
    return summary


def _number(recorded: float | None) -> float:
    """Return a recorded number: null, as JSON has no NaN, means one that is not finite."""
    return math.nan if recorded is None else recorded
