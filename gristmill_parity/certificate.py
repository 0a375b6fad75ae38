"""The certificate: its cases, run in two lanes of warm processes, and its table for terminals, JSON and Markdown."""

import math
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import torch
from rich.console import Console, Group
from rich.markup import escape
from rich.progress import Progress, Task
from rich.table import Table
from rich.text import Text

from gristmill.engine.execution.progress import log_lines
from gristmill.wording import count_of
from gristmill_parity.cases import Case, all_cases, covering_cases
from gristmill_parity.comparison import QUANTITIES, CaseResult, Certifier, limits
from gristmill_parity.feature_cases import feature_cases
from gristmill_parity.runs.run_case import trainer_runs
from training.distributed.rank_pool import RankPool
from training.experimental.parallel_config import ParallelConfig


@dataclass(frozen=True)
class CertificatePlan:
    """The cases to run; the refused layouts with the reason for each; a line for each group of cases left out."""

    cases: list[Case]
    refused: dict[ParallelConfig, str]
    skipped: list[str]


_PROCESSES = 8  # every layout of up to as many is proved
_LISTED_PROCESSES = 16  # of the largest layouts that are listed


def plan_certificate(full: bool, processes: int | None, device: Literal["cpu", "cuda"] = "cpu") -> CertificatePlan:
    """Choose the cases: those with an independent reference, runs of the trainer, layouts in float64, then in float32.

    Each kind of layout also runs in float32, which uses other CPU kernels than float64. In `full` the whole covering
    set does, and again with documents that do not see each other. Without a number of `processes` all layouts are
    those of 8 at most, and those of `full` that are listed one by one have up to 16.
    """
    if processes is not None:
        max_processes = processes
    elif full:
        max_processes = _LISTED_PROCESSES
    else:
        max_processes = _PROCESSES
    covering = [case for case in covering_cases() if case.processes <= max_processes]
    every_layout, refused = all_cases(processes or _PROCESSES)
    if full:
        in_fp32 = [replace(case, precision="fp32") for case in covering]
        with_documents = [replace(case, documents=True) for case in covering]
        layouts = every_layout + in_fp32 + with_documents
    else:
        layouts = covering + [replace(case, precision="fp32") for case in kinds_of_layouts(covering)]
    features, skipped = feature_cases(device, full)
    runs, refused_runs = trainer_runs(full, device)
    skipped += [line for line in refused_runs if line not in skipped]
    chosen = list[Case]()
    without_gpus = 0
    for case in [*features, *runs, *(replace(case, device=device) for case in layouts)]:
        if device == "cuda" and case.sends_tensors and case.processes > torch.cuda.device_count():
            without_gpus += 1
        elif case.processes <= max_processes:
            chosen.append(case)
    if without_gpus:
        skipped.append(
            f"{count_of(without_gpus, 'row')} with pipelines, grids or rings, or of the trainer: each process needs a "
            "GPU, as gloo sends no GPU tensors"
        )
    return CertificatePlan(chosen, refused, skipped)


def kinds_of_layouts(cases: Sequence[Case]) -> list[Case]:
    """Return the smallest case of each kind: of the options on which the code for one precision may depend."""
    chosen: dict[tuple[object, ...], Case] = {}
    for case in sorted(cases, key=lambda case: case.processes):
        layout = case.layout
        kind = case.preset, layout.zero, layout.tp > 1, layout.pp > 1, case.recompute
        chosen.setdefault(kind, case)
    return [case for case in cases if case in chosen.values()]


_PRELOAD = ["gristmill_parity.comparison"]  # once for all processes: they are replaced after some cases each
_JOB_SECONDS = 300.0  # compiling takes a minute on a busy machine


def run_cases(cases: Sequence[Case], device: Literal["cpu", "cuda"], seconds: float = math.inf) -> list[CaseResult]:
    """Run the cases; none begins after `seconds`. Red ones are printed as they are found.

    On CPUs those of two processes at most run at the same time as the larger ones: each leaves cores idle, for as long
    as its ranks wait for each other and one process computes a reference.
    """
    started = time.monotonic()
    ended = threading.Event()
    lanes = _lanes(cases, device)
    rows: dict[Case, CaseResult] = {}

    def run_lane(lane: list[Case]) -> None:
        size = max(case.processes for case in lane)
        with RankPool(size, job_timeout=_JOB_SECONDS, device=device, preload=_PRELOAD) as ranks:
            certifier = Certifier(ranks)
            for case in lane:
                if ended.is_set() or time.monotonic() - started > seconds:
                    return
                progress.update(bar, description=str(case))
                rows[case] = certifier.certify(case)
                progress.advance(bar)
                if not rows[case].passed:
                    progress.console.print(f"[red]red[/] {case}: {escape(rows[case].reason)}")

    with (
        Progress(console=Console(stderr=True), transient=True) as progress,
        ThreadPoolExecutor(max(1, len(lanes))) as threads,
    ):
        bar = progress.add_task("cases", total=len(cases))
        with _lines_in_log(progress.console, progress.tasks[bar]):
            try:
                running = [threads.submit(run_lane, lane) for lane in lanes]
                for future in running:
                    future.result()
            finally:
                ended.set()
    return [rows[case] for case in cases if case in rows]


def _lines_in_log(console: Console, bar: Task) -> AbstractContextManager[None]:
    """Print a line a minute with the rows done and the time left, where no terminal shows the bar."""
    started = time.monotonic()

    def line() -> str:
        done = f"parity: {bar.completed:,.0f} of {bar.total or 0:,.0f} rows"
        if not bar.completed:
            return done
        seconds_a_row = (time.monotonic() - started) / bar.completed
        left = timedelta(seconds=round(seconds_a_row * (bar.remaining or 0)))
        return f"{done}, {left} left"

    return nullcontext() if console.is_terminal else log_lines(line)


def _lanes(cases: Sequence[Case], device: str) -> list[list[Case]]:
    """Return the cases that run one after the other: on CPUs small ones, and at the same time the others."""
    small = list[Case]()
    others = list[Case]()
    for case in cases:
        if case.processes <= 2 and device == "cpu":
            small.append(case)
        else:
            others.append(case)
    return [lane for lane in (small, others) if lane]


def report(rows: Sequence[CaseResult], plan: CertificatePlan, seconds: float) -> Group:
    """Build the terminal report; error messages are plain text, not interpreted as rich's markup."""
    parts: list[Table | Text] = [_table(rows)]
    if plan.refused:
        parts.append(_refusals(plan.refused))
    parts += [Text(f"skipped: {line}") for line in plan.skipped]
    parts.append(Text(summary(rows, seconds)))
    return Group(*parts)


_COLUMNS = ("case", "processes", *QUANTITIES, "limit", "calls", "KiB", "seconds", "")


def _table(rows: Sequence[CaseResult]) -> Table:
    title = (
        "largest relative difference from one process, or after = ; traffic of one rank in a step (= equal to theory, "
        "≠ not)"
    )
    table = Table(*_COLUMNS, title=title, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*_cells(row), "[green]green" if row.passed else "[bold red]red")
    return table


def _cells(row: CaseResult) -> list[str]:
    """Return a row of the table, but for its last cell."""
    cells = [str(row.case), str(row.case.processes)]
    for name in QUANTITIES:
        cells.append(f"{row.differences[name]:.1e}" if name in row.differences else "")
    cells.append(f"{limits(row.case)['gradient']:.0e}")
    if row.case.counts_traffic:
        calls = sum(volume.calls for volume in row.counted.values())
        size = sum(volume.bytes for volume in row.counted.values())
        sign = "≠" if "theory" in row.mismatch else "="
        cells += [f"{calls}", f"{size / 1024:.0f} {sign}"]
    else:
        cells += ["", ""]
    cells.append(f"{row.seconds:.1f}")
    return cells


def _refusals(refused: dict[ParallelConfig, str]) -> Table:
    counts = Counter(refused.values())
    table = Table("refused", "why", box=None, pad_edge=False)
    for reason, count in counts.items():
        table.add_row(count_of(count, "layout"), Text(reason))
    return table


def summary(rows: Sequence[CaseResult], seconds: float) -> str:
    """Summarize the certificate in a few lines: counts, largest differences, slowest case, failures."""
    red = [row for row in rows if not row.passed]
    green_count = len(rows) - len(red)
    lines = [f"{count_of(len(rows), 'row')}, {green_count} green, {len(red)} red, in {seconds:.0f} s"]
    groups = dict[tuple[str, str], list[CaseResult]]()
    for row in rows:
        groups.setdefault((row.case.reference, row.case.precision), []).append(row)
    for (reference, precision), group in groups.items():
        worst = max(group, key=_badness)
        lines.append(
            f"worst in {precision} against {reference}: {worst.largest_difference:.1e}, "
            f"{worst.share_of_limit:.0%} of its limit, {worst.case}"
        )
    slowest = max(rows, key=lambda row: row.seconds)
    lines.append(f"slowest: {slowest.seconds:.1f} s, {slowest.case}")
    lines += [f"red: {row.case}: {row.reason}" for row in red]
    return "\n".join(lines)


def _badness(row: CaseResult) -> tuple[bool, float]:
    """Return a sort key: red rows after green ones, and rows without numbers after all others."""
    share = row.share_of_limit
    return not row.passed, math.inf if math.isnan(share) else share


def as_json(rows: Sequence[CaseResult], plan: CertificatePlan) -> dict[str, Any]:
    """Return the certificate as JSON values; `traffic` is that of the rank with the most bytes."""
    records = []
    for row in rows:
        record = asdict(row.case)
        record["processes"] = row.case.processes
        record["differences"] = {name: row.differences.get(name) for name in QUANTITIES}
        record["traffic"] = {f"{axis} {operation}": v._asdict() for (axis, operation), v in row.counted.items()}
        record["limits"] = limits(row.case)
        record["seconds"] = round(row.seconds, 3)
        record["green"] = row.passed
        record["wrong"] = "" if row.passed else row.reason
        records.append(record)
    refused = [{**asdict(layout), "why": why} for layout, why in plan.refused.items()]
    return {"torch": torch.__version__, "rows": records, "refused": refused, "skipped": plan.skipped}


def as_markdown(rows: Sequence[CaseResult], plan: CertificatePlan, seconds: float) -> str:
    """Return the certificate as a Markdown table, with traffic by axis and every refused layout."""
    lines = [summary(rows, seconds).replace("\n", "\n\n"), ""]
    lines += [f"| {' | '.join(_COLUMNS[:-1])} | by axis | |", "|---" * (len(_COLUMNS) + 1) + "|"]
    for row in rows:
        by_axis = []
        for (axis, operation), volume in row.counted.items():
            by_axis.append(f"{axis} {operation} {volume.calls} / {volume.bytes / 1024:.0f} KiB")
        cells = [*_cells(row), ", ".join(by_axis), "green" if row.passed else "**red**"]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "Refused:", "", *(f"- {layout.describe()}: {why}" for layout, why in plan.refused.items())]
    lines += ["", *(f"Skipped: {line}.\n" for line in plan.skipped)]
    return "\n".join(lines)
