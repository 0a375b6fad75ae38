"""Run memory: bytes of each kind on the fullest rank of a planned run, by the formulas of the program that trains."""

from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import inf

from gristmill_planner.cost.megatron_memory import CONTEXT, megatron_memory
from gristmill_planner.cost.planned_run import GRISTMILL, PlannedRun
from gristmill_planner.memory.memory import estimate_memory
from gristmill_planner.memory.memory_inputs import MemoryInputs
from training.config import Precision

RESERVE = 3 << 30
"""Bytes of CUDA, its libraries and collectives beside what the formulas count."""


@dataclass(frozen=True)
class RunMemory:
    """Bytes on the fullest rank, which is pipeline rank `rank`; `kinds` are peaks of their own, `total` is at once."""

    rank: int
    total: float
    kinds: dict[str, float] = field(repr=False)


def run_memory(run: PlannedRun, precision: Precision = "bf16", enough: float = inf) -> RunMemory:
    """Memory of `run` on the rank that needs most, or on one that needs more than `enough` bytes.

    In a pipeline bytes grow by the same amount for each micro-batch more, once there are twice as many as ranks: those
    of thousands follow from two smaller numbers.
    """
    if run.software != GRISTMILL:
        return _megatron(run, precision)
    found: list[RunMemory] = []
    for rank in sorted({0, run.layout.pp - 1, run.layout.pp // 2}, key=lambda rank: (rank > 0, -rank)):
        found.append(_on_rank(run, rank, precision))
        if found[-1].total > enough:
            break
    return max(found, key=lambda memory: memory.total)


def _on_rank(run: PlannedRun, rank: int, precision: Precision) -> RunMemory:
    count, pp = run.layout.micro_batches, run.layout.pp
    if pp == 1:
        return _of_rank(run, rank, min(count, 4), precision)  # each micro-batch is done before the next one
    if count <= 4 * pp or count % pp:
        return _of_rank(run, rank, count, precision)
    return _extrapolated(run, rank, count, precision)


def _extrapolated(run: PlannedRun, rank: int, count: int, precision: Precision) -> RunMemory:
    few, more = (_of_rank(run, rank, times * run.layout.pp, precision) for times in (2, 3))
    factor = (count - 3 * run.layout.pp) / run.layout.pp
    kinds = {name: more.kinds[name] + factor * (more.kinds[name] - few.kinds[name]) for name in more.kinds}
    return RunMemory(rank, more.total + factor * (more.total - few.total), kinds)


def _of_rank(run: PlannedRun, rank: int, count: int, precision: Precision) -> RunMemory:
    """With `count` micro-batches, by the formulas of memory; docs/training-memory.md has measured bytes."""
    ends = list(accumulate(run.layers))
    layers = [range(end - each, end) for end, each in zip(ends, run.layers, strict=True)]
    layout = replace(run.layout, micro_batches=count)
    inputs = MemoryInputs(
        run.model, layout, count * run.micro_batch, run.seq_len, layers, precision, run.recompute, rank,
        run.states.name, run.states.ema, run.states.moments,
        device="cuda" if run.cluster.device.is_gpu else "cpu",
    )  # fmt: skip
    found = estimate_memory(inputs)
    kinds = {name: float(value) for name, value in vars(found).items() if name != "peak"}
    other = reserve(run)
    return RunMemory(rank, found.peak + other, {**kinds, "other": float(other)})


def reserve(run: PlannedRun) -> int:
    """Bytes beside what the formulas count: RESERVE on a GPU."""
    return RESERVE if run.cluster.device.is_gpu else 0


def _megatron(run: PlannedRun, precision: Precision) -> RunMemory:
    found = megatron_memory(run, precision == "bf16")
    kinds = {name: value for name, value in vars(found).items() if name != "rank"}
    return RunMemory(found.rank, found.total, {**kinds, "other": CONTEXT})
