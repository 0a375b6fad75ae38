"""Search: every layout of a model on a cluster that the trainer accepts, from the fastest that fits its memory.

What is shown of them begins with the simplest of those that are about as fast as any, and goes on with other kinds.

A family's bound of time is below each of its layouts, by which most of them are passed over. Where nothing fits, the
error says by how much, and the least change with which something does.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import chain, count
from math import inf

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
    considered, layouts = layouts_by_time(request, constants)
    choices: list[PlannedLayout] = []
    shapes: set[ParallelConfig] = set()
    for choice in layouts:
        shape = replace(choice.run.layout, zero=0, zero_group=1, virtual_stages=1, micro_batches=1)
        if shape not in shapes:
            shapes.add(shape)
            choices.append(choice)
        if len(choices) == count:
            break
    return SearchResult(choices, considered)


def layouts_by_time(request: PlanRequest, constants: Constants) -> tuple[int, Iterator[PlannedLayout]]:
    """Return how many layouts there are, and those that fit, from the fastest on; one at least.

    Raises UsageError as `search`.
    """
    every = list(families(request))
    if not every:
        raise UsageError(_no_layout(request))
    considered = sum(len(family.schedules) * len(family.stages) for family in every)
    runs = _by_time(request, every, constants)
    first = next(runs, None)
    if first is None:
        raise UsageError(_nothing_fits(request, every))
    layouts = (PlannedLayout(run, time, run_memory(run)) for time, run in chain([first], runs))
    return considered, layouts


TIE = 0.05
"""Share of a step's time within which layouts count as equally fast: the error where nothing was fitted."""
_FAR = 1.5  # times as long as the fastest: slower layouts are not worth a line
_RECOMPUTE = {"none": 0, "selective": 1, "full": 2}

Kind = tuple[str, bool, str, bool]


@dataclass(frozen=True)
class Choices:
    """The layouts to show, each of another kind; the `fastest` of all, and how many were considered."""

    shown: list[PlannedLayout]
    fastest: PlannedLayout
    considered: int


def kind_of(layout: ParallelConfig) -> Kind:
    """Return the kinds of parallelism that a layout has besides data parallelism: tensor, pipeline, context, expert."""
    tensor = layout.tensor if layout.tp > 1 else ""
    context = layout.context if layout.cp > 1 else ""
    return tensor, layout.pp > 1, context, layout.ep > 1


def complexity(run: PlannedRun) -> tuple[int, ...]:
    """Return how much a layout asks for, to compare: kinds of parallelism first, then what each of them adds."""
    layout = run.layout
    tensor, is_pipeline, context, has_experts = kind_of(layout)
    kinds = bool(tensor) + is_pipeline + bool(context) + has_experts + layout.on_grid
    return (
        kinds,
        is_pipeline,
        bool(context),
        layout.pp * layout.virtual_stages,
        layout.tp * layout.cp,
        layout.zero,
        _RECOMPUTE[run.recompute],
        layout.micro_batches,
    )


def choose_layouts(request: PlanRequest, constants: Constants, count: int = 5) -> Choices:
    """Choose the simplest layout within TIE of the fastest, then the fastest of each other kind, `count` in all.

    Raises UsageError if no layout divides GPUs, model and batch, or if none fits.
    """
    considered, layouts = layouts_by_time(request, constants)
    fastest = next(layouts)
    first = fastest
    by_kind = {kind_of(fastest.run.layout): fastest}
    for choice in layouts:
        is_tied = choice.time.total <= (1 + TIE) * fastest.time.total
        if choice.time.total > _FAR * fastest.time.total or (not is_tied and len(by_kind) > count):
            break
        if is_tied and complexity(choice.run) < complexity(first.run):
            first = choice
        by_kind.setdefault(kind_of(choice.run.layout), choice)
    others = [choice for kind, choice in by_kind.items() if kind != kind_of(first.run.layout)]
    return Choices([first, *others][:count], fastest, considered)


def describe_choice(choices: Choices) -> str:
    """Say why the first layout is not the fastest; nothing where it is."""
    first = choices.shown[0]
    fastest = choices.fastest
    if first is fastest:
        return ""
    longer = 100 * (1 - fastest.time.total / first.time.total)
    return (
        f"The first is the simplest within {100 * TIE:.0f} % of the fastest on paper, {fastest.run.layout.describe()} "
        f"with recompute {fastest.run.recompute}, which takes {longer:.1f} % less: the planner's error is larger."
    )


def _by_time(
    request: PlanRequest, every: list[LayoutFamily], constants: Constants
) -> Iterator[tuple[StepTime, PlannedRun]]:
    """Yield all runs that fit, from the fastest: a family's are timed when its bound is the least of what is left."""
    known: dict[tuple[object, ...], tuple[PassTime, PassTime]] = {}
    queue: list[tuple[float, int, StepTime | None, LayoutFamily | PlannedRun]] = []
    times_of_families = []
    number = count()  # so that the queue compares nothing else
    for family in every:
        run = next(family.runs(request, "1f1b", 1))
        degrees = replace(family.degrees, dp=1, pp=1, micro_batches=1)
        key = (degrees, run.micro_batch, run.recompute)
        if key not in known:
            known[key] = rank_times(run, constants)
        times_of_families.append(known[key])
        queue.append((least_time(family, run, known[key], constants), next(number), None, family))
    heapify(queue)
    while queue:
        _, index, time, entry = heappop(queue)
        if isinstance(entry, PlannedRun):
            assert time is not None
            yield time, entry
            continue
        for run in _fitting(request, entry):
            seconds = step_time(run, constants, times_of_families[index])
            heappush(queue, (seconds.total, next(number), seconds, run))


def _fitting(request: PlanRequest, family: LayoutFamily) -> Iterator[PlannedRun]:
    """Yield the runs that fit, from the ZeRO stage that shards least, which comes first where others are as fast."""
    available = request.available
    for schedule in family.schedules:
        for run in reversed(list(family.runs(request, *schedule))):
            if run_memory(run, available).total <= available:
                yield run


def closest_to_fitting(request: PlanRequest, every: list[LayoutFamily]) -> tuple[PlannedRun, float]:
    """Return the layout that takes least memory, of those that shard most, and its bytes on the fullest rank."""
    closest: PlannedRun | None = None
    smallest = inf
    for family in every:
        for schedule in family.schedules:
            run = next(family.runs(request, *schedule))
            total = run_memory(run, smallest).total
            if total < smallest:
                closest = run
                smallest = total
    assert closest is not None, "the families have no layout"
    return closest, smallest


def _no_layout(request: PlanRequest) -> str:
    """Return why no layout divides, and what would."""
    devices = request.cluster.devices
    batch = request.batch
    near = devices - 1
    while not _divides(replace(request, cluster=replace(request.cluster, devices=near))):
        near -= 1
    return (
        f"no layout divides {count_of(devices, 'GPU')}: data-parallel replicas must divide data.batch_size {batch}, "
        f"tensor-parallel ranks the heads ({request.model.heads}; {request.model.kv_heads} of keys and values, or be a "
        f"multiple of these) and the GPUs of a node, and pipeline ranks be at most {request.model.layers}; try --gpus "
        f"{near}, or a batch_size of {-(-batch // devices) * devices}"
    )


def _divides(request: PlanRequest) -> bool:
    """Return whether there is a layout for a cluster of so many devices, which one has at least."""
    return request.cluster.fills_nodes and any(families(request))


_ROUNDING = 1 - 1e-9


def least_time(family: LayoutFamily, run: PlannedRun, times: tuple[PassTime, PassTime], constants: Constants) -> float:
    """Return seconds of a step that no layout of `family` is below, of which `run` has one stage a rank.

    The busiest rank has no fewer layers than an even division gives, and takes no less than the mean. A step takes it
    once a micro-batch, and the other ranks' sum once, or a share of that by the schedule; the more the busiest takes,
    the longer the step. Communication between replicas and the update are left out.
    """
    of_layer, of_head = times
    layer = of_layer.forward + of_layer.backward
    head = of_head.forward + of_head.backward
    layers = run.model.layers
    pp = run.layout.pp
    count = run.layout.micro_batches
    whole = layers * layer + head
    busiest = max(-(-layers // pp) * layer, whole / pp)
    sent = send_time(run, constants)
    share = inf
    for schedule, virtual_stages in family.schedules:
        waited_for = of_layer.forward / layer if schedule in SPLIT_BACKWARD else 1
        share = min(share, waited_for / virtual_stages)
    waits = share * (whole - busiest + (pp - 1) * sent)
    return _ROUNDING * (count * (busiest + sent) + waits + constants.step)


_GIB = 1 << 30
_TIMES = (2, 4, 8, 16, 32, 64)  # as many GPUs


def _nothing_fits(request: PlanRequest, every: list[LayoutFamily]) -> str:
    """Return by how much no layout fits, and the least change with which one does."""
    cluster = request.cluster
    run, total = closest_to_fitting(request, every)
    text = (
        f"no layout fits {cluster.devices} x {cluster.device.name}: the smallest, {run.layout.describe()} with "
        f"recompute {run.recompute}, takes {total / _GIB:.1f} GiB a GPU, "
        f"{(total - request.available) / _GIB:.1f} too many"
    )
    changes = []
    more = _more_devices(request)
    if more is not None:
        changes.append(f"--gpus {more.devices}")
    larger = _larger_devices(request)
    if larger is not None:
        changes.append(f"--gpu {larger.device.name}")
    return f"{text}; try {', or '.join(changes) or 'a smaller model'}"


def _more_devices(request: PlanRequest) -> Cluster | None:
    """Return the smallest of some larger clusters of the same devices on which a layout fits; None if none does."""
    cluster = request.cluster
    for times in _TIMES:
        more = replace(cluster, devices=times * cluster.devices)
        if more.fills_nodes and _fits(request, more):
            for fewer in _fewer_devices(cluster, more):
                if _fits(request, fewer):
                    return fewer
            return more
    return None


def _larger_devices(request: PlanRequest) -> Cluster | None:
    """Return the cluster with the devices of least memory on which a layout fits; None if it fits on none."""
    cluster = request.cluster
    for device in sorted(DEVICES.values(), key=lambda device: device.memory):
        larger = replace(cluster, device=device)
        if device.memory > cluster.device.memory and _fits(request, larger):
            return larger
    return None


def _fewer_devices(cluster: Cluster, fits: Cluster) -> Iterator[Cluster]:
    """Yield three sizes between one that fits and half of it, which does not; of whole nodes."""
    half = fits.devices // 2
    for quarters in (1, 2, 3):
        devices = half + quarters * half // 4
        if devices > cluster.devices and 4 * devices == (4 + quarters) * half and devices % cluster.per_node == 0:
            yield replace(cluster, devices=devices)


def _fits(request: PlanRequest, cluster: Cluster) -> bool:
    """Return whether a layout of the cluster fits; False also where none divides it."""
    request = replace(request, cluster=cluster)
    for family in families(request):
        for _ in _fitting(request, family):
            return True
    return False
