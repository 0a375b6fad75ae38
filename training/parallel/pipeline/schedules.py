"""Pipeline schedules, in one table. A new one is a name in Schedule and an entry of SCHEDULES.

A schedule is the order in which a pipeline rank takes the passes of its stages. torch runs it by a class of its own;
the functions here give the same order from the papers, for the planner, and a test compares the two.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

Schedule = Literal["gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zero-bubble", "zbv", "dualpipev"]


class Pass(NamedTuple):
    """One pass of one micro-batch through a stage.

    `kind`: F forward; B backward; where backward is split (Qi et al. 2023) I gradients of inputs, W of weights.
    """

    kind: str
    stage: int


class RankStages(NamedTuple):
    """A pipeline rank of `ranks`, the stages that it has, and the number of micro-batches in a step."""

    ranks: int
    rank: int
    stages: list[int]
    micro_batches: int


@dataclass(frozen=True)
class PipelineSchedule:
    """A schedule, as torch, the checks of options and the planner see it."""

    torch_class: str
    """In torch.distributed.pipelining.schedules."""
    stages_per_rank: int | None
    """Pipeline stages per rank that it is defined for; None: any number above 1."""
    passes: Callable[[RankStages], list[Pass]]
    """The order of a rank's passes."""
    splits_backward: bool = False
    """True if it computes gradients of inputs and of weights separately (Qi et al. 2023)."""
    is_v_shaped: bool = False
    """True if rank r of p has stages r and 2 p - 1 - r, so that the first and the last stage share a rank."""
    fills: Literal["nothing", "ranks", "stages"] = "nothing"
    """What it needs a micro-batch for each of: with fewer its order is not defined."""

    @property
    def runs_forward_first(self) -> bool:
        """Return whether no backward pass begins before all forward passes are done."""
        return self.passes is _all_forward_first

    def least_micro_batches(self, ranks: int, stages: int) -> int:
        """Return how many it needs, of a pipeline of so many ranks and stages."""
        return {"nothing": 1, "ranks": ranks, "stages": stages}[self.fills]


def _1f1b(own: RankStages) -> list[Pass]:
    """1F1B, PipeDream's (Narayanan et al. 2019; 2021, section 2.2.1)."""
    warm = min(own.micro_batches, own.ranks - own.rank)
    order = "F" * warm + "BF" * (own.micro_batches - warm) + "B" * warm
    return [Pass(kind, own.rank) for kind in order]


def _all_forward_first(own: RankStages) -> list[Pass]:
    """GPipe (Huang et al. 2019), and with several stages breadth-first (Lamy-Poirier 2023)."""
    forward = [Pass("F", stage) for stage in own.stages for _ in range(own.micro_batches)]
    return [*forward, *(Pass("B", stage) for stage in reversed(own.stages) for _ in range(own.micro_batches))]


def _in_rounds(own: RankStages, split: bool) -> list[Pass]:
    """Interleaved 1F1B (Narayanan et al. 2021, section 2.2.2); with a `split` backward pass ZB-1P (Qi et al. 2023).

    Micro-batches pass in rounds of one per rank, each round through all stages of the rank before the next one.
    """
    stages = own.stages
    per_round = own.micro_batches // max(1, own.micro_batches // own.ranks)
    total = own.micro_batches * len(stages)
    warm = min(total, (len(stages) - 1) * per_round + (1 if split else 2) * (own.ranks - 1 - own.rank))
    forward = [Pass("F", stages[i // per_round % len(stages)]) for i in range(total)]
    order = [stages[-1 - i // per_round % len(stages)] for i in range(total)]
    passes = forward[:warm]
    weights = iter(order)
    for i, stage in enumerate(order):
        passes += [*forward[warm + i : warm + i + 1], Pass("I" if split else "B", stage)]
        if split and i >= own.rank:
            passes.append(Pass("W", next(weights)))
    return [*passes, *(Pass("W", stage) for stage in weights)] if split else passes


def _zbv(own: RankStages) -> list[Pass]:
    """ZB-V (Qi et al. 2024): each rank has a stage on the way down and one on the way up."""
    (down, up), ranks, rank = own.stages, own.ranks, own.rank
    count = max(2 * ranks - 1, own.micro_batches)
    done: dict[Pass, int] = {}
    passes: list[Pass] = []

    def take(stage: int, kinds: str) -> None:
        for kind in kinds:
            each = Pass(kind, stage)
            done[each] = done.get(each, 0) + 1
            if done[each] <= own.micro_batches:  # the order is that of enough micro-batches; the others are left out
                passes.append(each)

    def taken(kind: str, stage: int) -> int:
        return done.get(Pass(kind, stage), 0)

    take(down, "F" * (2 * (ranks - rank) - 1))
    for _ in range(rank):
        take(up, "F")
        take(down, "F")
    for _ in range(ranks - rank):
        take(up, "FIW")
    while taken("F", up) < taken("F", down) or taken("F", down) < count:
        take(down, "FIW" if taken("F", down) < count else "IW")
        take(up, "FIW")
    for _ in range(rank):
        take(down, "I")
        take(up, "I")
    for _ in range(ranks - rank):
        take(down, "IW")
    take(up, "W" * (taken("I", up) - taken("W", up)))
    take(down, "W" * (taken("I", down) - taken("W", down)))
    return passes


def _dualpipev(own: RankStages) -> list[Pass]:
    """DualPipeV: DualPipe (DeepSeek-AI 2024, section 3.2.1) on half of its ranks, with a stage on the way down and up.

    In its middle a forward pass of one stage and the backward pass of the other make a pair, which two streams of a GPU
    can overlap; torch runs the one after the other. It needs as many micro-batches as stages.
    """
    down, up = own.stages
    behind = own.ranks - own.rank - 1  # ranks after this one
    before = own.rank + 1  # ranks up to this one
    middle = own.micro_batches - 2 * own.ranks + before
    turns = (
        (2 * behind, [("F", down)]),
        (before, [("F", down), ("F", up)]),
        (behind, [("I", up), ("W", up), ("F", up)]),
        (middle, [("F", down), ("B", up), ("F", up), ("B", down)]),
        (behind, [("B", up), ("F", up), ("B", down)]),
    )
    passes = [Pass(*each) for times, turn in turns for _ in range(times) for each in turn]
    last = [up, down] * before  # the first half of them unsplit, the second half split
    inputs = last[before:] + [down] * behind
    weights = iter(inputs)
    passes += [*(Pass("B", stage) for stage in last[:before]), *(Pass("I", stage) for stage in last[before:])]
    for _ in range(behind):
        passes += [Pass("W", next(weights)), Pass("I", down)]
    return [*passes, *(Pass("W", stage) for stage in weights)]


SCHEDULES: dict[Schedule, PipelineSchedule] = {
    "gpipe": PipelineSchedule("ScheduleGPipe", 1, _all_forward_first),
    "1f1b": PipelineSchedule("Schedule1F1B", 1, _1f1b, fills="ranks"),
    "interleaved-1f1b": PipelineSchedule("ScheduleInterleaved1F1B", None, partial(_in_rounds, split=False)),
    "looped-bfs": PipelineSchedule("ScheduleLoopedBFS", None, _all_forward_first),
    "zero-bubble": PipelineSchedule("ScheduleInterleavedZeroBubble", None, partial(_in_rounds, split=True), True),
    "zbv": PipelineSchedule("ScheduleZBVZeroBubble", 2, _zbv, splits_backward=True, is_v_shaped=True),
    "dualpipev": PipelineSchedule("ScheduleDualPipeV", 2, _dualpipev, True, True, fills="stages"),
}
SPLIT_BACKWARD = tuple(name for name, schedule in SCHEDULES.items() if schedule.splits_backward)
