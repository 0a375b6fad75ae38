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
    """Yield every layout that divides GPUs, model and batch evenly, and that the trainer's own checks accept."""
    for family in families(request):
        for schedule in family.schedules:
            yield from family.runs(request, *schedule)


def families(request: PlanRequest) -> Iterator[LayoutFamily]:
    """Yield the families of `candidates`. 1D tensor parallelism is within a node, with sequences divided too."""
    devices = request.cluster.devices
    for divided in _divisions(request):
        recomputations = _recomputations(request, divided)
        for pp in divisors(devices // divided.ranks_of_replica):
            dp = devices // (divided.ranks_of_replica * pp)
            if pp > request.model.layers or request.batch % dp:
                continue
            for micro in divisors(request.batch // dp):
                if micro <= _MOST_SEQUENCES and micro % divided.batch_shards == 0:
                    count = request.batch // dp // micro
                    whole = replace(divided, dp=dp, pp=pp, micro_batches=count)
                    yield from _families_of(request, whole, recomputations)


def _families_of(
    request: PlanRequest, whole: ParallelConfig, recomputations: list[Recompute]
) -> Iterator[LayoutFamily]:
    """Yield the families of a layout without expert parallelism."""
    schedules = tuple(_schedules(request, whole.pp, whole.micro_batches))
    if not schedules:
        return
    stages = _zero_stages(request.software, whole)
    expert_ranks = [1]
    if request.model.experts:
        expert_ranks = divisors(gcd(request.model.experts, whole.replicas))
    for ep in expert_ranks:
        degrees = replace(whole, ep=ep)
        for recompute in recomputations:
            yield LayoutFamily(degrees, recompute, schedules, stages)


def _divisions(request: PlanRequest) -> Iterator[ParallelConfig]:
    """Yield each way of dividing matrices and sequences within a replica, as a layout of one stage and all replicas."""
    is_ours = request.software == GRISTMILL
    within_node = gcd(request.cluster.per_node, request.cluster.devices)
    kinds = list[ParallelConfig]()
    for tp in possible_sizes(request.model):
        if within_node % tp == 0:
            sequence_parallel = is_ours and tp > 1 and request.seq_len % tp == 0
            kinds.append(ParallelConfig(tp=tp, sequence_parallel=sequence_parallel))
    yield from kinds
    if not is_ours:
        return
    for divided in (*_grids(), *_contexts(request, kinds)):
        if _is_accepted(request, divided):
            yield divided


def _grids() -> Iterator[ParallelConfig]:
    """Yield grids of tensor-parallel ranks."""
    for side in _SIDES:
        yield ParallelConfig(tp=side**2, tensor="2d")
    for side in _SIDES:
        for depth in range(2, side + 1):
            yield ParallelConfig(tp=side**2 * depth, tensor="2.5d", depth=depth)
    for side in _SIDES:
        if side**3 <= _MOST_CUBE:
            yield ParallelConfig(tp=side**3, tensor="3d")


def _contexts(request: PlanRequest, kinds: list[ParallelConfig]) -> Iterator[ParallelConfig]:
    """Yield divisions of sequences, of each kind of tensor parallelism."""
    for cp in divisors(request.seq_len // _FEWEST_TOKENS or 1):
        if cp > 1:
            for kind in kinds:
                yield replace(kind, cp=cp, context="ring")
                yield replace(kind, cp=cp, context="ulysses")


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
    accepted = list[Recompute]()
    for recompute in request.software.recompute:
        with suppress(UsageError):
            check_blocks(request.model, recompute, request.compiled)
            divided.check_run("bf16", recompute, request.compiled)
            accepted.append(recompute)
    return accepted


def _schedules(request: PlanRequest, pp: int, count: int) -> Iterator[tuple[Schedule, int]]:
    """Yield schedules of a pipeline of `pp` ranks that take `count` micro-batches, with their stages per rank."""
    if pp == 1:
        yield "1f1b", 1
        return
    for schedule in request.software.schedules:
        splits_backward = schedule in SPLIT_BACKWARD
        if request.compiled and splits_backward:
            continue
        kind = SCHEDULES[schedule]
        stages_per_rank = list(range(2, 3 if splits_backward else _MOST_VIRTUAL + 1))
        if kind.stages_per_rank:
            stages_per_rank = [kind.stages_per_rank]
        for virtual in stages_per_rank:
            stages = pp * virtual
            fits = count >= kind.least_micro_batches(pp, stages) and stages <= request.model.layers
            if fits and (virtual == 1 or count % max(1, count // pp) == 0):  # in rounds of one per rank
                yield schedule, virtual


def divisors(number: int) -> list[int]:
    """Return all divisors, in ascending order."""
    low = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    high = [number // divisor for divisor in low]
    return sorted({*low, *high})
