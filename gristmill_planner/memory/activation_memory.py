"""Activation memory: what a rank keeps for backward passes at the most, by schedule and mode of recomputation."""

from gristmill_planner.memory.block_memory import held_gradients, kept_bytes, recomputed_bytes
from gristmill_planner.memory.memory_inputs import MemoryInputs, PassBytes
from training.parallel.pipeline.schedules import pipeline_passes

_INT64, _FLOAT32 = 8, 4


def activation_bytes(inputs: MemoryInputs) -> int:
    """What is kept for the backward passes of micro-batches in flight, at the most, and a block that is recomputed."""
    passes = pipeline_passes(inputs.layout, inputs.rank)
    pairs = zip(passes, activation_levels(inputs), strict=True)
    return max(level.peak for each, level in pairs if each.kind == "F" or inputs.recompute != "none")


def activation_levels(inputs: MemoryInputs) -> list[PassBytes]:
    """Activations pass by pass, in the order of `pipeline_passes` (Narayanan et al. 2021, section 2.2).

    A split backward pass keeps all of a micro-batch's from the pass for inputs to the pass for weights, with the
    gradients from which weights' follow.
    """
    own = 2 * inputs.block.length if inputs.layout.cp > 1 else 0  # the rank's tokens and targets, copied
    always = _receive_buffers(inputs) + _INT64 * inputs.sequences * (inputs.seq_len + 1 + own)
    kept, sent, levels = dict.fromkeys(inputs.parameters, 0), 0, list[PassBytes]()
    whole_stage = {stage: _stage_bytes(inputs, stage) for stage in inputs.parameters}
    for kind, stage in pipeline_passes(inputs.layout, inputs.rank):
        now, one = always + sum(kept.values()) + sent, whole_stage[stage]
        backward = kind != "F" and (kind, stage) != ("I", 0)  # the first stage has no gradients of inputs
        again = backward and inputs.recompute != "none"
        added = one if kind == "F" else _computed_again(inputs, stage, kind) if again else 0
        whole = kind == "B" or (kind, stage) == ("W", 0)
        freed = _freed_before_blocks(inputs, stage) if whole else ()
        levels.append(PassBytes(now, now + added, tuple(now + added - each for each in freed)))
        if kind == "F":
            kept[stage] += one
        elif backward:
            between = _between_passes(inputs, stage) if kind in "IW" and stage > 0 else 0
            kept[stage] += between if kind == "I" else -one - between
            sent = _sent_bytes(inputs, stage, sent) if kind in "BI" or stage == 0 else sent
    return levels


def _freed_before_blocks(inputs: MemoryInputs, stage: int) -> list[int]:
    """What a backward pass has freed of its micro-batch when it reaches each block of a stage, last one first."""
    one, is_last = kept_bytes(inputs.block, inputs.recompute), stage == inputs.layout.stages - 1
    end = _end_bytes(inputs, stage) if is_last and inputs.recompute == "none" else 0  # else `_computed_again` knows
    return [i * one + (end if i else 0) for i in range(len(inputs.stage_layers[stage]))]


def _computed_again(inputs: MemoryInputs, stage: int, kind: str) -> int:
    """What a pass adds: the last block of a stage, recomputed; a pass for weights recomputes all blocks at once.

    The loss and the last norm are done by then, but for a pass for weights the loss keeps its gradients. The gradient
    of another rank's stage lies in the buffer in which it was received.
    """
    weights, is_last = kind == "W" and stage > 0, stage == inputs.layout.stages - 1
    block = recomputed_bytes(inputs.block, inputs.recompute) - _hidden_bytes(inputs)
    blocks = block * (len(inputs.stage_layers[stage]) if weights else 1)
    if not is_last:
        return blocks
    return blocks + _hidden_bytes(inputs) * (2 if weights else 1) - _end_bytes(inputs, stage)


def _between_passes(inputs: MemoryInputs, stage: int) -> int:
    """What a stage with a split backward pass holds beside its activations until the pass for weights.

    If another rank has the next stage, the last block's own gradient lies in the buffer in which it was received, and
    the stage's output counts as sent.
    """
    gradients = len(inputs.stage_layers[stage]) * held_gradients(inputs.block)
    if stage == inputs.layout.stages - 1:
        return gradients + _hidden_bytes(inputs)
    return gradients - 2 * _hidden_bytes(inputs) * (not _passes_on(inputs, stage))


def _sent_bytes(inputs: MemoryInputs, stage: int, before: int) -> int:
    """What torch still holds of what was sent, after a backward pass: 1f1b the last, other schedules all of it."""
    ranks = inputs.layout.stage_ranks
    others = [at for at in (stage - 1, stage + 1) if 0 <= at < len(ranks) and ranks[at] != ranks[stage]]
    if inputs.layout.schedule in ("1f1b", "gpipe"):
        return len(others) * _hidden_bytes(inputs)
    return before + len(others) * _hidden_bytes(inputs)


def _stage_bytes(inputs: MemoryInputs, stage: int) -> int:
    """What one micro-batch keeps in a stage: its blocks, the table of rotary angles, and its end."""
    model, block = inputs.model, inputs.block
    angles = 2 * _FLOAT32 * block.length * model.rotary_dim if model.positions == "rope" else 0
    if model.positions == "alibi":  # its bias of each pair of tokens, in all blocks; of a ring the slopes
        pairs = block.wide if block.is_ring else block.itemsize * inputs.seq_len**2
        angles = pairs * model.heads // block.attention_parts
    if stage == 0 and model.embed_norm:
        angles += block.tokens * block.hidden * block.itemsize
    looked_up = block.tokens * (block.tp if block.on_grid else 1)  # a grid's rows look up each other's
    # the rank's ids, and which they are
    lookup = (_INT64 + 1) * looked_up if stage == 0 and inputs.layout.tp > 1 else 0
    positions = _INT64 * block.length if model.positions == "rope" or stage == 0 else 0
    blocks = len(inputs.stage_layers[stage]) * kept_bytes(block, inputs.recompute)
    received = _hidden_bytes(inputs) if stage else 0  # the first block's input is in a buffer
    passed_on = _hidden_bytes(inputs) * _passes_on(inputs, stage)  # the next stage's buffer
    return blocks + angles + positions + lookup - received - passed_on + _end_bytes(inputs, stage)


def _passes_on(inputs: MemoryInputs, stage: int) -> bool:
    """True if the next stage is on the same rank."""
    ranks = inputs.layout.stage_ranks
    return ranks[stage] in ranks[stage + 1 : stage + 2]


def _end_bytes(inputs: MemoryInputs, stage: int) -> int:
    """Last stage: the last norm's input and statistics, and the loss's gradient of its output. Others: their output."""
    block = inputs.block
    output = _hidden_bytes(inputs)
    if stage < inputs.layout.stages - 1:
        return output
    statistics = block.wide * (1 if inputs.model.norm == "rms" else 2) * block.tokens * block.hidden // block.whole
    if block.on_grid:  # the norm's output, and the gradient of all logits
        return output + statistics + block.tokens * (block.whole + block.vocabulary) * block.itemsize
    return output + statistics + block.tokens * inputs.model.width * block.itemsize


def _receive_buffers(inputs: MemoryInputs) -> int:
    """torch's stages keep a buffer per micro-batch for what they receive: activations, and gradients."""
    last = inputs.layout.stages - 1
    ends = sum((stage > 0) + (stage < last) for stage in inputs.parameters)
    return inputs.layout.micro_batches * ends * _hidden_bytes(inputs)


def _hidden_bytes(inputs: MemoryInputs) -> int:
    """Bytes of a micro-batch's residual stream on this rank."""
    return inputs.block.tokens * inputs.block.hidden * inputs.itemsize
