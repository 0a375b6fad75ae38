"""The certificate: its cases, run in two lanes of warm processes, and its table for terminals, JSON and Markdown."""

import math
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from rich.console import Console, Group
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

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
    most = processes or (_LISTED_PROCESSES if full else _PROCESSES)
    covering = [case for case in covering_cases() if case.processes <= most]
    all_, refused = all_cases(processes or _PROCESSES)
    features, skipped = feature_cases(device, full)
    layouts = [*(all_ if full else covering)]
    layouts += [replace(case, precision="fp32") for case in (covering if full else kinds_of_layouts(covering))]
    layouts += [replace(case, documents=True) for case in (covering if full else ())]
    runs, refused_runs = trainer_runs(full, device)
    skipped += [line for line in refused_runs if line not in skipped]
    cases = [*features, *runs, *(replace(case, device=device) for case in layouts)]
    gpus = torch.cuda.device_count()
    possible = [case for case in cases if device == "cpu" or not case.sends_tensors or case.processes <= gpus]
    if possible != cases:
        count = len(cases) - len(possible)
        skipped.append(
            f"{count_of(count, 'row')} with pipelines, grids or rings, or of the trainer: each process needs a GPU, as "
            "gloo sends no GPU tensors"
        )
    return CertificatePlan([case for case in possible if case.processes <= most], refused, skipped)


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
    small = [case for case in cases if case.processes <= 2 and device == "cpu"]
    lanes = [lane for lane in (small, [case for case in cases if case not in small]) if lane]
    rows: dict[Case, CaseResult] = {}

    def run(lane: list[Case]) -> None:
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
        try:
            for lane in [threads.submit(run, lane) for lane in lanes]:
                lane.result()
        finally:
            ended.set()
    return [rows[case] for case in cases if case in rows]


def report(rows: Sequence[CaseResult], plan: CertificatePlan, seconds: float) -> Group:
    """Build the terminal report; error messages are plain text, not interpreted as rich's markup."""
    skipped = [Text(f"skipped: {line}") for line in plan.skipped]
    refused = [_refusals(plan.refused)] if plan.refused else []
    return Group(_table(rows), *refused, *skipped, Text(summary(rows, seconds)))


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
    calls, size = (sum(v[i] for v in row.counted.values()) for i in (0, 1))
    sign = "≠" if "theory" in row.mismatch else "="
    numbers = [f"{row.differences[name]:.1e}" if name in row.differences else "" for name in QUANTITIES]
    traffic = [f"{calls}", f"{size / 1024:.0f} {sign}"] if row.case.counts_traffic else ["", ""]
    limit = f"{limits(row.case)['gradient']:.0e}"
    return [str(row.case), str(row.case.processes), *numbers, limit, *traffic, f"{row.seconds:.1f}"]


def _refusals(refused: dict[ParallelConfig, str]) -> Table:
    counts = Counter(refused.values())
    table = Table("refused", "why", box=None, pad_edge=False)
    for reason, count in counts.items():
        table.add_row(count_of(count, "layout"), Text(reason))
    return table


def summary(rows: Sequence[CaseResult], seconds: float) -> str:
    """Summarize the certificate in a few lines: counts, largest differences, slowest case, failures."""
    green = [row for row in rows if row.passed]
    lines = [f"{count_of(len(rows), 'row')}, {len(green)} green, {len(rows) - len(green)} red, in {seconds:.0f} s"]
    for reference, precision in dict.fromkeys((row.case.reference, row.case.precision) for row in rows):
        chosen = [row for row in rows if (row.case.reference, row.case.precision) == (reference, precision)]
        worst = max(chosen, key=lambda row: (not row.passed, torch.tensor(row.share_of_limit).nan_to_num(9e9).item()))
        lines.append(
            f"worst in {precision} against {reference}: {worst.largest_difference:.1e}, "
            f"{worst.share_of_limit:.0%} of its limit, {worst.case}"
        )
    slowest = max(rows, key=lambda row: row.seconds)
    lines.append(f"slowest: {slowest.seconds:.1f} s, {slowest.case}")
    lines += [f"red: {row.case}: {row.reason}" for row in rows if not row.passed]
    return "\n".join(lines)


def as_json(rows: Sequence[CaseResult], plan: CertificatePlan) -> dict[str, Any]:
    """Return the certificate as JSON values; `traffic` is that of the rank with the most bytes."""
    records = []
    for row in rows:
        traffic = {f"{axis} {operation}": v._asdict() for (axis, operation), v in row.counted.items()}
        differences = {name: row.differences.get(name) for name in QUANTITIES}
        records.append(
            {**asdict(row.case), "processes": row.case.processes, "differences": differences, "traffic": traffic}
            | {"limits": limits(row.case)}
            | {"seconds": round(row.seconds, 3), "green": row.passed, "wrong": "" if row.passed else row.reason}
        )
    refused = [{**asdict(layout), "why": why} for layout, why in plan.refused.items()]
    return {"torch": torch.__version__, "rows": records, "refused": refused, "skipped": plan.skipped}


def as_markdown(rows: Sequence[CaseResult], plan: CertificatePlan, seconds: float) -> str:
    """Return the certificate as a Markdown table, with traffic by axis and every refused layout."""
    lines = [summary(rows, seconds).replace("\n", "\n\n"), ""]
    lines += [f"| {' | '.join(_COLUMNS[:-1])} | by axis | |", "|---" * (len(_COLUMNS) + 1) + "|"]
    for row in rows:
        axes = ", ".join(
            f"{axis} {operation} {v.calls} / {v.bytes / 1024:.0f} KiB" for (axis, operation), v in row.counted.items()
        )
        lines.append(f"| {' | '.join(_cells(row))} | {axes} | {'green' if row.passed else '**red**'} |")
    lines += ["", "Refused:", "", *(f"- {layout.describe()}: {why}" for layout, why in plan.refused.items())]
    lines += ["", *(f"Skipped: {line}.\n" for line in plan.skipped)]
    return "\n".join(lines)
