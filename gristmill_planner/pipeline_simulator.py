"""Pipeline simulator: when each pass of a step runs on each pipeline rank, by the schedules' own order of passes."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import le

from training.experimental.parallel_config import ParallelConfig
from training.parallel.pipeline.schedules import SCHEDULES, Pass, Schedule


@dataclass(frozen=True)
class PassCosts:
    """Seconds of the passes of one micro-batch through one stage."""

    forward: float = 1.0
    inputs: float = 1.0
    """Backward, for the gradients of the inputs."""
    weights: float = 1.0
    """Backward, for the gradients of the weights."""
    send: float = 0.0
    """From a stage to one on another rank; it does not occupy either."""

    def of(self, kind: str) -> float:
        """Return the seconds of a pass of `kind`: F, B, I or W."""
        return {"F": self.forward, "B": self.inputs + self.weights, "I": self.inputs, "W": self.weights}[kind]


@dataclass(frozen=True)
class TimedPass:
    """A pass of micro-batch `micro_batch` through `stage`, from second `start` to `end`."""

    kind: str
    stage: int
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The passes of each pipeline rank, in order."""

    layout: ParallelConfig
    ranks: list[list[TimedPass]]
    name: str = ""
    """A title, such as "measured"."""

    @property
    def seconds(self) -> float:
        """Return the seconds from the first pass to the end of the last one."""
        return max(passes[-1].end for passes in self.ranks)

    @property
    def bubble_ratio(self) -> float:
        """Return the idle seconds of the busiest rank for each second at work (Narayanan et al. 2021, section 2.2)."""
        busiest = 0.0
        for passes in self.ranks:
            busiest = max(busiest, sum(timed.end - timed.start for timed in passes))
        return self.seconds / busiest - 1

    def peak_in_flight(self, rank: int) -> int:
        """Return the micro-batches whose activations a rank keeps at the most, each counted once per stage."""
        change = {"F": 1, "B": -1, "W": -1, "I": 0}
        held = 0
        peak = 0
        for timed in self.ranks[rank]:
            held += change[timed.kind]
            peak = max(peak, held)
        return peak


def pipeline_layout(schedule: Schedule, ranks: int, micro_batches: int, virtual_stages: int = 0) -> ParallelConfig:
    """Return the layout of a pipeline alone; `virtual_stages` 0 is the schedule's default."""
    stages = SCHEDULES[schedule].stages_per_rank or max(2, virtual_stages)
    return ParallelConfig(dp=1, pp=ranks, schedule=schedule, virtual_stages=stages, micro_batches=micro_batches)


def simulate(layout: ParallelConfig, costs: list[PassCosts]) -> Timeline:
    """Run the passes of every rank in the schedule's order, each as soon as what it needs is there.

    `costs`: one per stage. A forward pass needs the stage before, a backward pass the stage after and its own forward
    pass, a pass for weights the one for inputs. Raises ValueError if the schedule waits for itself.
    """
    orders = [_with_micro_batches(layout, rank) for rank in range(layout.pp)]
    done: dict[tuple[str, int, int], float] = {}
    taken = [list[TimedPass]() for _ in orders]
    left = sum(map(len, orders))
    while left:
        before = left
        for rank, order in enumerate(orders):
            while len(taken[rank]) < len(order):
                timed = _begin(layout, costs, done, order[len(taken[rank])], taken[rank])
                if timed is None:
                    break
                taken[rank].append(timed)
                done[_direction(timed.kind), timed.stage, timed.micro_batch] = timed.end
                left -= 1
        if left == before:
            raise ValueError(f"schedule {layout.schedule} deadlocks: {layout}")
    return Timeline(layout, taken)


def _with_micro_batches(layout: ParallelConfig, rank: int) -> list[tuple[Pass, int]]:
    """Return passes with their micro-batch: each kind takes them in order, but for breadth-first backward passes.

    A whole backward pass is one for inputs and one for weights.
    """
    counts: dict[Pass, int] = defaultdict(int)
    numbered = []
    for each in layout.passes(rank):
        halves = [Pass(kind, each.stage) for kind in ("IW" if each.kind == "B" else each.kind)]
        number = counts[halves[0]]
        if layout.schedule == "looped-bfs" and each.kind == "B":
            number = layout.micro_batches - 1 - number
        numbered.append((each, number))
        for half in halves:
            counts[half] += 1
    return numbered


def _begin(
    layout: ParallelConfig,
    costs: list[PassCosts],
    done: dict[tuple[str, int, int], float],
    which: tuple[Pass, int],
    taken: list[TimedPass],
) -> TimedPass | None:
    """Return the pass with its times; None while another one is to come first."""
    (kind, stage), at = which
    ranks = layout.stage_ranks
    needs = list[tuple[str, int]]()
    if kind in "BI":
        needs.append(("F", stage))
    elif kind == "W":
        needs.append(("B", stage))
    neighbour = stage - 1 if kind == "F" else stage + 1
    if kind != "W" and 0 <= neighbour < layout.stages:
        needs.append((_direction(kind), neighbour))
    start = taken[-1].end if taken else 0.0
    for direction, other in needs:
        if (direction, other, at) not in done:
            return None
        sent = costs[other].send if ranks[other] != ranks[stage] else 0.0
        start = max(start, done[direction, other, at] + sent)
    return TimedPass(kind, stage, at, start, start + costs[stage].of(kind))


def _direction(kind: str) -> str:
    return "B" if kind == "I" else kind


def simulate_schedule(schedule: Schedule, ranks: int, micro_batches: int, costs: PassCosts) -> Timeline:
    """Simulate a schedule of a pipeline alone; `costs` are those of a rank's stages together."""
    layout = pipeline_layout(schedule, ranks, micro_batches)
    return simulate(layout, rank_costs(layout, costs))


def rank_costs(layout: ParallelConfig, costs: PassCosts) -> list[PassCosts]:
    """Return the costs of each stage, if those of a rank's stages together are `costs`."""
    v = layout.virtual_stages
    each = replace(costs, forward=costs.forward / v, inputs=costs.inputs / v, weights=costs.weights / v)
    return [each] * layout.stages


@lru_cache(4096)
def most_in_flight(
    pp: int, schedule: Schedule, virtual_stages: int, micro_batches: int, rank: int
) -> tuple[tuple[int, ...], ...]:
    """Return the micro-batches in flight at every moment of a rank that may be the fullest; see RankMemory."""
    layout = ParallelConfig(pp=pp, schedule=schedule, virtual_stages=virtual_stages, micro_batches=micro_batches)
    stages = layout.stages_of_rank(rank)
    live = dict.fromkeys(stages, 0)
    between = dict.fromkeys(stages, 0)
    moments = set()
    for kind, stage in layout.passes(rank):
        if kind == "F":
            live[stage] += 1
        elif kind == "I":
            between[stage] += 1
        else:
            live[stage] -= 1
            between[stage] -= kind == "W"
        if kind in "FI":
            moments.add((*live.values(), *between.values()))
    return tuple(moment for moment in moments if not _is_exceeded(moment, moments))


def _is_exceeded(moment: tuple[int, ...], moments: Iterable[tuple[int, ...]]) -> bool:
    """Return whether another moment has at least as many of each stage."""
    return any(moment != other and all(map(le, moment, other)) for other in moments)
