"""Candidates: every layout of a model on a cluster that the trainer accepts."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from math import gcd, isqrt
from typing import Literal

from gristmill.errors import UsageError
from gristmill_planner.planned_run import GRISTMILL, PlannedRun, PlanRequest, Software, layers_of_stages
from training.experimental.parallel_config import ParallelConfig
from training.memory.memory_config import Recompute
from training.model.layer_options import check_blocks
from training.parallel.pipeline.schedules import SCHEDULES, SPLIT_BACKWARD, Schedule
from training.parallel.tensor.options import possible_sizes

_MOST_SEQUENCES = 32  # of a micro-batch
_MOST_VIRTUAL = 4
_SIDES = range(2, 9)  # of a grid
_MOST_CUBE = 64
_FEWEST_TOKENS = 1024  # of a sequence on a rank: with fewer, data parallelism divides as much for less


@dataclass(frozen=True)
class LayoutFamily:
    """Layouts that differ in schedule, virtual stages and ZeRO stage alone: a layer takes as long in all of them."""

    degrees: ParallelConfig
    """Without the schedule."""
    recompute: Recompute
    schedules: tuple[tuple[Schedule, int], ...]
    """With their stages per rank."""
    stages: tuple[Literal[0, 1, 2, 3], ...]
    """Of ZeRO."""

    def runs(self, request: PlanRequest, schedule: Schedule, virtual: int) -> Iterator[PlannedRun]:
        """By ZeRO stage, from the one that shards most."""
        layers = layers_of_stages(request.model, self.degrees.pp * virtual, request.seq_len)
        for zero in reversed(self.stages):
            layout = replace(
                self.degrees, zero=zero, zero_group=self.degrees.dp if zero else 1, schedule=schedule,
                virtual_stages=virtual,
            )  # fmt: skip
            yield request.run(layout, self.recompute, layers)


def candidates(request: PlanRequest) -> Iterator[PlannedRun]:
    """Every layout that divides GPUs, model and batch evenly, and that the trainer's own checks accept."""
    for family in families(request):
        for schedule in family.schedules:
            yield from family.runs(request, *schedule)


def families(request: PlanRequest) -> Iterator[LayoutFamily]:
    """Yield the families of `candidates`. 1D tensor parallelism is within a node, with sequences divided too."""
    devices = request.cluster.devices
    model = request.model
    for divided in _divisions(request):
        ranks = divided.ranks_of_replica
        recomputations = _recomputations(request, divided)
        for pp in divisors(devices // ranks):
            dp = devices // (ranks * pp)
            if pp > model.layers or request.batch % dp:
                continue
            for micro in divisors(request.batch // dp):
                if micro <= _MOST_SEQUENCES and micro % divided.batch_shards == 0:
                    count = request.batch // dp // micro
                    whole = replace(divided, dp=dp, pp=pp, micro_batches=count)
                    schedules = tuple(_schedules(request, pp, count))
                    stages = _zero_stages(request.software, whole)
                    for ep in divisors(gcd(model.experts, whole.replicas)) if model.experts else [1]:
                        degrees = replace(whole, ep=ep)
                        for recompute in recomputations if schedules else ():
                            yield LayoutFamily(degrees, recompute, schedules, stages)


def _divisions(request: PlanRequest) -> Iterator[ParallelConfig]:
    """Each way of dividing matrices and sequences within a replica, as a layout of one stage and all replicas."""
    sp = request.software == GRISTMILL
    within_node = gcd(request.cluster.per_node, request.cluster.devices)
    kinds = [ParallelConfig(tp=tp, sequence_parallel=tp > 1 and request.seq_len % tp == 0 and sp)
             for tp in possible_sizes(request.model) if within_node % tp == 0]  # fmt: skip
    if request.software == GRISTMILL:
        grids = [ParallelConfig(tp=q * q, tensor="2d") for q in _SIDES]
        grids += [ParallelConfig(tp=q * q * d, tensor="2.5d", depth=d) for q in _SIDES for d in range(2, q + 1)]
        grids += [ParallelConfig(tp=side**3, tensor="3d") for side in _SIDES if side**3 <= _MOST_CUBE]
        longer = [cp for cp in divisors(request.seq_len // _FEWEST_TOKENS or 1) if cp > 1]
        contexts = [replace(kind, cp=cp, context=c) for cp in longer for kind in kinds for c in ("ring", "ulysses")]
        kinds += [each for each in (*grids, *contexts) if _is_accepted(request, each)]
    yield from kinds


def _is_accepted(request: PlanRequest, divided: ParallelConfig) -> bool:
    devices = request.cluster.devices
    ranks = divided.ranks_of_replica
    if devices % ranks:
        return False
    try:
        divided.check_run(request.precision, "none", request.compiled)
        divided.resolve(devices, request.model, request.seq_len)
    except UsageError:
        return False
    return True


def _zero_stages(software: Software, degrees: ParallelConfig) -> tuple[Literal[0, 1, 2, 3], ...]:
    """Return ZeRO stages to try. In a pipeline ZeRO-3 gathers a stage's weights at once: ZeRO-1's memory, more time."""
    stages = software.zero if degrees.replicas > 1 else (0,)
    return tuple(zero for zero in stages if zero < 3 or degrees.pp == 1)


def _recomputations(request: PlanRequest, divided: ParallelConfig) -> list[Recompute]:
    """Return the kinds of recomputation that the trainer accepts with a division."""
    found = []
    for recompute in request.software.recompute:
        with suppress(UsageError):
            check_blocks(request.model, recompute, request.compiled)
            divided.check_run("bf16", recompute, request.compiled)
            found.append(recompute)
    return found


def _schedules(request: PlanRequest, pp: int, count: int) -> Iterator[tuple[Schedule, int]]:
    """Schedules of a pipeline of `pp` ranks that take `count` micro-batches, with their stages per rank."""
    layers = request.model.layers
    if pp == 1:
        yield "1f1b", 1
        return
    for schedule in request.software.schedules:
        if request.compiled and schedule in SPLIT_BACKWARD:
            continue
        kind = SCHEDULES[schedule]
        fixed = kind.stages_per_rank
        for virtual in [fixed] if fixed else range(2, _MOST_VIRTUAL + 1 if schedule not in SPLIT_BACKWARD else 3):
            enough = count >= kind.least_micro_batches(pp, pp * virtual) and pp * virtual <= layers
            if enough and (virtual == 1 or count % max(1, count // pp) == 0):  # in rounds of one per rank
                yield schedule, virtual


def divisors(number: int) -> list[int]:
    """All divisors, in ascending order."""
    low = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)})
