"""Compressed traffic: what replicas send of their gradients, by the formulas of its papers.

Of a matrix of n x m PowerSGD of rank r all-reduces r (n + m) numbers (Vogels et al. 2019, section 3), if they are
fewer. 8 bits: of the L numbers of a bucket's matrices each of N replicas sends its N chunks of K blocks, K = L / (256
N) rounded up, of 256 bytes and a scale of 4, and as much of the sums. All else is all-reduced as it is.
"""

from collections.abc import Sequence

from training.experimental.compression.options import CompressionOptions
from training.parallel.experiment import Experiment
from training.parallel.parameter_shapes import ParameterShape, pack_buckets
from training.parallel.traffic_inputs import Traffic, TrafficInputs, Volume, add_traffic

_BLOCK = 256  # numbers that share a scale
_SCALE = 4  # bytes of a scale


class CompressionFormulas(Experiment):
    """The formulas of what replicas send instead of their gradients."""

    def __init__(self, layout: CompressionOptions) -> None:
        self.layout = layout

    def reduction_traffic(self, inputs: TrafficInputs) -> Traffic:
        of_bucket = _powersgd if self.layout.compression == "powersgd" else _int8
        buckets = [b for stage in inputs.parameters.values() for b in pack_buckets(stage, inputs.bucket_elements)]
        parts: list[Traffic] = []
        for bucket in buckets:
            matrices = [p for p in bucket if _is_compressed(self.layout, p)]
            rest = sum(p.numel for p in bucket if p not in matrices) * inputs.wide
            sent = of_bucket(self.layout, matrices, rest, inputs.wide)
            parts += [{("replicate", operation): Volume(1, nbytes)} for operation, nbytes in sent]
        return add_traffic(parts)


def _is_compressed(layout: CompressionOptions, p: ParameterShape) -> bool:
    """Return the matrices whose gradients only replicas sum; of PowerSGD those that become smaller."""
    of_tp = layout.tp > 1 and (p.of_heads or p.copies > 1 or (layout.sequence_parallel and not p.divided))
    shrinks = layout.compression == "int8" or layout.compression_rank * sum(p.shape) < p.numel
    return len(p.shape) == 2 and not of_tp and shrinks


def _powersgd(
    layout: CompressionOptions, matrices: Sequence[ParameterShape], rest: int, wide: int
) -> list[tuple[str, int]]:
    """First P with what is not compressed, then Q."""
    rows, columns = (layout.compression_rank * wide * sum(p.shape[dim] for p in matrices) for dim in (0, 1))
    return [("all-reduce", rows + rest)] + [("all-reduce", columns)] * bool(matrices)


def _int8(
    layout: CompressionOptions, matrices: Sequence[ParameterShape], rest: int, _wide: int
) -> list[tuple[str, int]]:
    """Return the codes of the gradients, what is not compressed, then codes of the sums."""
    blocks = -(-sum(p.numel for p in matrices) // (_BLOCK * layout.replicas))
    codes = layout.replicas * blocks * (_BLOCK + _SCALE)
    both = [("all-to-all", codes), ("all-gather", codes)] * bool(matrices)
    return both + [("all-reduce", rest)] * bool(rest)
