"""Memory of a training run: bytes of each kind on one rank, by ZeRO stage, precision, micro-batches and layout.

Each kind has a function, and docs/training-memory.md the same formula in words beside what was measured. P is the
number of parameters on the rank before ZeRO shards them over n ranks, e the bytes of an element in the compute dtype.
"""

from dataclasses import dataclass

from training.formulas.activation_memory import activation_bytes, activation_levels
from training.formulas.block_memory import backward_bytes, loss_bytes
from training.formulas.gathered_memory import gathered_at_loss, gathered_bytes
from training.formulas.gradient_memory import gradient_bytes, gradient_levels, loss_gradient, reduced_bytes
from training.formulas.memory_inputs import MemoryInputs
from training.formulas.optimizer_memory import moment_bytes, update_bytes
from training.formulas.parameter_shapes import ParameterShape
from training.formulas.pipeline_passes import pipeline_passes

LOGIT_CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 1 << 30}  # of the logits at a time


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of each kind at its own peak within a step."""

    weights: int
    master: int
    moments: int
    gradients: int
    gathered: int
    activations: int
    logits: int
    peak: int
    """Of all of them and of what operations work with, together."""


def estimate_memory(inputs: MemoryInputs) -> MemoryEstimate:
    """Bytes of each kind on one rank."""
    return MemoryEstimate(
        weight_bytes(inputs),
        master_bytes(inputs),
        moment_bytes(inputs),
        gradient_bytes(inputs),
        gathered_bytes(inputs),
        activation_bytes(inputs),
        logit_bytes(inputs),
        peak_bytes(inputs),
    )


def peak_bytes(inputs: MemoryInputs) -> int:
    """All kinds together at the fullest moment: in a loss, or where a backward pass begins or ends."""
    states = weight_bytes(inputs) + master_bytes(inputs) + moment_bytes(inputs)
    in_backward = gathered_bytes(inputs) if inputs.layout.zero == 3 else 0  # ZeRO-1 and 2 gather after the update
    passes = pipeline_passes(inputs.layout, inputs.rank)
    activations, gradients = activation_levels(inputs), gradient_levels(inputs)
    moments = [reduced_bytes(inputs) + max(gathered_bytes(inputs), update_bytes(inputs))]
    after = [level.before for level in activations[1:]] + [0]
    for each, kept, left, summed in zip(passes, activations, after, gradients, strict=True):
        if each.kind != "F":
            start = kept.peak + summed.before + backward_bytes(inputs.block)
            moments.append(in_backward + max(start, left + summed.peak))
        elif each.stage == inputs.layout.stages - 1:
            moments.append(kept.peak + summed.peak + _at_work_in_loss(inputs))
        else:
            moments.append(kept.peak + summed.peak + in_backward)
    return states + max(moments)


def _at_work_in_loss(inputs: MemoryInputs) -> int:
    """Beside what it leaves: the last norm's output, the logits, and under ZeRO-3 what is gathered.

    In bf16 the loss works with a float32 sum, and rounds the gradient that it leaves when the logits are gone.
    """
    of_norm = inputs.block.tokens * inputs.block.hidden * inputs.itemsize
    rounded = loss_gradient(inputs) if inputs.precision == "bf16" else 0
    return of_norm + logit_bytes(inputs) + gathered_at_loss(inputs) - rounded


def weight_bytes(inputs: MemoryInputs) -> int:
    """The modules' parameters: e P; under ZeRO-3 none outlives its use (Rajbhandari et al. 2020, section 5.3)."""
    return 0 if inputs.layout.zero == 3 else inputs.itemsize * sum(p.numel for p in _all(inputs))


def master_bytes(inputs: MemoryInputs) -> int:
    """What the optimizer updates: 4 P / n in 16 bits, and under ZeRO-3; elsewhere the rows of the weights themselves.

    (Micikevicius et al. 2018, section 3.1; Rajbhandari et al. 2020, section 3.1.)
    """
    if inputs.layout.zero < 3 and inputs.itemsize == inputs.wide:
        return 0
    return inputs.wide * sum(p.rows_numel(inputs.shards, inputs.shard_rank) for p in _all(inputs))


def logit_bytes(inputs: MemoryInputs) -> int:
    """What the loss works with, on the rank of the last stage: never all logits, but a chunk of tokens at a time."""
    has_loss = inputs.layout.stages - 1 in inputs.parameters
    return loss_bytes(inputs.block, LOGIT_CHUNK_BYTES[inputs.device]) if has_loss else 0


def _all(inputs: MemoryInputs) -> list[ParameterShape]:
    return [p for stage in inputs.parameters.values() for p in stage]
