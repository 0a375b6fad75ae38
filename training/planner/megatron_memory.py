"""Megatron's memory: bytes on a GPU of a run of Megatron-LM or Megatron-DeepSpeed, for published runs.

The trainer's own memory is in training/formulas; this is for programs that keep attention's weights, the gradients of
all parameters and a float32 copy of them. Two constants are fitted to BigScience's sweep (docs/planner.md).
"""

from dataclasses import dataclass

from training.planner.planned_run import PlannedRun
from training.planner.step_time import layer_parameters

STATE_SHARE = 1.2
"""Bytes reserved for each byte of weights, gradients and optimizer states: copies and padding of flattened buffers."""
CONTEXT = 6.7 * 2**30
"""Bytes of CUDA, its libraries and the buffers of collectives."""


@dataclass(frozen=True)
class MegatronMemory:
    """Bytes on a GPU of pipeline stage `stage`, which needs most."""

    stage: int
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
    """Memory of the fullest stage of `run`, under 1F1B.

    Mixed precision with Adam: 2 bytes a parameter for weights and for gradients, in bf16 4 more to sum those in; 16 for
    the float32 weights, their gradients and two moments, shared by ZeRO-1 (Rajbhandari et al. 2020, section 3.1).
    """
    stages = range(run.layout.stages)
    return max((_stage_memory(run, stage, bf16) for stage in stages), key=lambda memory: memory.total)


def _stage_memory(run: PlannedRun, stage: int, bf16: bool) -> MegatronMemory:
    model, layout, last = run.model, run.layout, run.layout.stages - 1
    ends = (stage == 0) + (stage == last and not (model.tied and last == 0))
    vocabulary = model.vocab_size * model.width
    parameters = (run.layers[stage] * layer_parameters(model) + ends * vocabulary) / layout.tp
    shards = layout.zero_group if layout.zero else 1
    return MegatronMemory(
        stage,
        2 * parameters,
        (6 if bf16 else 2) * parameters,
        16 * parameters / shards,
        _activation_bytes(run, stage),
        12.0 * run.micro_batch * run.seq_len * model.vocab_size / layout.tp if stage == last else 0.0,
    )


def _activation_bytes(run: PlannedRun, stage: int) -> float:
    """Micro-batches in flight x layers x what each keeps, and one layer computed again.

    A layer keeps its input, 2 s b h bytes, if it is computed again; else s b h (10 + 24 / t + 5 a s / h t)
    (Korthikanti et al. 2022, equation 2).
    """
    model, layout = run.model, run.layout
    in_flight = min(layout.micro_batches, layout.pp - stage)
    features = run.seq_len * run.micro_batch * model.width
    whole = features * (10 + 24 / layout.tp + 5 * model.heads * run.seq_len / (model.width * layout.tp))
    if run.recompute == "none":
        return in_flight * run.layers[stage] * whole
    return in_flight * run.layers[stage] * 2.0 * features + whole
