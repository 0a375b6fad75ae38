"""Timelines of pipeline schedules, simulated or measured in a traced step: drawn as text and as a picture."""

import gzip
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from rich.console import Group
from rich.style import Style
from rich.text import Text

from gristmill.errors import InputError, UsageError, require, wrap_write_errors
from gristmill.wording import count_of
from gristmill_planner.break_even import break_even_table, has_enough, schedules_table
from gristmill_planner.pipeline_simulator import (
    PassCosts,
    TimedPass,
    Timeline,
    pipeline_layout,
    simulate,
    simulate_schedule,
)  # fmt: skip
from training.experimental.parallel_config import ParallelConfig
from training.parallel.pipeline.schedules import SCHEDULES, Schedule
from training.profiling.profile_config import FOLDER

# Okabe and Ito's colours, which colour-blind readers can tell apart; lighter of every second stage of a rank
_COLORS = {
    "F": ("#0072B2", "#56B4E9"),
    "B": ("#D55E00", "#F0A868"),
    "I": ("#D55E00", "#F0A868"),
    "W": ("#009E73", "#7CCDB5"),
}
_NAMES = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}
FORMATS = (".svg", ".png", ".pdf")


def draw_timelines(timelines: Sequence[Timeline], path: Path) -> None:
    """Draw the timelines below each other on one time axis, into an SVG, PNG or PDF file.

    Raises UsageError for another suffix, OutputError if the file cannot be written.
    """
    if path.suffix not in FORMATS:
        raise UsageError(f"--draw {path}: expected a file name that ends in {', '.join(FORMATS)}")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [timeline.layout.pp for timeline in timelines]
    height = sum(0.26 * n + 0.75 for n in rows) + 0.5
    figure = Figure(figsize=(11, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(timelines), 1, squeeze=False, sharex=True, gridspec_kw={"height_ratios": rows})[:, 0]
    kinds = set[str]()
    for timeline, axis in zip(timelines, axes, strict=True):
        draw_timeline(timeline, axis)
        kinds.update(timed.kind for timed in _all_passes(timeline))
    is_measured = any(timeline.name for timeline in timelines)
    axes[-1].set_xlabel("time, in seconds" if is_measured else "time, in seconds of the costs given")
    has_later_stages = any(timeline.layout.virtual_stages > 1 for timeline in timelines)
    handles = _legend(kinds, has_later_stages)
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    with wrap_write_errors(path):
        figure.savefig(path, dpi=150)


def _all_passes(timeline: Timeline) -> Iterator[TimedPass]:
    return chain.from_iterable(timeline.ranks)


def draw_timeline(timeline: Timeline, axis: Any) -> None:
    """Draw one timeline: a row for each rank, a box for each pass with its micro-batch's number."""
    shortest = 0.012 * timeline.seconds
    for rank, passes in enumerate(timeline.ranks):
        for timed in passes:
            is_later = _is_later(timeline, timed)
            width = timed.end - timed.start
            color = _COLORS[timed.kind][is_later]
            axis.barh(rank, width, left=timed.start, height=0.92, color=color, edgecolor="white", linewidth=0.5)
            if width >= shortest:
                middle = timed.start + width / 2
                number = str(timed.micro_batch + 1)
                color = "black" if is_later else "white"
                axis.text(middle, rank, number, ha="center", va="center", fontsize=6.5, color=color)
    axis.set_title(describe(timeline), loc="left", fontsize=9)
    axis.set_yticks(range(timeline.layout.pp), [f"rank {rank}" for rank in range(timeline.layout.pp)], fontsize=7)
    axis.tick_params(axis="x", labelsize=7)
    axis.tick_params(axis="y", length=0)
    axis.invert_yaxis()
    axis.margins(x=0.004, y=0.02)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def describe(timeline: Timeline) -> str:
    """Return one line: the schedule, its bubble ratio, and the micro-batches that each rank keeps at the most."""
    layout = timeline.layout
    name = f"{timeline.name} " if timeline.name else ""
    stages = f", {layout.virtual_stages} stages per rank" if layout.virtual_stages > 1 else ""
    in_flight = []
    for rank in range(layout.pp):
        in_flight.append(f"{timeline.peak_in_flight(rank) / layout.virtual_stages:g}")
    return (
        f"{name}{layout.schedule}{stages}: {count_of(layout.micro_batches, 'micro-batch', 'micro-batches')} "
        f"in {timeline.seconds:.4g} s, bubble ratio {timeline.bubble_ratio:.3f}; activations of "
        f"{', '.join(in_flight)} micro-batches"
    )


def timeline_text(timeline: Timeline, width: int = 150) -> Text:
    """Return the timeline for a terminal: a line for each rank, a character for each `width`-th of the step."""
    text = Text(describe(timeline) + "\n")
    scale = (width - 1) / timeline.seconds
    for rank, passes in enumerate(timeline.ranks):
        text.append(f"{rank:>3} ")
        column = 0
        for timed in passes:
            start = round(timed.start * scale)
            end = round(timed.end * scale)
            length = end - start
            name = f"{timed.kind}{timed.micro_batch + 1}"
            if len(name) > length:
                name = timed.kind
            text.append("·" * (start - column))
            color = _COLORS[timed.kind][_is_later(timeline, timed)]
            text.append(name.ljust(length)[:length], Style(color="white", bgcolor=color))
            column = max(column, end)
        text.append("\n")
    return text


def _is_later(timeline: Timeline, timed: TimedPass) -> bool:
    """Return whether a pass is of every second stage of a rank."""
    return timed.stage // timeline.layout.pp % 2 == 1


def _legend(kinds: set[str], has_later_stages: bool) -> list[Any]:
    """Return the legend's patches; `has_later_stages`: there are ranks with several stages."""
    from matplotlib.patches import Patch

    names = {kind: name for kind, name in _NAMES.items() if kind in kinds}
    if "B" in kinds and "I" in kinds:  # which have one colour
        names["I"] = "backward (where split: of inputs)"
        del names["B"]
    patches = [Patch(color=_COLORS[kind][0], label=name) for kind, name in names.items()]
    if has_later_stages:
        patches.append(Patch(color="#CCCCCC", label="lighter: every second stage of a rank"))
    return patches


_PASS = re.compile(r"([\w-]+) pass ([FBIW]) of stage (\d+), micro-batch (\d+), rank (\d+) of (\d+)")
_FILE = re.compile(r"steps-(\d+)-(\d+)\.rank-(\d+)\.json\.gz")


def read_timeline(out_dir: Path) -> Timeline:
    """Return the last step of the run in `out_dir` that was traced on every pipeline rank, under one layout.

    Of replicas and tensor-parallel ranks, it is the first that were traced. Raises UsageError if the traces are not of
    a pipeline, or lack one of its ranks, InputError if one is damaged.
    """
    folder = out_dir / FOLDER
    lacking = "no traces of a pipeline's passes"
    for (last, _), files in _by_steps(folder):
        traces: dict[ParallelConfig, dict[int, list[TimedPass]]] = {}
        for path in files:
            trace = _read(path)
            if trace is not None:
                layout, rank, passes = trace
                traces.setdefault(layout, {}).setdefault(rank, passes)
        for layout, by_rank in traces.items():
            missing = [rank for rank in range(layout.pp) if rank not in by_rank]
            if not missing:
                return _from_zero(layout, by_rank, f"step {last}, measured")
            if lacking.startswith("no traces"):
                lacking = f"no trace of pipeline rank {missing[0]} of {layout.pp} at step {last}"
    raise UsageError(f"{folder} has {lacking}; train with --profile.steps 3:3 and --profile.ranks of every rank")


def _from_zero(layout: ParallelConfig, by_rank: dict[int, list[TimedPass]], name: str) -> Timeline:
    """Return the timeline of traced passes, whose time begins with the first of them."""
    began = min(passes[0].start for passes in by_rank.values())
    ranks = list[list[TimedPass]]()
    for rank in range(layout.pp):
        ranks.append([replace(timed, start=timed.start - began, end=timed.end - began) for timed in by_rank[rank]])
    return Timeline(layout, ranks, name)


def measured_costs(timeline: Timeline) -> list[PassCosts]:
    """Return the mean seconds of the passes of each stage, for a simulation; of a whole backward pass each half."""
    seconds: dict[tuple[int, str], list[float]] = defaultdict(list)
    for timed in _all_passes(timeline):
        halves = "IW" if timed.kind == "B" else timed.kind
        for kind in halves:
            seconds[timed.stage, kind].append((timed.end - timed.start) / len(halves))
    costs = list[PassCosts]()
    for stage in range(timeline.layout.stages):
        forward = fmean(seconds[stage, "F"] or [0.0])
        inputs = fmean(seconds[stage, "I"] or [0.0])
        weights = fmean(seconds[stage, "W"] or [0.0])
        costs.append(PassCosts(forward, inputs, weights))
    return costs


def _by_steps(folder: Path) -> list[tuple[tuple[int, int], list[Path]]]:
    """Return the traces of the same steps, by their last and first step, from the last on."""
    traces: dict[tuple[int, int], list[tuple[int, Path]]] = defaultdict(list)
    for path in folder.glob("steps-*.rank-*.json.gz"):
        match = _FILE.fullmatch(path.name)
        if match:
            first, last, rank = map(int, match.groups())
            traces[last, first].append((rank, path))
    by_steps = list[tuple[tuple[int, int], list[Path]]]()
    for steps in sorted(traces, reverse=True):
        by_rank = sorted(traces[steps])
        by_steps.append((steps, [path for _, path in by_rank]))
    return by_steps


def _read(path: Path) -> tuple[ParallelConfig, int, list[TimedPass]] | None:
    """Return layout, rank and the passes of the last step of a pipeline's trace; None if it has no pipeline."""
    try:
        events = _read_events(path)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, EOFError, RecursionError, zlib.error) as error:
        raise InputError(f"{path} is damaged: {error}; trace the steps again") from error
    if not events:
        return None
    events.sort(key=lambda event: event[1])
    first, _, _ = events[0]
    last_step = events[_last_begin(events) :]
    passes = list[TimedPass]()
    for match, start, length in last_step:
        passes.append(TimedPass(match[2], int(match[3]), int(match[4]), start, start + length))
    stages = len({timed.stage for timed in passes})
    count = 1 + max(timed.micro_batch for timed in passes)
    forward = {(timed.stage, timed.micro_batch) for timed in passes if timed.kind == "F"}
    if first[1] not in SCHEDULES or len(forward) != stages * count:
        raise InputError(f"{path} is damaged: it has no whole step of a pipeline; trace the steps again")
    layout = pipeline_layout(cast(Schedule, first[1]), int(first[6]), count, stages)
    return layout, int(first[5]), passes


def _last_begin(events: Sequence[tuple[re.Match[str], float, float]]) -> int:
    """Return where the last step begins: with the last pass that is like the first of all."""
    names = [match.group(2, 3, 4) for match, _, _ in events]
    return len(names) - 1 - names[::-1].index(names[0])


def _read_events(path: Path) -> list[tuple[re.Match[str], float, float]]:
    """Return the passes in a trace, by their names, with when they begin and how long they last in seconds."""
    trace: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    base = float(trace.get("baseTimeNanoseconds", 0)) / 1e9
    events = list[tuple[re.Match[str], float, float]]()
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") == "user_annotation":
            match = _PASS.fullmatch(event["name"])
            if match:
                events.append((match, base + event["ts"] / 1e6, event["dur"] / 1e6))
    return events


_DRAWN = tuple(schedule for schedule in SCHEDULES if schedule != "looped-bfs")  # which is GPipe of several stages
_MOST_SECONDS = 1e9  # of a pass


def draw_schedules(path: Path, ranks: int, micro_batches: int, costs: PassCosts) -> Group:
    """Draw all schedules for the same costs, and say where bubbles and communication break even. Raises UsageError."""
    require(1 < ranks <= 64, f"--ranks is {ranks}; expected 2 to 64")
    require(
        ranks <= micro_batches <= 256 and micro_batches % ranks == 0,
        f"--micro_batches is {micro_batches}; expected a multiple of --ranks {ranks}, up to 256, as interleaved "
        f"schedules take them in rounds; try {2 * ranks}",
    )
    given = (costs.forward, costs.inputs, costs.weights)
    require(
        all(0 <= seconds <= _MOST_SECONDS for seconds in given) and costs.forward > 0,
        f"--costs are {' '.join(map(str, given))}; expected seconds of 0 to {_MOST_SECONDS:g}, above 0 of a forward "
        "pass; try --costs 1 1 1",
    )
    timelines = list[Timeline]()
    for schedule in _DRAWN:
        if has_enough(schedule, ranks, micro_batches):
            timelines.append(simulate_schedule(schedule, ranks, micro_batches, costs))
    draw_timelines(timelines, path)
    counts = [ranks, 2 * ranks, 4 * ranks, 8 * ranks]

    def bubble(schedule: Schedule, count: int) -> str:
        return f"{simulate_schedule(schedule, ranks, count, costs).bubble_ratio:.3f}"

    bubbles = schedules_table("bubble ratio", _DRAWN, ranks, counts, bubble)
    break_even = break_even_table(_DRAWN[2:], ranks, counts, costs)
    return Group(*map(timeline_text, timelines), bubbles, break_even, f"drawn in {path}")


def draw_measured(path: Path, out_dir: Path) -> Group:
    """Draw the last traced step of the run in `out_dir`, and a simulation with the mean seconds of its passes."""
    measured = read_timeline(out_dir)
    simulated = replace(simulate(measured.layout, measured_costs(measured)), name="simulated")
    draw_timelines([measured, simulated], path)
    return Group(timeline_text(measured), timeline_text(simulated), f"drawn in {path}")
