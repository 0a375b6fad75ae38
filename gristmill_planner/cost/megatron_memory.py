"""Megatron's memory: bytes on a GPU of a run of Megatron-LM or Megatron-DeepSpeed, for published runs.

The trainer's own memory is in memory.py; this is for programs that keep attention's weights, the gradients of
all parameters and a float32 copy of them. Two constants are fitted to BigScience's sweep (docs/planner.md).
"""

from dataclasses import dataclass

from gristmill_planner.cost.planned_run import PlannedRun
from gristmill_planner.cost.step_time import layer_parameters

STATE_SHARE = 1.2
"""Bytes reserved for each byte of weights, gradients and optimizer states: copies and padding of flattened buffers."""
CONTEXT = 6.7 * 2**30
"""Bytes of CUDA, its libraries and the buffers of collectives."""


@dataclass(frozen=True)
class MegatronMemory:
    """Bytes on a GPU of pipeline rank `rank`, which needs most."""

    rank: int
    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        states = self.weights + self.gradients + self.optimizer
        return STATE_SHARE * states + self.activations + self.logits + CONTEXT


def megatron_memory(run: PlannedRun, bf16: bool = False) -> MegatronMemory:
    """Memory of the fullest rank of `run`, under 1F1B or interleaved 1F1B.

    Mixed precision with Adam: 2 bytes a parameter for weights and for gradients, in bf16 4 more to sum those in; 16 for
    the float32 weights, their gradients and two moments, shared by ZeRO-1 (Rajbhandari et al. 2020, section 3.1).
    """
    ranks = range(run.layout.pp)
    return max((_rank_memory(run, rank, bf16) for rank in ranks), key=lambda memory: memory.total)


def _rank_memory(run: PlannedRun, rank: int, bf16: bool) -> MegatronMemory:
    model, layout, held = run.model, run.layout, run.held[rank]
    first, last = 0 in held, layout.stages - 1 in held
    vocabulary = (first + (last and not (model.tied and first))) * model.vocab_size * model.width
    parameters = (run.rank_layers[rank] * layer_parameters(model) + vocabulary) / layout.tp
    shards = layout.zero_group if layout.zero else 1
    logits = 12.0 * run.micro_batch * run.seq_len * model.vocab_size / layout.tp
    return MegatronMemory(
        rank,
        2 * parameters / (shards if layout.zero == 3 else 1),
        (6 if bf16 else 2) * parameters / (shards if layout.zero >= 2 else 1),
        16 * parameters / shards,
        _activation_bytes(run, rank),
        logits if last else 0.0,
    )


def _activation_bytes(run: PlannedRun, rank: int) -> float:
    """Micro-batches in flight x layers x what each keeps, and one layer computed again.

    A layer keeps its input, 2 s b h bytes, if it is computed again; else s b h (10 + 24 / t + 5 a s / h t)
    (Korthikanti et al. 2022, equation 2).
    """
    model, layout = run.model, run.layout
    features = run.seq_len * run.micro_batch * model.width
    whole = features * (10 + 24 / layout.tp + 5 * model.heads * run.seq_len / (model.width * layout.tp))
    kept = _in_flight(run, rank) * run.rank_layers[rank]
    return kept * whole if run.recompute == "none" else kept * 2.0 * features + whole


def _in_flight(run: PlannedRun, rank: int) -> float:
    """Micro-batches of which the rank keeps all layers' activations (Narayanan et al. 2021, section 2.2)."""
    layout, v = run.layout, run.layout.virtual_stages
    if v == 1:
        return min(layout.micro_batches, layout.pp - rank)
    return min(layout.micro_batches, ((v - 1) * layout.pp + 2 * (layout.pp - 1 - rank) + 1) / v)
