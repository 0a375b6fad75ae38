"""The parity certificate: every layout computes what one process does, and communicates what theory says.

`gristmill parity` runs a covering set of layouts, in two minutes; `gristmill parity --full` all of them.
"""

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from gristmill.command import wide_console
from gristmill.errors import GristmillError, UsageError
from gristmill.io.files import atomic_write_bytes
from training.distributed.layout import ParallelConfig
from training.distributed.rank_pool import RankPool
from training.parity.cases import Case, all_cases, covering_cases
from training.parity.comparison import LIMITS, Certifier, Row


def parity(full: bool = False, processes: int = 8, out: Path | None = None) -> None:
    """Compare layouts with one process: losses, gradients, weights after three steps, and what is communicated.

    One small model, one seed, one order of the data, in real processes: Llama's parts, and GPT-2's with tied
    matrices, biases and dropout. Float64 must agree to 1e-10, float32 to 1e-5, relative to the largest number.

    Args:
        full: Every layout that the processes allow (minutes), not a set in which all pairs of settings occur.
        processes: The most processes of a layout.
        out: Write the table there, too: .md for people, .json for programs.
    """
    if not 1 <= processes <= 64:
        raise UsageError(f"processes is {processes}; wanted 1 to 64")
    if out is not None and out.suffix not in (".md", ".json"):
        raise UsageError(f"out is {out}; wanted a file that ends in .md or .json")
    cases, refused = choose_cases(full, processes)
    started = time.monotonic()
    rows = _run(cases, min(processes, max(case.processes for case in cases)))
    wide_console().print(report(rows, refused, time.monotonic() - started))
    if out is not None:
        text = json.dumps(as_json(rows, refused), indent=1) if out.suffix == ".json" else as_markdown(rows, refused)
        atomic_write_bytes(out, text.encode())
    red = sum(not row.green for row in rows)
    if red:
        raise GristmillError(f"{red} of {len(rows)} layouts do not agree with one process, or with theory: see above")


def choose_cases(full: bool, processes: int) -> tuple[list[Case], dict[ParallelConfig, str]]:
    """What is run, float64 first, and which layouts are refused, with the reason.

    Float32 is not float64 rounded: on a CPU other code computes it, so that all of the covering set is repeated.
    """
    covering = [case for case in covering_cases() if case.processes <= processes]
    every, refused = all_cases(processes)
    single = [replace(case, precision="fp32") for case in covering]
    return (every if full else covering) + single, refused


def _run(cases: Sequence[Case], processes: int) -> list[Row]:
    rows = []
    with RankPool(processes) as ranks, Progress(console=Console(stderr=True), transient=True) as progress:
        certifier, bar = Certifier(ranks), progress.add_task("layouts", total=len(cases))
        for case in cases:
            progress.update(bar, description=str(case))
            rows.append(certifier.certify(case))
            progress.advance(bar)
            if not rows[-1].green:
                progress.console.print(f"[red]red[/] {case}: ", end="")
                progress.console.print(rows[-1].reason, markup=False)
    return rows


def report(rows: Sequence[Row], refused: dict[ParallelConfig, str], seconds: float) -> Group:
    """For a terminal; what failed is told as it is, brackets and all."""
    return Group(_table(rows), _refusals(refused), Text(summary(rows, seconds)))


_COLUMNS = ("layout", "processes", "loss", "gradient", "weight", "calls", "KiB", "seconds", "")


def _table(rows: Sequence[Row]) -> Table:
    titles = f"largest relative difference from one process; what one process communicates in a step ({_STATES})"
    table = Table(*_COLUMNS, title=titles, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*_cells(row), "[green]green" if row.green else "[bold red]red")
    return table


_STATES = "= as theory has it, ≠ not"


def _cells(row: Row) -> list[str]:
    calls, size = (sum(v[i] for v in row.counted.values()) for i in (0, 1))
    sign = "≠" if "theory" in row.wrong else "="
    numbers = [f"{n:.1e}" for n in (row.loss, row.gradient, row.weight)]
    return [
        str(row.case),
        str(row.case.processes),
        *numbers,
        f"{calls}",
        f"{size / 1024:.0f} {sign}",
        f"{row.seconds:.1f}",
    ]


def _refusals(refused: dict[ParallelConfig, str]) -> Table:
    """Each reason once: without its numbers it is the same for many."""
    counts = Counter(refused.values())
    table = Table("refused", "why", box=None, pad_edge=False)
    for reason, count in counts.items():
        table.add_row(f"{count} layouts" if count > 1 else "1 layout", Text(reason))
    return table


def summary(rows: Sequence[Row], seconds: float) -> str:
    """Of the whole certificate, in a few lines."""
    green = [row for row in rows if row.green]
    lines = [f"{len(rows)} rows, {len(green)} green, {len(rows) - len(green)} red, in {seconds:.0f} s"]
    for precision, limit in LIMITS.items():
        if of_it := [row for row in rows if row.case.precision == precision]:
            worst = max(of_it, key=lambda row: (not row.green, torch.tensor(row.worst).nan_to_num(9e9).item()))
            lines.append(f"worst in {precision} (limit {limit:.0e}): {worst.worst:.1e}, {worst.case}")
    slowest = max(rows, key=lambda row: row.seconds)
    lines.append(f"slowest: {slowest.seconds:.1f} s, {slowest.case}")
    lines += [f"red: {row.case}: {row.reason}" for row in rows if not row.green]
    return "\n".join(lines)


def as_json(rows: Sequence[Row], refused: dict[ParallelConfig, str]) -> dict[str, Any]:
    """Everything, for programs; traffic is that of the process with most of it."""
    records = []
    for row in rows:
        traffic = {f"{axis} {what}": v._asdict() for (axis, what), v in row.counted.items()}
        differences = {"loss": row.loss, "gradient": row.gradient, "weight": row.weight}
        records.append(
            {**asdict(row.case), "processes": row.case.processes, "differences": differences, "traffic": traffic}
            | {"seconds": round(row.seconds, 3), "green": row.green, "wrong": "" if row.green else row.reason}
        )
    return {"limits": LIMITS, "rows": records, "refused": [{**asdict(k), "why": v} for k, v in refused.items()]}


def as_markdown(rows: Sequence[Row], refused: dict[ParallelConfig, str]) -> str:
    """The table, with the traffic by axis, and every refused layout."""
    lines = [summary(rows, sum(row.seconds for row in rows)).replace("\n", "\n\n"), ""]
    lines += [f"| {' | '.join(_COLUMNS[:-1])} | by axis | |", "|---" * (len(_COLUMNS) + 1) + "|"]
    for row in rows:
        axes = ", ".join(f"{a} {what} {v.calls} / {v.bytes / 1024:.0f} KiB" for (a, what), v in row.counted.items())
        lines.append(f"| {' | '.join(_cells(row))} | {axes} | {'green' if row.green else '**red**'} |")
    lines += ["", "Refused:", "", *(f"- {layout.describe()}: {why}" for layout, why in refused.items()), ""]
    return "\n".join(lines)
