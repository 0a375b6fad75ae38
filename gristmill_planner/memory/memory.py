"""Memory of a training run: bytes of each kind on one rank, by ZeRO stage, precision, micro-batches and layout.

Each kind has a function, and docs/training-memory.md the same formula in words beside what was measured. P is the
number of parameters on the rank before ZeRO shards them over n ranks, e the bytes of an element in the compute dtype.
"""

from dataclasses import dataclass

from gristmill_planner.memory.activation_memory import activation_bytes, activation_levels
from gristmill_planner.memory.block_memory import backward_bytes, weights_pass_bytes
from gristmill_planner.memory.gathered_memory import gathered_bytes, gathered_levels
from gristmill_planner.memory.gradient_memory import (
    gradient_bytes,
    gradient_levels,
    grid_sum_bytes,
    loss_gradient,
    reduced_bytes,
)
from gristmill_planner.memory.loss_memory import loss_beside_gradient, loss_bytes
from gristmill_planner.memory.memory_inputs import MemoryInputs
from gristmill_planner.memory.optimizer_memory import moment_bytes, update_bytes
from training.parallel.parameter_shapes import ParameterShape
from training.parallel.pipeline.schedules import pipeline_passes

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
    passes = pipeline_passes(inputs.layout, inputs.rank)
    activations, gradients, gathered = activation_levels(inputs), gradient_levels(inputs), gathered_levels(inputs)
    moments = [reduced_bytes(inputs) + max(gathered_bytes(inputs), update_bytes(inputs), grid_sum_bytes(inputs))]
    after = [level.before for level in activations[1:]] + [0]
    levels = zip(passes, activations, after, gradients, gathered, strict=True)
    for i, (each, kept, left, summed, units) in enumerate(levels):
        if each.kind != "F":
            at_work = weights_pass_bytes if each.kind == "W" and each.stage > 0 else backward_bytes
            at_end = _at_work_in_embedding(inputs, each not in passes[:i]) if each.stage == 0 else 0
            at_start = kept.peak + summed.before + at_work(inputs.block)
            blocks = zip(kept.at_blocks, summed.at_blocks, strict=False)  # none where backward is split
            within = max((a + g + backward_bytes(inputs.block) for a, g in blocks), default=0)
            moments.append(units + max(at_start, within, left + summed.peak + at_end))
        else:
            in_loss = _at_work_in_loss(inputs) if each.stage == inputs.layout.stages - 1 else 0
            moments.append(units + kept.peak + summed.peak + in_loss)
    return states + max(moments)


def _at_work_in_loss(inputs: MemoryInputs) -> int:
    """Beside what it leaves: the last norm's output, and the logits.

    In bf16 the loss works with a float32 sum, and rounds the gradient that it leaves when the logits are gone.
    """
    if inputs.block.on_grid:  # which keeps the norm's output, and the logits' gradient in the end
        return loss_beside_gradient(inputs.block)
    of_norm = inputs.block.tokens * inputs.block.hidden * inputs.itemsize
    rounded = loss_gradient(inputs) if inputs.precision == "bf16" else 0
    return of_norm + logit_bytes(inputs) - rounded


def _at_work_in_embedding(inputs: MemoryInputs, is_first: bool) -> int:
    """In 16 bits on a CPU the embedding's gradient is summed in float32 and then rounded.

    That is done before its bucket, or FSDP's copy of its unit, is allocated, unless the bucket is there already.
    """
    opens = len(inputs.buckets(0)[-1]) == 1 and (is_first or inputs.layout.zero == 2)
    if inputs.device != "cpu" or inputs.itemsize == inputs.wide or inputs.layout.zero == 3 or opens:
        return 0
    return inputs.wide * inputs.parameters[0][0].numel


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
