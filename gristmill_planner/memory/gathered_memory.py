"""Gathered memory: copies of parameters that ranks receive from each other, at their peak."""

from collections.abc import Sequence

from gristmill_planner.memory.memory_inputs import MemoryInputs
from training.parallel.parameter_shapes import ParameterShape
from training.parallel.pipeline.schedules import pipeline_passes

_IN_FLIGHT = 2  # buckets that ZeRO-1 and 2 gather at a time


def gathered_bytes(inputs: MemoryInputs) -> int:
    """ZeRO-3: the unit at work, what was received of it, and the next one, received meanwhile (Zhao et al. 2023).

    The last unit stays for its backward pass, and so does one that both ends share; in a pipeline all of them stay,
    and the buffers in which the last two were received.
    ZeRO-1 and 2 gather after the update, two buckets at a time in the order of use: each with this rank's part of it.
    """
    if inputs.layout.zero == 3:
        sizes = {stage: [_copy_bytes(inputs, unit) for unit in inputs.units(stage)] for stage in inputs.parameters}
        if inputs.layout.pp > 1:
            return sum(map(sum, sizes.values())) + max(sum(each[-2:]) for each in sizes.values())
        return _gathered_by_unit(sizes[0], tied=inputs.is_tied(0))
    if inputs.layout.zero == 0:
        return 0
    if inputs.shards == 1:
        return 0
    sizes = {stage: [_copy_bytes(inputs, bucket) for bucket in inputs.buckets(stage)] for stage in inputs.parameters}
    together = sum(max(sum(each[i : i + _IN_FLIGHT]) for i in range(len(each))) for each in sizes.values())
    return together + together // inputs.shards


def _copy_bytes(inputs: MemoryInputs, parameters: Sequence[ParameterShape]) -> int:
    return inputs.itemsize * sum(p.padded_numel(inputs.shards) for p in parameters)


def _gathered_by_unit(sizes: Sequence[int], tied: bool) -> int:
    """The unit at work and its copy as received; with them that of the unit before, or then of the next one."""
    first, *rest = sizes
    around = zip([first, *rest[:-1]], rest, [*rest[1:], 0], strict=True)
    within = max((2 * size + max(before, after) for before, size, after in around), default=0)
    if tied:  # the first unit stays
        return first + max(first, within)
    return max(2 * first + rest[0] if rest else 2 * first, within)


def gathered_levels(inputs: MemoryInputs) -> list[int]:
    """What is gathered at the fullest moment of each pass, in the order of `pipeline_passes`: under ZeRO-3 only.

    While the loss is computed it is the last unit, and what was received of it. In a pipeline each stage's first
    forward pass gathers; the others find all units, without the buffers in which they were received.
    """
    passes = pipeline_passes(inputs.layout, inputs.rank)
    if inputs.layout.zero < 3:
        return [0] * len(passes)
    sizes = [_copy_bytes(inputs, unit) for stage in inputs.parameters for unit in inputs.units(stage)]
    if inputs.layout.pp > 1:
        kept, gathering = sum(sizes), gathered_bytes(inputs)
        gathers = [each.kind == "F" and each not in passes[:i] for i, each in enumerate(passes)]
        return [gathering if first else kept for first in gathers]
    at_loss = sizes[0] + sizes[-1] if inputs.is_tied(0) else 2 * sizes[-1]
    return [at_loss if each.kind == "F" else gathered_bytes(inputs) for each in passes]
