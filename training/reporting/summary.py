"""Summary: the final numbers of a run, in summary.json."""

import json
import math
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gristmill.errors import InputError
from gristmill.storage.local import atomic_write_bytes
from training.reporting.metrics_file import METRICS, finite, read_metrics

_PARTS = ("sources", "lengths", "holdouts")


@dataclass(frozen=True)
class Summary:
    """The final numbers of a run. Losses in nats/token, NaN of a diverged run, in the file null; `tokens_per_second`
    is the median over the steps. `sources`, `lengths` and `holdouts` are the last evaluation's, as in metrics.jsonl;
    they are not in the file where there are none.
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
            f"{out_dir / METRICS} has lost the steps or evaluations of this finished run; wanted at least one of each "
            "for summary.json; restore the file, or train on with more --optim.steps"
        )
    evaluated = evaluations[-1]
    summary = Summary(
        steps=steps,
        train_loss=_number(logged[-1]["loss"]),
        holdout_loss=_number(evaluated["loss"]),
        bits_per_byte=_number(evaluated["bits_per_byte"]),
        unigram_loss=unigram_loss,
        tokens_per_second=statistics.median(record["tokens_per_second"] for record in logged),
        parameters=parameters,
        processes=processes,
        checkpoint=str(checkpoint),
        **{part: evaluated.get(part, {}) for part in _PARTS},
    )
    values = {key: finite(value) if isinstance(value, float) else value for key, value in asdict(summary).items()}
    values = {key: value for key, value in values.items() if value or key not in _PARTS}
    atomic_write_bytes(out_dir / "summary.json", json.dumps(values, indent=2).encode() + b"\n")
    return summary


def _number(recorded: float | None) -> float:
    """A recorded number: null, as JSON has no NaN, stands for one that is not finite."""
    return math.nan if recorded is None else recorded
