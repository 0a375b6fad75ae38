"""Least memory: a bound of the bytes of a planned run that is quick to compute."""

from dataclasses import replace
from functools import lru_cache

from gristmill_planner.cost.planned_run import GRISTMILL, PlannedRun
from gristmill_planner.cost.step_time import layer_parameters
from gristmill_planner.memory.block_memory import kept_bytes
from gristmill_planner.memory.loss_memory import loss_bytes
from gristmill_planner.memory.memory import LOGIT_CHUNK_BYTES
from gristmill_planner.memory.memory_inputs import MemoryInputs
from gristmill_planner.run_memory import reserve, run_memory
from training.config import Precision
from training.memory.memory_config import Recompute
from training.model.model_config import ModelConfig
from training.parallel.layout import ParallelConfig

_PLAIN = ParallelConfig(dp=1, zero_group=1, virtual_stages=1, micro_batches=1)
_DIVIDED = ("tp", "sequence_parallel", "tensor", "depth", "cp", "context")  # what decides a block's activations


def least_total(run: PlannedRun, precision: Precision) -> float:
    """Bytes that `run` takes at the least, on its first or on its last rank: a bound that is quick to compute."""
    layout = run.layout
    if run.software != GRISTMILL:
        return run_memory(run, precision).total
    divided = replace(_PLAIN, **{name: getattr(layout, name) for name in _DIVIDED})
    kept, logits, hidden = _block_bytes(run.model, run.micro_batch, run.seq_len, precision, divided, run.recompute)
    in_flight = micro_batches_in_flight(layout)
    received = hidden * layout.micro_batches
    buffers = (2 * layout.virtual_stages - 1) * received if layout.pp > 1 else 0.0  # torch keeps one per micro-batch
    first = _state_bytes(run, 0, layout.micro_batches > in_flight) + in_flight * run.rank_layers[0] * kept + buffers
    last = _state_bytes(run, -1, False) + kept + logits
    return reserve(run) + (max(first, last) if run.held[-1][-1] == layout.stages - 1 else first)


def _state_bytes(run: PlannedRun, rank: int, sums: bool) -> float:
    """Bytes of weights, float32 masters and moments, and with `sums` the float32 sums of gradients, of a rank's layers.

    The first rank has an end of the model, too; ZeRO-1, 2 and 3 shard moments, gradients and weights. Muon has half of
    AdamW's moments for most parameters.
    """
    layout, vocabulary = run.layout, run.model.vocab_size * run.model.width if rank == 0 else 0
    parameters = (run.rank_layers[rank] * layer_parameters(run.model) + vocabulary) / (layout.tp // layout.depth)
    weights = 2 if layout.zero < 3 else 0
    gradients = 4 / (layout.shards if layout.zero >= 2 else 1) if sums else 0
    moments = {"adamw": 8, "muon": 4, "sgd": 0}[run.states.name] if run.states.moments == "device" else 0
    return parameters * (weights + gradients + (4 + moments + 4 * run.states.ema) / layout.shards)


def micro_batches_in_flight(layout: ParallelConfig) -> float:
    """Micro-batches of which the first rank keeps all activations (Narayanan et al. 2021, section 2.2)."""
    pp, v = layout.pp, layout.virtual_stages
    if layout.schedule == "interleaved-1f1b" and pp > 1:
        return min(layout.micro_batches, ((v - 1) * pp + 2 * (pp - 1) + 1) / v)
    return min(layout.micro_batches, pp)


@lru_cache(4096)
def _block_bytes(
    model: ModelConfig,
    micro_batch: int,
    seq_len: int,
    precision: Precision,
    divided: ParallelConfig,
    recompute: Recompute,
) -> tuple[int, int, int]:
    """Bytes that a block keeps of a micro-batch, that the loss works with, and of the residual stream."""
    inputs = MemoryInputs(model, divided, micro_batch, seq_len, [range(0)], precision, recompute, device="cuda")
    sizes = inputs.block
    logits = loss_bytes(sizes, LOGIT_CHUNK_BYTES["cuda"])
    return kept_bytes(sizes, recompute), logits, sizes.tokens * sizes.hidden * sizes.itemsize
