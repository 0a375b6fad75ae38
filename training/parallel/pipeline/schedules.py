"""Pipeline passes: the order in which a pipeline rank takes the passes of its stages, from the schedules' papers."""

from collections.abc import Callable
from typing import NamedTuple

from training.parallel.layout import ParallelConfig


class Pass(NamedTuple):
    """One pass of one micro-batch through a stage.

    `kind`: F forward; B backward; where backward is split (Qi et al. 2023) I gradients of inputs, W of weights.
    """

    kind: str
    stage: int


def pipeline_passes(layout: ParallelConfig, rank: int) -> list[Pass]:
    """Passes of pipeline rank `rank` in a step, in order; `layout` is resolved. Without a pipeline: F and B in turn."""
    stages, count = layout.stages_of_rank(rank), layout.micro_batches
    if layout.pp == 1:
        return [Pass(kind, 0) for _ in range(count) for kind in "FB"]
    if layout.schedule == "1f1b":  # Narayanan et al. 2021, section 2.2.1
        warm = min(count, layout.pp - rank)
        return [Pass(kind, rank) for kind in "F" * warm + "BF" * (count - warm) + "B" * warm]
    if layout.schedule in ("gpipe", "looped-bfs"):  # Huang et al. 2019; Lamy-Poirier 2023
        forward = [Pass("F", stage) for stage in stages for _ in range(count)]
        return [*forward, *(Pass("B", stage) for stage in reversed(stages) for _ in range(count))]
    if layout.schedule in ("interleaved-1f1b", "zero-bubble"):
        return _interleaved(layout, rank)
    if layout.schedule == "dualpipev":
        return _dualpipev(layout, rank)
    return _zbv(layout, rank)


def _interleaved(layout: ParallelConfig, rank: int) -> list[Pass]:
    """Interleaved 1F1B (Narayanan et al. 2021, section 2.2.2), and with a split backward pass ZB-1P (Qi et al. 2023).

    Micro-batches pass in rounds of one per rank, each round through all stages of the rank before the next one.
    """
    stages, split = layout.stages_of_rank(rank), layout.schedule == "zero-bubble"
    per_round = layout.micro_batches // max(1, layout.micro_batches // layout.pp)
    total = layout.micro_batches * len(stages)
    warm = min(total, (len(stages) - 1) * per_round + (1 if split else 2) * (layout.pp - 1 - rank))
    forward = [Pass("F", stages[i // per_round % len(stages)]) for i in range(total)]
    order = [stages[-1 - i // per_round % len(stages)] for i in range(total)]
    passes, weights = forward[:warm], iter(order)
    for i, stage in enumerate(order):
        passes += [*forward[warm + i : warm + i + 1], Pass("I" if split else "B", stage)]
        if split and i >= rank:
            passes.append(Pass("W", next(weights)))
    return [*passes, *(Pass("W", stage) for stage in weights)] if split else passes


def _zbv(layout: ParallelConfig, rank: int) -> list[Pass]:
    """ZB-V (Qi et al. 2024): each rank has a stage on the way down and one on the way up."""
    down, up = layout.stages_of_rank(rank)
    count, pp = layout.micro_batches, layout.pp
    done: dict[Pass, int] = {}
    passes: list[Pass] = []

    def take(stage: int, kinds: str) -> None:
        for kind in kinds:
            each = Pass(kind, stage)
            done[each] = done.get(each, 0) + 1
            if done[each] <= count:  # the order is that of enough micro-batches; the others are left out
                passes.append(each)

    _zbv_order(take, lambda kind, stage: done.get(Pass(kind, stage), 0), (down, up), (pp, rank, max(2 * pp - 1, count)))
    return passes


def _zbv_order(
    take: Callable[[int, str], None],
    taken: Callable[[str, int], int],
    stages: tuple[int, int],
    sizes: tuple[int, int, int],
) -> None:
    """Take the passes of `stages` (down, up) for `sizes` (ranks, rank, micro-batches); `taken` counts them."""
    (down, up), (pp, rank, count) = stages, sizes
    take(down, "F" * (2 * (pp - rank) - 1))
    for _ in range(rank):
        take(up, "F")
        take(down, "F")
    for _ in range(pp - rank):
        take(up, "FIW")
    while taken("F", up) < taken("F", down) or taken("F", down) < count:
        take(down, "FIW" if taken("F", down) < count else "IW")
        take(up, "FIW")
    for _ in range(rank):
        take(down, "I")
        take(up, "I")
    for _ in range(pp - rank):
        take(down, "IW")
    take(up, "W" * (taken("I", up) - taken("W", up)))
    take(down, "W" * (taken("I", down) - taken("W", down)))


def _dualpipev(layout: ParallelConfig, rank: int) -> list[Pass]:
    """DualPipeV: DualPipe (DeepSeek-AI 2024, section 3.2.1) on half of its ranks, with a stage on the way down and up.

    In its middle a forward pass of one stage and the backward pass of the other make a pair, which two streams of a GPU
    can overlap; torch runs the one after the other. It needs as many micro-batches as stages.
    """
    down, up = layout.stages_of_rank(rank)
    behind, own = layout.pp - rank - 1, rank + 1  # ranks further down, and those up to this one
    middle = layout.micro_batches - layout.stages + own
    turns = (
        (2 * behind, [("F", down)]),
        (own, [("F", down), ("F", up)]),
        (behind, [("I", up), ("W", up), ("F", up)]),
        (middle, [("F", down), ("B", up), ("F", up), ("B", down)]),
        (behind, [("B", up), ("F", up), ("B", down)]),
    )
    passes = [Pass(*each) for times, turn in turns for _ in range(times) for each in turn]
    last = [up, down] * own  # the first half of them in whole, the second half split
    inputs = last[own:] + [down] * behind
    weights = iter(inputs)
    passes += [*(Pass("B", stage) for stage in last[:own]), *(Pass("I", stage) for stage in last[own:])]
    for _ in range(behind):
        passes += [Pass("W", next(weights)), Pass("I", down)]
    return [*passes, *(Pass("W", stage) for stage in weights)]
