"""Tables of bench_training's measurements."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Column, Table

PEER = "nanoGPT"


@dataclass
class TrainingRun:
    """A configuration and layout to measure; `rounds` lists, per round, the reports of its processes."""

    name: str
    path: Path
    """TOML file of the configuration; for nanoGPT, its folder."""
    options: dict[str, Any] = field(default_factory=dict)
    processes: int = 1
    implementation: str = "ours"
    rounds: list[list[dict[str, Any]]] = field(default_factory=list)

    def seconds(self) -> list[float]:
        """Time of every step of every round, of the slowest process."""
        return [
            max(of_step) for reports in self.rounds for of_step in zip(*(r["seconds"] for r in reports), strict=True)
        ]

    def rates(self) -> list[float]:
        """Tokens per second of each round, from its median step."""
        return [
            reports[0]["tokens_per_step"] / max(statistics.median(r["seconds"]) for r in reports)
            for reports in self.rounds
        ]

    def utilisation(self) -> float:
        """Model FLOP/s over the peak FLOP/s of a matrix product that was measured in the same processes."""
        peak = max(report["peak"] for reports in self.rounds for report in reports)
        return statistics.median(self.rates()) * self.rounds[0][0]["flops_per_token"] / (peak * self.processes)

    def bubble(self) -> float:
        """Waiting time over computing time of all processes: the median over the rounds."""
        shares = [
            sum(sum(r["seconds"]) for r in reports) / max(1e-9, sum(sum(r["busy"]) for r in reports)) - 1
            for reports in self.rounds
        ]
        return statistics.median(shares)


def speed_table(runs: Sequence[TrainingRun]) -> Table:
    """One row per configuration; ratios to nanoGPT are per round: median, minimum and maximum."""
    peer = next((run for run in runs if run.name == PEER), None)
    ratio = [f"x {PEER}'s", "of the rounds"] if peer else []
    head = (
        "parameters",
        "ms a step",
        "p10..p90",
        "tokens/s",
        *ratio,
        "peak product GFLOP/s",
        "utilisation",
        "memory MiB",
    )
    table = Table("training", *(Column(name, justify="right") for name in head), title=_title(runs))
    for run in runs:
        table.add_row(
            run.name,
            *_size_cells(run),
            *_time_cells(run),
            *(_ratio_cells(run, peer) if peer else ()),
            *_cost_cells(run),
        )
    return table


def layout_table(runs: Sequence[TrainingRun]) -> Table:
    """One row per layout, with the ratio to one process, the first row."""
    head = ("ms a step", "p10..p90", "tokens/s", "x one process", "peak product GFLOP/s", "utilisation", "memory MiB")
    table = Table("layout", *(Column(name, justify="right") for name in head), title=_title(runs))
    for run in runs:
        table.add_row(run.name, *_time_cells(run), f"{statistics.median(_ratios(run, runs[0])):.2f}", *_cost_cells(run))
    return table


def pipeline_table(runs: Sequence[TrainingRun]) -> Table:
    """One row per pipeline: the bubble in theory and as measured, both relative to computing time.

    In theory it is (p - 1) / (v m) for equal stages (Narayanan et al. 2021, section 2.2.1); the measured one
    includes communication and all other waiting.
    """
    head = ("stages", "micro-batches", "(p-1)/(v m)", "measured bubble", "tokens/s")
    table = Table("pipeline", *(Column(name, justify="right") for name in head))
    for run in runs:
        report = run.rounds[0][0]
        p, stages, m = report["pp"], report["stages"], report["micro_batches"]
        table.add_row(
            run.name, str(stages), str(m), f"{(p - 1) / (stages // p * m):.1%}", f"{run.bubble():.1%}",
            f"{statistics.median(run.rates()):,.0f}",
        )  # fmt: skip
    return table


def _title(runs: Sequence[TrainingRun]) -> str:
    return f"median of {len(runs[0].rounds)} rounds of {len(runs[0].rounds[0][0]['seconds'])} steps, taking turns"


def _size_cells(run: TrainingRun) -> tuple[str, ...]:
    size = run.rounds[0][0].get("parameters")
    return (f"{size:,}" if size else "",)


def _time_cells(run: TrainingRun) -> tuple[str, str, str]:
    times = sorted(1000 * seconds for seconds in run.seconds())
    low, high = (times[int(len(times) * part)] for part in (0.1, 0.9))
    return f"{statistics.median(times):.1f}", f"{low:.1f}..{high:.1f}", f"{statistics.median(run.rates()):,.0f}"


def _ratio_cells(run: TrainingRun, peer: TrainingRun) -> tuple[str, str]:
    ratios = _ratios(run, peer)
    return f"{statistics.median(ratios):.3f}", f"{min(ratios):.2f}..{max(ratios):.2f}"


def _ratios(run: TrainingRun, other: TrainingRun) -> list[float]:
    return [one / two for one, two in zip(run.rates(), other.rates(), strict=True)]


def _cost_cells(run: TrainingRun) -> tuple[str, str, str]:
    if "peak" not in run.rounds[0][0]:
        return "", "", ""
    reports = [report for reports in run.rounds for report in reports]
    peak, memory = (max(report[key] for report in reports) for key in ("peak", "memory"))
    return f"{peak / 1e9:,.0f}", f"{run.utilisation():.1%}", f"{memory / 2**20:,.0f}"
