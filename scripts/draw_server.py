"""The picture of a server and its workers: docs/pictures/server.svg; draw_pictures.py draws it with the others."""

from typing import NamedTuple

from matplotlib.figure import Figure

from scripts.drawing import DATA, LINE, MODEL, NOTE, RANKS, UPDATE, box_with, new_figure
from training.experimental.server.part_queue import Part, PartQueue

_STEPS, _PARTS, _SECONDS = 5, 2, (1.0, 2.5)  # what a part takes each of the workers
_SHADES = (DATA, MODEL, RANKS, UPDATE, "#eeeeee")  # of the steps


class _Work(NamedTuple):
    worker: int
    part: Part
    start: float
    version: int  # updates that its weights have


def draw_server() -> Figure:
    """Two workers, one of them slow, without staleness and with one step of it: what PartQueue gives them when."""
    figure, axes = new_figure(7.2, 3.1, (-3.2, 14.2), (-8.3, 0.9))
    for number, staleness in enumerate((0, 1)):
        done, updates = _work(staleness)
        top = -4.0 * number
        axes.text(0, top + 0.35, f"staleness {staleness}", size=8, va="center")
        for row, name in enumerate(("fast worker", "slow worker", "updates")):
            axes.text(-0.2, top - row - 0.5, name, ha="right", va="center", size=8)
        for each in done:
            (step, part), seconds = each.part, _SECONDS[each.worker]
            corner = each.start, top - each.worker - 0.95
            box_with(axes, corner, (seconds, 0.9), _SHADES[step], f"{step + 1}{'ab'[part]}\nw{each.version}", 6.5)
        for update, time in enumerate(updates):
            axes.plot([time, time], [top - 2.3, top - 1.98], color=LINE, linewidth=0.7)
            axes.text(time, top - 2.5, f"w{update + 1}", ha="center", va="center", size=7)
    note = "1a, 1b: the parts of step 1's batch; w0: weights after no update; time goes to the right; white: waits"
    axes.text(-3.0, -7.9, note, **NOTE | {"size": 7.5})
    return figure


def _work(staleness: int) -> tuple[list[_Work], list[float]]:
    """What is computed when, until all steps are done, and the times of the updates."""
    queue = PartQueue(_STEPS, _PARTS, staleness)
    done, busy, updates, time, gradients = list[_Work](), dict[int, _Work](), list[float](), 0.0, 0
    while queue.oldest < queue.steps:
        for worker in set(range(len(_SECONDS))) - set(busy):
            if (part := queue.take(worker)) is not None:
                busy[worker] = _Work(worker, part, time, queue.updates)
        first = min(busy.values(), key=lambda work: work.start + _SECONDS[work.worker])
        time = first.start + _SECONDS[first.worker]
        queue.give(first.worker, first.part)
        done.append(busy.pop(first.worker))
        gradients += 1
        if gradients % _PARTS == 0:
            queue.updates += 1
            updates.append(time)
    return done, updates
