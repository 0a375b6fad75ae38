"""Dry-run report: what a rank holds and sends as it was built, as tables or as a record."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from gristmill_planner.cost.planned_run import PlannedRun
from gristmill_planner.dry_run.dry_run import DryRun
from training.parallel.traffic_inputs import Traffic, Volume

_NONE = Volume(0, 0)


def dry_run_report(run: PlannedRun, found: DryRun) -> list[object]:
    """In words and tables."""
    layout = run.layout
    place = ", ".join(f"{name} {index} of {size}" for name, (index, size) in found.place.items() if size > 1)
    agrees = "agree to the byte" if found.agrees else "differ where both numbers are shown"
    return [
        f"rank {found.rank} of {run.cluster.devices} ({place or 'alone'}) in {layout.describe()}, recompute "
        f"{run.recompute}, with {layout.micro_batches} micro-batches of {run.micro_batch} x {run.seq_len} tokens",
        f"{_held(run, found)}: {found.parameters:,} parameters",
        "",
        _bytes_table(found.built),
        "",
        _traffic_table(found.sent, found.expected_sent),
        "",
        f"The formulas of traffic {agrees}.",
    ]


def _held(run: PlannedRun, found: DryRun) -> str:
    """The layers and ends of the model on the rank."""
    words = [f"layers {each.start} to {each.stop - 1}" for each in found.layers.values()]
    words += ["the embedding"] * (0 in found.layers) + ["the output"] * (run.layout.stages - 1 in found.layers)
    return " and ".join(words)


def _bytes_table(built: Mapping[str, int]) -> Table:
    table = Table("memory", "bytes", "GiB", box=None, pad_edge=False)
    for kind, size in built.items():
        table.add_row(kind, f"{size:,}", f"{size / 2**30:.2f}")
    return table


def _traffic_table(sent: Traffic, expected: Traffic) -> Table:
    table = Table("collectives of a step", "calls", "bytes", "GiB", box=None, pad_edge=False)
    for axis, operation in sorted({**sent, **expected}):
        calls, size = sent.get((axis, operation), _NONE)
        more = expected.get((axis, operation), _NONE)
        table.add_row(
            f"{axis}: {operation}", _beside(calls, more.calls), _beside(size, more.bytes), f"{size / 2**30:.2f}"
        )
    return table


def _beside(counted: int, expected: int) -> str:
    return f"{counted:,}" if counted == expected else f"{counted:,} (formula {expected:,})"


def dry_run_record(found: DryRun) -> dict[str, Any]:
    """For programs; bytes."""
    return {
        "rank": found.rank,
        "place": {name: index for name, (index, _) in found.place.items()},
        "layers": {str(stage): [each.start, each.stop] for stage, each in found.layers.items()},
        "parameters": found.parameters,
        "bytes": found.built,
        "collectives": {"counted": _record(found.sent), "formulas": _record(found.expected_sent)},
        "agrees": found.agrees,
    }


def _record(traffic: Traffic) -> list[dict[str, Any]]:
    return [
        {"axis": axis, "operation": operation, **volume._asdict()}
        for (axis, operation), volume in sorted(traffic.items())
    ]
