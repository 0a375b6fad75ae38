"""Timeline drawing: pipeline schedules as pictures, in a file or on the terminal."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.style import Style
from rich.text import Text

from gristmill.errors import UsageError, wrap_write_errors
from gristmill_planner.timeline.pipeline_simulator import TimedPass, Timeline

# Okabe and Ito's colours, which colour-blind readers can tell apart; lighter on the way up or in the second half
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
        raise UsageError(f"--draw {path}: wanted a file name that ends in {', '.join(FORMATS)}")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [timeline.layout.pp for timeline in timelines]
    figure = Figure(figsize=(11, sum(0.26 * n + 0.75 for n in rows) + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(timelines), 1, squeeze=False, sharex=True, gridspec_kw={"height_ratios": rows})[:, 0]
    for timeline, axis in zip(timelines, axes, strict=True):
        _draw_one(timeline, axis)
    axes[-1].set_xlabel("time, in seconds" + " of the costs given" * all(not timeline.name for timeline in timelines))
    kinds = {each.kind for timeline in timelines for passes in timeline.ranks for each in passes}
    later = any(timeline.layout.virtual_stages > 1 for timeline in timelines)
    figure.legend(handles=_legend(kinds, later), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    with wrap_write_errors(path):
        figure.savefig(path, dpi=150)


def _draw_one(timeline: Timeline, axis: Any) -> None:
    """Draw one timeline: a row for each rank, a box for each pass with its micro-batch's number."""
    shortest = 0.012 * timeline.seconds
    for rank, passes in enumerate(timeline.ranks):
        for each in passes:
            color = _color(timeline, each)
            width = each.end - each.start
            axis.barh(rank, width, left=each.start, height=0.92, color=color, edgecolor="white", linewidth=0.5)
            if width >= shortest:
                axis.text(
                    each.start + width / 2, rank, str(each.micro_batch + 1), ha="center", va="center", fontsize=6.5,
                    color="black" if _is_second_half(timeline, each) else "white",
                )  # fmt: skip
    axis.set_title(describe(timeline), loc="left", fontsize=9)
    axis.set_yticks(range(timeline.layout.pp), [f"rank {rank}" for rank in range(timeline.layout.pp)], fontsize=7)
    axis.tick_params(axis="x", labelsize=7)
    axis.tick_params(axis="y", length=0)
    axis.invert_yaxis()
    axis.margins(x=0.004, y=0.02)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def describe(timeline: Timeline) -> str:
    """One line: the schedule, its bubble ratio, and the micro-batches that each rank keeps at the most."""
    layout = timeline.layout
    stages = f", {layout.virtual_stages} stages a rank" if layout.virtual_stages > 1 else ""
    kept = [timeline.peak_in_flight(rank) / layout.virtual_stages for rank in range(layout.pp)]
    in_flight = ", ".join(f"{each:g}" for each in kept)
    name = f"{timeline.name} " if timeline.name else ""
    return (
        f"{name}{layout.schedule}{stages}: {layout.micro_batches} micro-batches in {timeline.seconds:.4g} s, "
        f"bubble ratio {timeline.bubble_ratio:.3f}; activations of {in_flight} micro-batches"
    )


def timeline_text(timeline: Timeline, width: int = 150) -> Text:
    """The timeline for a terminal: a line for each rank, a character for each `width`-th of the step's seconds."""
    text = Text(describe(timeline) + "\n")
    scale = (width - 1) / timeline.seconds
    for rank, passes in enumerate(timeline.ranks):
        text.append(f"{rank:>3} ")
        at = 0
        for each in passes:
            start, end = round(each.start * scale), round(each.end * scale)
            text.append("·" * (start - at))
            text.append(_box(each, end - start), Style(color="white", bgcolor=_color(timeline, each)))
            at = max(at, end)
        text.append("\n")
    return text


def _box(each: TimedPass, length: int) -> str:
    """The pass's kind and micro-batch, as far as they fit."""
    name = f"{each.kind}{each.micro_batch + 1}"
    return (name if len(name) <= length else each.kind).ljust(length)[:length]


def _is_second_half(timeline: Timeline, each: TimedPass) -> bool:
    """True for the second stage of a rank with two, and every other one of a rank with more."""
    layout = timeline.layout
    return each.stage // layout.pp % 2 == 1


def _color(timeline: Timeline, each: TimedPass) -> str:
    return _COLORS[each.kind][_is_second_half(timeline, each)]


def _legend(kinds: set[str], later: bool) -> list[Any]:
    """`later`: there are ranks with several stages."""
    from matplotlib.patches import Patch

    shown = [kind for kind in _NAMES if kind in kinds and not (kind == "B" and "I" in kinds)]
    both = "B" in kinds and "I" in kinds
    names = {**_NAMES, "I": "backward (where split: of inputs)" if both else _NAMES["I"]}
    found = [Patch(color=_COLORS[kind][0], label=names[kind]) for kind in shown]
    return [*found, *[Patch(color="#CCCCCC", label="lighter: every second stage of a rank")] * later]
