"""Search: every layout of a model on a cluster that the trainer accepts, from the fastest that fits its memory.

A family's bound of time is below each of its layouts, by which most of them are passed over. Where nothing fits, the
error says by how much, and the least change with which something does.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import count

from gristmill.errors import UsageError
from gristmill.wording import count_of
from gristmill_planner.candidates import LayoutFamily, families
from gristmill_planner.fitted_constants import Constants
from gristmill_planner.hardware import DEVICES, Cluster
from gristmill_planner.planned_run import PlannedRun, PlanRequest
from gristmill_planner.run_memory import RunMemory, run_memory
from gristmill_planner.step_time import PassTime, StepTime, rank_times, send_time, step_time
from training.experimental.parallel_config import ParallelConfig
from training.parallel.pipeline.schedules import SPLIT_BACKWARD


@dataclass(frozen=True)
class PlannedLayout:
    """A layout, its step time and its memory."""

    run: PlannedRun
    time: StepTime
    memory: RunMemory


@dataclass(frozen=True)
class SearchResult:
    """The fastest layouts that fit, and how many were considered."""

    choices: list[PlannedLayout]
    considered: int


def search(request: PlanRequest, constants: Constants, count: int = 5) -> SearchResult:
    """Find the `count` fastest layouts, each of other degrees or of another schedule.

    Raises UsageError if no layout divides GPUs, model and batch, or if none fits.
    """
    every = list(families(request))
    if not every:
        raise UsageError(_no_layout(request))
    considered = sum(len(family.schedules) * len(family.stages) for family in every)
    choices: list[PlannedLayout] = []
    shapes: set[ParallelConfig] = set()
    for time, run in _by_time(request, every, constants):
        shape = replace(run.layout, zero=0, zero_group=1, virtual_stages=1, micro_batches=1)
        if shape not in shapes:
            shapes.add(shape)
            choices.append(PlannedLayout(run, time, run_memory(run)))
        if len(choices) == count:
            break
    if not choices:
        raise UsageError(_nothing_fits(request, every))
    return SearchResult(choices, considered)


def _by_time(
    request: PlanRequest, every: list[LayoutFamily], constants: Constants
) -> Iterator[tuple[StepTime, PlannedRun]]:
    """All runs that fit, from the fastest: a family's are timed when its bound is the least of what is left."""
    known: dict[tuple[object, ...], tuple[PassTime, PassTime]] = {}
    queue: list[tuple[float, int, StepTime | None, LayoutFamily | PlannedRun]] = []
    of_family = []
    number = count()  # so that the queue compares nothing else
    for family in every:
        run = next(family.runs(request, "1f1b", 1))
        key = replace(family.degrees, dp=1, pp=1, micro_batches=1), run.micro_batch, run.recompute
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


def _fitting(request: PlanRequest, family: LayoutFamily) -> Iterator[PlannedRun]:
    """Yield the runs that fit, from the ZeRO stage that shards least, which comes first where others are as fast."""
    available = request.available
    for schedule in family.schedules:
        for run in reversed(list(family.runs(request, *schedule))):
            if run_memory(run, available).total <= available:
                yield run


def closest_to_fitting(request: PlanRequest, every: list[LayoutFamily]) -> tuple[PlannedRun, float]:
    """The layout that takes least memory, of those that shard most, and its bytes on the fullest rank."""
    runs = (next(family.runs(request, *schedule)) for family in every for schedule in family.schedules)
    closest = next(runs)
    least = run_memory(closest).total
    for run in runs:
        if (total := run_memory(run, least).total) < least:
            closest = run
            least = total
    return closest, least


def _no_layout(request: PlanRequest) -> str:
    """Why no layout divides, and what would."""
    devices = request.cluster.devices
    batch = request.batch
    fewer = (replace(request, cluster=replace(request.cluster, devices=n)) for n in range(devices - 1, 0, -1))
    near = next(each.cluster.devices for each in fewer if each.cluster.fills_nodes and any(families(each)))
    return (
        f"no layout divides {count_of(devices, 'GPU')}: data-parallel replicas must divide data.batch_size {batch}, "
        f"tensor-parallel ranks the heads ({request.model.heads}; {request.model.kv_heads} of keys and values, or be a "
        f"multiple of these) and the GPUs of a node, and pipeline ranks be at most {request.model.layers}; try --gpus "
        f"{near}, or a batch_size of {-(-batch // devices) * devices}"
    )


_ROUNDING = 1 - 1e-9


def least_time(family: LayoutFamily, run: PlannedRun, times: tuple[PassTime, PassTime], constants: Constants) -> float:
    """Seconds of a step that no layout of `family` is below, of which `run` has one stage a rank.

    The busiest rank has no fewer layers than an even division gives, and takes no less than the mean. A step takes it
    once a micro-batch, and the other ranks' sum once, or a share of that by the schedule; the more the busiest takes,
    the longer the step. Communication between replicas and the update are left out.
    """
    layer, head = (each.forward + each.backward for each in times)
    layers = run.model.layers
    pp = run.layout.pp
    count = run.layout.micro_batches
    whole = layers * layer + head
    busiest = max(-(-layers // pp) * layer, whole / pp)
    sent = send_time(run, constants)
    forward = times[0].forward / layer
    share = min((forward if schedule in SPLIT_BACKWARD else 1) / virtual for schedule, virtual in family.schedules)
    waits = share * (whole - busiest + (pp - 1) * sent)
    return _ROUNDING * (count * (busiest + sent) + waits + constants.step)


_GIB = 1 << 30
_TIMES = (2, 4, 8, 16, 32, 64)  # as many GPUs


def _nothing_fits(request: PlanRequest, every: list[LayoutFamily]) -> str:
    """By how much no layout fits, and the least change with which one does."""
    cluster, (run, total) = request.cluster, closest_to_fitting(request, every)
    text = (
        f"no layout fits {cluster.devices} x {cluster.device.name}: the smallest, {run.layout.describe()} with "
        f"recompute {run.recompute}, takes {total / _GIB:.1f} GiB a GPU, "
        f"{(total - request.available) / _GIB:.1f} too many"
    )
    doubled = (replace(cluster, devices=times * cluster.devices) for times in _TIMES)
    more = next((each for each in doubled if each.fills_nodes and _fits(request, each)), None)
    if more is not None:
        more = next((each for each in _fewer_devices(cluster, more) if _fits(request, each)), more)
    larger = sorted(DEVICES.values(), key=lambda device: device.memory)
    others = (replace(cluster, device=device) for device in larger if device.memory > cluster.device.memory)
    other = next((each for each in others if _fits(request, each)), None)
    changes = [f"--gpus {more.devices}"] if more is not None else []
    changes += [f"--gpu {other.device.name}"] if other is not None else []
    return f"{text}; try {', or '.join(changes) or 'a smaller model'}"


def _fewer_devices(cluster: Cluster, fits: Cluster) -> Iterator[Cluster]:
    """Three sizes between one that fits and half of it, which does not; of whole nodes."""
    half = fits.devices // 2
    for quarters in (1, 2, 3):
        devices = half + quarters * half // 4
        if devices > cluster.devices and 4 * devices == (4 + quarters) * half and devices % cluster.per_node == 0:
            yield replace(cluster, devices=devices)


def _fits(request: PlanRequest, cluster: Cluster) -> bool:
    """Whether a layout of the cluster fits; False also where none divides it."""
    request = replace(request, cluster=cluster)
    for family in families(request):
        for _ in _fitting(request, family):
            return True
    return False
