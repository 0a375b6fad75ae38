"""Draw schedules: all of them for the same costs, or a measured step beside what the simulator makes of its costs."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

from rich.console import Group
from rich.table import Table

from gristmill.errors import require
from gristmill_planner.break_even import break_even_table
from gristmill_planner.timeline.measured_timeline import measured_costs, read_timeline
from gristmill_planner.timeline.pipeline_simulator import PassCosts, bubble_table, pipeline_layout, rank_costs, simulate
from gristmill_planner.timeline.timeline_drawing import draw_timelines, timeline_text

_DRAWN: tuple[Literal["gpipe", "1f1b", "interleaved-1f1b", "zero-bubble", "zbv", "dualpipev"], ...] = (
    "gpipe", "1f1b", "interleaved-1f1b", "zero-bubble", "zbv", "dualpipev",
)  # fmt: skip

_MOST_SECONDS = 1e9  # of a pass


def draw_schedules(path: Path, ranks: int, micro_batches: int, costs: PassCosts) -> Group:
    """Draw all schedules for the same costs, and say where bubbles and communication break even. Raises UsageError."""
    require(1 < ranks <= 64, f"--ranks is {ranks}; wanted 2 to 64")
    require(
        ranks <= micro_batches <= 256 and micro_batches % ranks == 0,
        f"--micro_batches is {micro_batches}; wanted a multiple of --ranks {ranks}, up to 256, as interleaved "
        f"schedules take them in rounds; try {2 * ranks}",
    )
    given = costs.forward, costs.inputs, costs.weights
    require(
        all(0 <= each <= _MOST_SECONDS for each in given) and costs.forward > 0,
        f"--costs are {' '.join(map(str, given))}; wanted seconds of 0 to {_MOST_SECONDS:g}, above 0 of a forward "
        "pass; try --costs 1 1 1",
    )
    drawn = [schedule for schedule in _DRAWN if schedule != "dualpipev" or micro_batches >= 2 * ranks]
    layouts = [pipeline_layout(schedule, ranks, micro_batches) for schedule in drawn]
    timelines = [simulate(layout, rank_costs(layout, costs)) for layout in layouts]
    draw_timelines(timelines, path)
    counts = [factor * ranks for factor in (1, 2, 4, 8)]
    tables = _bubbles(ranks, counts, costs), break_even_table(_DRAWN[2:], ranks, counts, costs)
    return Group(*(timeline_text(timeline) for timeline in timelines), *tables, f"drawn in {path}")


def _bubbles(ranks: int, counts: list[int], costs: PassCosts) -> Table:
    """Bubble ratio of every schedule by number of micro-batches."""
    table = Table("bubble ratio", *(f"{count} micro-batches" for count in counts), box=None, pad_edge=False)
    for schedule in _DRAWN:
        enough = [count for count in counts if schedule != "dualpipev" or count >= 2 * ranks]
        found = dict(bubble_table(schedule, ranks, enough, costs))
        table.add_row(schedule, *(f"{found[count]:.3f}" if count in found else "" for count in counts))
    return table


def draw_measured(path: Path, out_dir: Path) -> Group:
    """Draw the last traced step of the run in `out_dir`, and a simulation with the mean seconds of its passes."""
    measured = read_timeline(out_dir)
    timelines = [measured, replace(simulate(measured.layout, measured_costs(measured)), name="simulated")]
    draw_timelines(timelines, path)
    return Group(*(timeline_text(timeline) for timeline in timelines), f"drawn in {path}")
