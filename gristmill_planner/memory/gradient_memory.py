"""Gradient memory: bytes of gradients at their peak within a step, by ZeRO stage, micro-batches and schedule.

A step is followed pass by pass. The loss computes its gradient of the output matrix in the forward pass, so each
micro-batch whose backward pass has not come yet holds one; the others appear in the backward pass, last layer first.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from gristmill_planner.memory.memory_inputs import MemoryInputs, PassBytes
from training.parallel.grid.cube_traffic import summed_parameters
from training.parallel.parameter_shapes import ParameterShape
from training.parallel.pipeline.schedules import pipeline_passes

_IN_FLIGHT = 2  # buckets that are on their way while the next one is filled


def gradient_bytes(inputs: MemoryInputs) -> int:
    """Gradients of this rank's stages at their peak.

    4 P where they are summed in place or all-reduced (ZeRO-0), and in ZeRO-1 with micro-batches; 4 P / n and the
    buckets on their way in ZeRO-1 and 2; 4 P / n and two units in ZeRO-3 (Rajbhandari et al. 2020, section 5.2).
    """
    peak = max(level.peak for level in gradient_levels(inputs))
    return max(peak, reduced_bytes(inputs) + max(_tied_sum(inputs), grid_sum_bytes(inputs)))


def gradient_levels(inputs: MemoryInputs) -> list[PassBytes]:
    """Gradients pass by pass, in the order of `pipeline_passes`; a backward pass begins with its first bucket."""
    held, done = dict.fromkeys(inputs.parameters, 0), Counter[int]()
    last, of_loss = inputs.layout.stages - 1, loss_gradient(inputs)
    found: dict[tuple[int, int, bool, bool], tuple[int, int, int, list[int]]] = {}
    waiting, levels = 0, list[PassBytes]()  # waiting: output matrix's gradients that await their backward pass
    for kind, stage in pipeline_passes(inputs.layout, inputs.rank):
        now = sum(held.values()) + waiting
        own = of_loss if stage == last else 0
        if kind == "F":
            waiting += own
            levels.append(PassBytes(now, now + own))
        elif kind == "I":
            levels.append(PassBytes(now, now))
        else:
            rest, done[stage] = now - held[stage] - own, done[stage] + 1
            split, number = kind == "W" and stage > 0, done[stage]
            alike = stage, min(number, 2), number == inputs.layout.micro_batches, split  # those between are all equal
            if alike not in found:
                opened, blocks = _opened_bytes(inputs, stage, number), _held_at_blocks(inputs, stage, number)
                found[alike] = *_pass(inputs, stage, number, split), opened, blocks
            within, held[stage], opened, blocks = found[alike]
            waiting -= own
            levels.append(PassBytes(now + opened, rest + within, tuple(rest + each for each in blocks)))
    return levels


def _held_at_blocks(inputs: MemoryInputs, stage: int, number: int) -> list[int]:
    """A stage's gradients when backward pass `number` (from 1) reaches each of its blocks, last one first."""
    n, wide, units = inputs.shards, inputs.wide, reversed(inputs.units(stage))
    blocks = [len(unit) for unit in units if unit[0].unit not in ("embed", "head")]
    head = sum(p.unit == "head" for p in inputs.parameters[stage])
    computed = list(accumulate([head, *blocks]))[:-1]  # parameters that have gradients where each block begins
    if inputs.layout.zero == 3 or (inputs.layout.replicas == 1 and inputs.itemsize == wide):
        rows = [0, *accumulate(wide * p.rows_numel(n) for p in reversed(inputs.parameters[stage]))]
        return [rows[-1] if number > 1 else rows[count] for count in computed]
    buckets, each = inputs.buckets(stage), _reduces_each(inputs)
    full = [0, *accumulate(wide * sum(p.padded_numel(n) for p in bucket) for bucket in buckets)]
    starts = list(accumulate(map(len, buckets)))[:-1]  # of all but the first
    held = []
    for count in computed:
        opened = len(buckets) if number > 1 and not each else bisect_left(starts, count) + (count > 0)
        sends = n > 1 and (each or number == inputs.layout.micro_batches)
        sent = max(0, opened - _IN_FLIGHT) if sends else 0
        summed = full[-1] if sends and each and number > 1 else full[sent]
        held.append(full[opened] - full[sent] + summed // n)
    return held


def _opened_bytes(inputs: MemoryInputs, stage: int, number: int) -> int:
    """The bucket that a backward pass allocates for its first gradient, while all activations are still there."""
    in_place = inputs.layout.replicas == 1 and inputs.itemsize == inputs.wide
    if in_place or inputs.layout.zero == 3 or (number > 1 and not _reduces_each(inputs)):
        return 0
    return inputs.wide * sum(p.padded_numel(inputs.shards) for p in inputs.buckets(stage)[0])


def _reduces_each(inputs: MemoryInputs) -> bool:
    """True if gradients are reduced after each micro-batch, and not after the last one only."""
    return inputs.layout.zero == 2 and inputs.shards > 1


def reduced_bytes(inputs: MemoryInputs) -> int:
    """Gradients when all are reduced: of whole parameters, or of the rows that this rank updates."""
    return inputs.wide * sum(p.rows_numel(inputs.shards) for ps in inputs.parameters.values() for p in ps)


def loss_gradient(inputs: MemoryInputs) -> int:
    """Bytes of the output matrix's gradient as the loss leaves it; in fp16 it is not scaled yet, and float32."""
    if inputs.block.on_grid:  # whose loss leaves the gradient of logits
        return 0
    return (
        inputs.block.vocabulary * inputs.model.width * (inputs.wide if inputs.precision == "fp16" else inputs.itemsize)
    )


def _tied_sum(inputs: MemoryInputs) -> int:
    """What the first and the last stage, on two ranks, all-reduce of the matrix that they share."""
    ends = inputs.layout.stage_ranks[0], inputs.layout.stage_ranks[-1]
    if not inputs.model.tied or ends[0] == ends[1] or inputs.rank not in ends:
        return 0
    shared = next(
        p for ps in inputs.parameters.values() for p in ps if p.name in ("embed.tokens.weight", "head.weight")
    )
    return inputs.wide * shared.rows_numel(inputs.shards)


def grid_sum_bytes(inputs: MemoryInputs) -> int:
    """What ranks of a grid all-reduce at once after the backward pass: along the axis of which it is most."""
    if not inputs.block.on_grid:
        return 0
    every = [p for ps in inputs.parameters.values() for p in ps]
    summed = summed_parameters(every, inputs.layout.tensor == "3d", inputs.layout.depth).values()
    return inputs.wide * max(sum(p.rows_numel(inputs.shards) for p in ps) for ps in summed)


def _pass(inputs: MemoryInputs, stage: int, number: int, split: bool) -> tuple[int, int]:
    """Peak within backward pass `number` (from 1) of a stage, and what it leaves.

    `split`: the pass computes only weights' gradients (Qi et al. 2023), and moves them to buckets at its end.
    """
    if inputs.layout.zero == 3:
        return _pass_of_units(inputs, stage, number)
    # autograd computes a split backward pass in several parts, and the loss does not know which is the last one
    kept_by_loss = loss_gradient(inputs) if split and stage == inputs.layout.stages - 1 else 0
    if inputs.layout.replicas == 1 and inputs.itemsize == inputs.wide:
        total = inputs.wide * sum(p.numel for p in inputs.parameters[stage])
        added = _added_bytes(inputs, stage, split) if number > 1 else 0
        return total + max(added, 2 * kept_by_loss) + _tied_bytes(inputs, stage), total
    peak, left = _pass_of_buckets(inputs, stage, number, split)
    return peak + kept_by_loss, left


def _added_bytes(inputs: MemoryInputs, stage: int, split: bool) -> int:
    """The largest gradient that is added to one of a micro-batch before; a split pass computes fused ones together."""
    fused = 2 * inputs.model.ffn_width // inputs.block.tp * inputs.block.whole
    together = fused if split and inputs.block.fused_products and inputs.model.is_gated else 0
    return inputs.wide * max(together, *(p.numel for p in inputs.parameters[stage]))


def _tied_bytes(inputs: MemoryInputs, stage: int) -> int:
    """A tied matrix has two gradients until the backward pass ends: the loss's and the embedding's."""
    if inputs.block.on_grid:
        return 0
    return inputs.itemsize * inputs.parameters[stage][0].numel if inputs.is_tied(stage) else 0


def _pass_of_buckets(inputs: MemoryInputs, stage: int, number: int, split: bool) -> tuple[int, int]:
    """Float32 sums in buckets, and the gradient that is moved into one; with shards a bucket is freed once sent."""
    n, e = inputs.shards, inputs.itemsize
    each = _reduces_each(inputs)
    sends = n > 1 and (each or number == inputs.layout.micro_batches)
    buckets, tied = inputs.buckets(stage), _tied_bytes(inputs, stage)
    full = [inputs.wide * sum(p.padded_numel(n) for p in bucket) for bucket in buckets]
    summed = sum(full) // n if each and number > 1 else 0
    filled = sum(full) if number > 1 and not each else 0
    unmoved = e * sum(p.numel for p in inputs.parameters[stage]) if split else 0
    peak = filled + unmoved
    for i, bucket in enumerate(buckets):
        moved = unmoved or e * max(p.numel for p in bucket)
        peak = max(peak, summed + filled + moved + tied)
        filled += full[i] if number == 1 or each else 0
        # a tied matrix that is alone in its bucket comes when its two gradients are one
        peak = max(peak, summed + filled + moved + tied * (len(bucket) > 1))
        unmoved -= e * sum(p.numel for p in bucket) if split else 0
        if sends:
            summed += full[i] // n
            peak = max(peak, summed + filled + unmoved + tied * (bucket is not buckets[-1]))
            if i >= _IN_FLIGHT:
                filled -= full[i - _IN_FLIGHT]
                summed -= full[i - _IN_FLIGHT] // n if each and number > 1 else 0
    if sends and inputs.layout.pp == 1:  # a pipeline waits for the last buckets when the next backward pass begins
        return peak, sum(full) // n
    return peak, summed + filled


def _pass_of_units(inputs: MemoryInputs, stage: int, number: int) -> tuple[int, int]:
    """FSDP: a unit's gradients, the copy that is sent, the copy of the unit before, and the shards of all others.

    In a pipeline the copy of the first unit is held until the next micro-batch's backward pass sends its own.
    """
    n, e = inputs.shards, inputs.itemsize
    units = list(reversed(inputs.units(stage)))
    shards = [inputs.wide * sum(p.rows_numel(n) for p in unit) for unit in units]
    in_pipeline = inputs.layout.pp > 1
    summed, sent, peak = sum(shards) if number > 1 else 0, 0, 0
    if in_pipeline and number > 1:
        sent = _sent_bytes(inputs, units[-1])
    for unit, shard in zip(units, shards, strict=True):
        own = e * sum(p.numel for p in unit)
        peak = max(peak, summed + sent + own + _tied_bytes(inputs, stage))
        sent = _sent_bytes(inputs, unit)
        last = e * unit[-1].numel  # which FSDP holds on to until the unit is sent
        peak = max(peak, summed + sent + max(own, last + shard))
        summed += shard if number == 1 else 0
    return peak, summed + (sent if in_pipeline and number < inputs.layout.micro_batches else 0)


def _sent_bytes(inputs: MemoryInputs, unit: Sequence[ParameterShape]) -> int:
    return inputs.wide * sum(p.padded_numel(inputs.shards) for p in unit)
