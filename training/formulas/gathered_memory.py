"""Gathered memory: copies of parameters that ranks receive from each other, at their peak."""

from collections.abc import Sequence

from training.formulas.memory_inputs import MemoryInputs
from training.formulas.parameter_shapes import ParameterShape


def gathered_bytes(inputs: MemoryInputs) -> int:
    """ZeRO-3: the unit at work, what was received of it, and the next one, received meanwhile (Zhao et al. 2023).

    The last unit stays for its backward pass, and so does one that both ends share; in a pipeline all of them stay,
    and the buffers in which the last two were received.
    ZeRO-1 and 2 gather after the update, bucket by bucket: the gathered bucket and this rank's part of it.
    """
    if inputs.layout.zero == 3:
        sizes = {stage: [_copy_bytes(inputs, unit) for unit in inputs.units(stage)] for stage in inputs.parameters}
        if inputs.layout.pp > 1:
            return sum(map(sum, sizes.values())) + max(sum(each[-2:]) for each in sizes.values())
        return _gathered_by_unit(sizes[0], tied=inputs.is_tied(0))
    if inputs.layout.zero == 0:
        return 0
    largest = max(_copy_bytes(inputs, bucket) for stage in inputs.parameters for bucket in inputs.buckets(stage))
    return largest + largest // inputs.shards if inputs.shards > 1 else 0


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


def gathered_at_loss(inputs: MemoryInputs) -> int:
    """ZeRO-3, while the loss is computed: the last unit, and what was received of it; in a pipeline all units."""
    if inputs.layout.zero < 3:
        return 0
    if inputs.layout.pp > 1:
        return gathered_bytes(inputs)
    sizes = [_copy_bytes(inputs, unit) for unit in inputs.units(0)]
    return sizes[0] + sizes[-1] if inputs.is_tied(0) else 2 * sizes[-1]
