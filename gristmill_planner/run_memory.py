"""Memory of a planned run: bytes of each kind on its fullest rank, by the formulas of the program that trains.

Those of this trainer are in memory.py. Megatron-LM and Megatron-DeepSpeed, for published runs, keep attention's
weights, the gradients of all parameters and a float32 copy of them; two constants are fitted to BigScience's sweep
(docs/reference/planner-accuracy.md).
"""

from dataclasses import dataclass, field
from math import inf

from gristmill_planner.memory import RankMemory
from gristmill_planner.planned_run import GRISTMILL, PlannedRun
from gristmill_planner.step_time import layer_parameters

RESERVE = 3 << 30
"""Bytes of CUDA, its libraries and collectives on a GPU, in addition to what the formulas of this trainer count."""
STATE_SHARE = 1.2
"""Bytes reserved for each byte of weights, gradients and optimizer states: copies and padding of flattened buffers."""
CONTEXT = 6.7 * 2**30
"""Bytes of CUDA, its libraries and the buffers of collectives."""


@dataclass(frozen=True)
class RunMemory:
    """Bytes on the fullest rank, which is pipeline rank `rank`; `kinds` are peaks of their own, `total` is at once."""

    rank: int
    total: float
    kinds: dict[str, float] = field(repr=False)


def run_memory(run: PlannedRun, enough: float = inf) -> RunMemory:
    """Return the memory of `run` on the rank that needs most, by the formulas of the program that trains.

    Where a rank needs more than `enough` bytes: of that one, or of its states alone, if these are more.
    """
    if run.software != GRISTMILL:
        return megatron_memory(run)
    on_ranks: list[RunMemory] = []
    for rank in dict.fromkeys((0, run.layout.pp - 1, run.layout.pp // 2)):
        on_ranks.append(_on_rank(RankMemory(run, rank), enough))
        if on_ranks[-1].total > enough:
            break
    return max(on_ranks, key=lambda memory: memory.total)


def _on_rank(memory: RankMemory, enough: float) -> RunMemory:
    other = RESERVE if memory.run.cluster.device.is_gpu else 0
    total = float(memory.states + other)
    if total <= enough:
        total = float(memory.peak + other)
    if total > enough:  # a search passes over many layouts, most of them by their states alone
        return RunMemory(memory.rank, total, {})
    kinds = {name: float(getattr(memory, name)) for name in memory.KINDS}
    return RunMemory(memory.rank, total, {**kinds, "other": float(other)})


def megatron_memory(run: PlannedRun) -> RunMemory:
    """Return the memory of the fullest rank of `run` under Megatron's 1F1B or interleaved 1F1B.

    Mixed precision with Adam: 2 bytes a parameter for weights and for gradients, in bf16 4 more to sum those in; 16 for
    the float32 weights, their gradients and two moments, shared by ZeRO-1 (Rajbhandari et al. 2020, section 3.1).
    """
    on_ranks = [_megatron_rank(run, rank) for rank in range(run.layout.pp)]
    return max(on_ranks, key=lambda memory: memory.total)


def _megatron_rank(run: PlannedRun, rank: int) -> RunMemory:
    model = run.model
    layout = run.layout
    held = run.held[rank]
    has_embedding = 0 in held
    has_head = layout.stages - 1 in held
    has_own_head = has_head and not (model.tied and has_embedding)
    vocabulary = (has_embedding + has_own_head) * model.vocab_size * model.width
    parameters = (run.rank_layers[rank] * layer_parameters(model)[0] + vocabulary) / run.parts
    shards = layout.zero_group if layout.zero else 1
    weight_shards = shards if layout.zero == 3 else 1
    gradient_shards = shards if layout.zero >= 2 else 1
    gradient_bytes = 6 if run.precision == "bf16" else 2
    states = {
        "weights": 2 * parameters / weight_shards,
        "gradients": gradient_bytes * parameters / gradient_shards,
        "optimizer": 16 * parameters / shards,
    }
    logits = 0.0
    if has_head:
        logits = 12.0 * run.micro_batch * run.seq_len * model.vocab_size / run.parts
    others = {"activations": _activation_bytes(run, rank), "logits": logits, "other": CONTEXT}
    return RunMemory(rank, STATE_SHARE * sum(states.values()) + sum(others.values()), states | others)


def _activation_bytes(run: PlannedRun, rank: int) -> float:
    """Return micro-batches in flight x layers x what each keeps, and one layer computed again.

    A layer keeps its input, 2 s b h bytes, if it is computed again; else s b h (10 + 24 / t + 5 a s / h t)
    (Korthikanti et al. 2022, equation 2).
    """
    model = run.model
    features = run.seq_len * run.micro_batch * model.width
    whole = features * (10 + 24 / run.parts + 5 * model.heads * run.seq_len / (model.width * run.parts))
    kept = _in_flight(run, rank) * run.rank_layers[rank]
    if run.recompute == "none":
        return kept * whole
    return kept * 2.0 * features + whole


def _in_flight(run: PlannedRun, rank: int) -> float:
    """Return the micro-batches of which the rank keeps all layers' activations (Narayanan et al. 2021, section 2.2)."""
    layout = run.layout
    v = run.layout.virtual_stages
    if v == 1:
        return min(layout.micro_batches, layout.pp - rank)
    return min(layout.micro_batches, ((v - 1) * layout.pp + 2 * (layout.pp - 1 - rank) + 1) / v)
