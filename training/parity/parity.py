"""The parity certificate: every parallel layout trains like one process and communicates what theory predicts.

`gristmill parity` runs a set of layouts that covers all pairs of options, in two minutes; `--full` runs every layout.
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
from gristmill.storage.local import atomic_write_bytes
from training.distributed.layout import ParallelConfig
from training.distributed.rank_pool import RankPool
from training.parity.cases import Case, all_cases, covering_cases
from training.parity.comparison import LIMITS, CaseResult, Certifier


def parity(full: bool = False, processes: int = 8, out: Path | None = None) -> None:
    """Compare parallel layouts with one process: losses, gradients, weights after three steps, and traffic.

    Each layout trains a small Llama or GPT-2 (tied embedding, biases, dropout) in real processes, from the same seed
    and data. The largest relative difference must be below 1e-10 in float64 and 1e-5 in float32; traffic must be equal
    to the formulas'.

    Args:
        full: Run every possible layout (takes many minutes) instead of a set that covers all pairs of options.
        processes: Maximum number of processes of a layout.
        out: Also write the table to this file: Markdown if it ends in .md, JSON if in .json.
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
    red = sum(not row.passed for row in rows)
    if red:
        raise GristmillError(f"{red} of {len(rows)} layouts differ from one process, or from theory: see above")


def choose_cases(full: bool, processes: int) -> tuple[list[Case], dict[ParallelConfig, str]]:
    """Choose the cases to run, float64 first; also return the refused layouts and the reason for each.

    The covering set also runs in float32, which uses other CPU kernels than float64.
    """
    covering = [case for case in covering_cases() if case.processes <= processes]
    all_, refused = all_cases(processes)
    single = [replace(case, precision="fp32") for case in covering]
    return (all_ if full else covering) + single, refused


def _run(cases: Sequence[Case], processes: int) -> list[CaseResult]:
    rows = []
    with RankPool(processes) as ranks, Progress(console=Console(stderr=True), transient=True) as progress:
        certifier, bar = Certifier(ranks), progress.add_task("layouts", total=len(cases))
        for case in cases:
            progress.update(bar, description=str(case))
            rows.append(certifier.certify(case))
            progress.advance(bar)
            if not rows[-1].passed:
                progress.console.print(f"[red]red[/] {case}: ", end="")
                progress.console.print(rows[-1].reason, markup=False)
    return rows


def report(rows: Sequence[CaseResult], refused: dict[ParallelConfig, str], seconds: float) -> Group:
    """Build the terminal report; error messages are plain text, not interpreted as rich's markup."""
    return Group(_table(rows), _refusals(refused), Text(summary(rows, seconds)))


_COLUMNS = ("layout", "processes", "loss", "gradient", "weight", "calls", "KiB", "seconds", "")


def _table(rows: Sequence[CaseResult]) -> Table:
    titles = f"largest relative difference from one process; traffic of one rank in a step ({_STATES})"
    table = Table(*_COLUMNS, title=titles, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*_cells(row), "[green]green" if row.passed else "[bold red]red")
    return table


_STATES = "= equal to theory, ≠ not"


def _cells(row: CaseResult) -> list[str]:
    calls, size = (sum(v[i] for v in row.counted.values()) for i in (0, 1))
    sign = "≠" if "theory" in row.mismatch else "="
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
    """Table of the reasons for which layouts are refused, with their counts."""
    counts = Counter(refused.values())
    table = Table("refused", "why", box=None, pad_edge=False)
    for reason, count in counts.items():
        table.add_row(f"{count} layouts" if count > 1 else "1 layout", Text(reason))
    return table


def summary(rows: Sequence[CaseResult], seconds: float) -> str:
    """Summarize the certificate in a few lines: counts, largest differences, slowest case, failures."""
    green = [row for row in rows if row.passed]
    lines = [f"{len(rows)} rows, {len(green)} green, {len(rows) - len(green)} red, in {seconds:.0f} s"]
    for precision, limit in LIMITS.items():
        if chosen := [row for row in rows if row.case.precision == precision]:
            worst = max(
                chosen, key=lambda row: (not row.passed, torch.tensor(row.largest_difference).nan_to_num(9e9).item())
            )
            lines.append(f"worst in {precision} (limit {limit:.0e}): {worst.largest_difference:.1e}, {worst.case}")
    slowest = max(rows, key=lambda row: row.seconds)
    lines.append(f"slowest: {slowest.seconds:.1f} s, {slowest.case}")
    lines += [f"red: {row.case}: {row.reason}" for row in rows if not row.passed]
    return "\n".join(lines)


def as_json(rows: Sequence[CaseResult], refused: dict[ParallelConfig, str]) -> dict[str, Any]:
    """The certificate as JSON values; `traffic` is that of the rank with the most bytes."""
    records = []
    for row in rows:
        traffic = {f"{axis} {operation}": v._asdict() for (axis, operation), v in row.counted.items()}
        differences = {"loss": row.loss, "gradient": row.gradient, "weight": row.weight}
        records.append(
            {**asdict(row.case), "processes": row.case.processes, "differences": differences, "traffic": traffic}
            | {"seconds": round(row.seconds, 3), "green": row.passed, "wrong": "" if row.passed else row.reason}
        )
    return {"limits": LIMITS, "rows": records, "refused": [{**asdict(k), "why": v} for k, v in refused.items()]}


def as_markdown(rows: Sequence[CaseResult], refused: dict[ParallelConfig, str]) -> str:
    """The certificate as a Markdown table, with traffic by axis and every refused layout."""
    lines = [summary(rows, sum(row.seconds for row in rows)).replace("\n", "\n\n"), ""]
    lines += [f"| {' | '.join(_COLUMNS[:-1])} | by axis | |", "|---" * (len(_COLUMNS) + 1) + "|"]
    for row in rows:
        axes = ", ".join(
            f"{axis} {operation} {v.calls} / {v.bytes / 1024:.0f} KiB" for (axis, operation), v in row.counted.items()
        )
        lines.append(f"| {' | '.join(_cells(row))} | {axes} | {'green' if row.passed else '**red**'} |")
    lines += ["", "Refused:", "", *(f"- {layout.describe()}: {why}" for layout, why in refused.items()), ""]
    return "\n".join(lines)
