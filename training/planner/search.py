"""Search: every layout of a model on a cluster that the trainer accepts, from the fastest that fits its memory."""

from dataclasses import dataclass, replace

from gristmill.errors import UsageError
from training.planner.cost.fitted_constants import Constants
from training.planner.cost.planned_run import PlannedRun
from training.planner.cost.step_time import StepTime, step_time
from training.planner.layouts.candidates import candidates
from training.planner.layouts.least_memory import least_total
from training.planner.layouts.plan_request import PlanRequest
from training.planner.run_memory import RunMemory, run_memory

_SMALLEST = 4
_EXACT = 600  # memory estimates, which take longest, before the search gives up


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
    runs = list(candidates(request))
    if not runs:
        raise UsageError(_no_layout(request))
    timed = sorted(((step_time(run, constants), at) for at, run in enumerate(runs)), key=lambda pair: pair[0].total)
    available = request.cluster.device.memory
    found: list[Choice] = []
    tried: list[Choice] = []
    shapes: set[tuple[object, ...]] = set()
    for time, at in timed:
        run, layout = runs[at], runs[at].layout
        shape = (
            layout.dp,
            layout.tp,
            layout.tensor,
            layout.depth,
            layout.cp,
            layout.context,
            layout.pp,
            layout.schedule,
        )
        if shape in shapes or least_total(run, request.precision) > available:
            continue
        memory = run_memory(run, request.precision, available)
        choice = Choice(run, time, memory)
        tried.append(choice)
        if memory.total <= available:
            found.append(choice)
            shapes.add(shape)
        if len(found) == wanted or len(tried) == _EXACT + wanted:
            break
    if found:
        return SearchResult(found, len(runs), None)
    small = _smallest(request, runs, constants)
    fitting = sorted((each for each in small if each.memory.total <= available), key=lambda each: each.time.total)
    closest = min([*tried, *small], key=lambda choice: choice.memory.total)
    return SearchResult(fitting[:wanted], len(runs), None if fitting else closest)


def _smallest(request: PlanRequest, runs: list[PlannedRun], constants: Constants) -> list[Choice]:
    """The layouts with the lowest bounds of memory: if the fastest do not fit, one of these may."""
    low = sorted(runs, key=lambda run: least_total(run, request.precision))[:_SMALLEST]
    return [Choice(run, step_time(run, constants), run_memory(run, request.precision)) for run in low]


def _no_layout(request: PlanRequest) -> str:
    """Why no layout divides, and what would."""
    devices, batch = request.cluster.devices, request.batch
    fewer = (replace(request, cluster=replace(request.cluster, devices=n)) for n in range(devices - 1, 0, -1))
    near = next(each.cluster.devices for each in fewer if each.cluster.fills_nodes and any(candidates(each)))
    return (
        f"no layout divides {devices} GPUs: data-parallel replicas must divide data.batch_size {batch}, "
        f"tensor-parallel ranks the heads ({request.model.heads}, {request.model.kv_heads} of keys and values) and the "
        f"GPUs of a node, and pipeline ranks be at most {request.model.layers}; try --gpus {near}, or a batch_size "
        f"of {-(-batch // devices) * devices}"
    )
