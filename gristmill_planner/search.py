"""Search: every layout of a model on a cluster that the trainer accepts, from the fastest that fits its memory."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import count

from gristmill.errors import UsageError
from gristmill_planner.cost.fitted_constants import Constants
from gristmill_planner.cost.planned_run import PlannedRun
from gristmill_planner.cost.step_time import PassTime, StepTime, rank_times, step_time
from gristmill_planner.layouts.candidates import Family, families
from gristmill_planner.layouts.least_time import least_time
from gristmill_planner.layouts.plan_request import PlanRequest
from gristmill_planner.run_memory import RunMemory, run_memory
from training.experimental.parallel_config import ParallelConfig


@dataclass(frozen=True)
class Choice:
    """A layout, its step time and its memory."""

    run: PlannedRun
    time: StepTime
    memory: RunMemory


@dataclass(frozen=True)
class SearchResult:
    """The fastest layouts that fit; and the one that comes closest to fitting, if none does."""

    choices: list[Choice]
    considered: int
    closest: Choice | None


def search(request: PlanRequest, constants: Constants, wanted: int = 5) -> SearchResult:
    """Find the `wanted` fastest layouts, each of other degrees or of another schedule.

    Raises UsageError if no layout divides GPUs, model and batch.
    """
    every = list(families(request))
    if not every:
        raise UsageError(_no_layout(request))
    considered = sum(len(family.schedules) * len(family.stages) for family in every)
    choices: list[Choice] = []
    shapes: set[tuple[object, ...]] = set()
    for time, run in _by_time(request, every, constants):
        shape = _shape(run.layout)
        if shape not in shapes:
            shapes.add(shape)
            choices.append(Choice(run, time, run_memory(run, request.precision)))
        if len(choices) == wanted:
            break
    return SearchResult(choices, considered, None if choices else _closest(request, every, constants))


def _by_time(request: PlanRequest, every: list[Family], constants: Constants) -> Iterator[tuple[StepTime, PlannedRun]]:
    """All runs that fit, from the fastest: a family's are timed when its bound is the least of what is left."""
    known: dict[tuple[object, ...], tuple[PassTime, PassTime]] = {}
    queue: list[tuple[float, int, StepTime | None, Family | PlannedRun]] = []
    of_family = []
    number = count()  # so that the queue compares nothing else
    for family in every:
        run = next(family.runs(request, "1f1b", 1))
        key = (_divided(run.layout), run.micro_batch, run.recompute)
        times = known.get(key) or known.setdefault(key, rank_times(run, constants))
        of_family.append(times)
        queue.append((least_time(family, run, times, constants), next(number), None, family))
    heapify(queue)
    while queue:
        _, at, time, each = heappop(queue)
        if isinstance(each, PlannedRun):
            assert time is not None
            yield time, each
            continue
        for run in _fitting(request, each):
            found = step_time(run, constants, of_family[at])
            heappush(queue, (found.total, next(number), found, run))


def _fitting(request: PlanRequest, family: Family) -> Iterator[PlannedRun]:
    """Those that fit, from the ZeRO stage that shards least, which comes first where others are as fast."""
    available = request.cluster.device.memory
    for schedule in family.schedules:
        for run in reversed(list(family.runs(request, *schedule))):
            if run_memory(run, request.precision, available).total <= available:
                yield run


def _divided(layout: ParallelConfig) -> tuple[object, ...]:
    """How a layer is divided."""
    return layout.tp, layout.sequence_parallel, layout.tensor, layout.depth, layout.cp, layout.context


def _shape(layout: ParallelConfig) -> tuple[object, ...]:
    return *_divided(layout), layout.dp, layout.pp, layout.schedule


def _closest(request: PlanRequest, every: list[Family], constants: Constants) -> Choice:
    """The layout that takes least memory, of those that shard most."""
    runs = (next(family.runs(request, *schedule)) for family in every for schedule in family.schedules)
    run = min(runs, key=lambda run: run_memory(run, request.precision).total)
    return Choice(run, step_time(run, constants), run_memory(run, request.precision))


def _no_layout(request: PlanRequest) -> str:
    """Why no layout divides, and what would."""
    devices, batch = request.cluster.devices, request.batch
    fewer = (replace(request, cluster=replace(request.cluster, devices=n)) for n in range(devices - 1, 0, -1))
    near = next(each.cluster.devices for each in fewer if each.cluster.fills_nodes and any(families(each)))
    return (
        f"no layout divides {devices} GPUs: data-parallel replicas must divide data.batch_size {batch}, "
        f"tensor-parallel ranks the heads ({request.model.heads}, {request.model.kv_heads} of keys and values) and the "
        f"GPUs of a node, and pipeline ranks be at most {request.model.layers}; try --gpus {near}, or a batch_size "
        f"of {-(-batch // devices) * devices}"
    )
