"""What gradient compression takes over: the buckets in which replicas sum gradients."""

from collections.abc import Callable, Mapping

from training.experimental.compression.bucket import compressed_buckets
from training.experimental.compression.options import CompressionOptions
from training.model.decoder import Decoder
from training.parallel.data.grad_reducer import GradBucket
from training.parallel.experiment import Experiment
from training.sharding.axis import Axes
from training.sharding.placement import Placement


class CompressionExperiment(Experiment):
    """Buckets whose matrices are sent compressed."""

    def __init__(self, options: CompressionOptions) -> None:
        self.options = options

    def make_bucket(
        self, part: Decoder, table: Mapping[str, Placement], axes: Axes, seed: int
    ) -> Callable[..., GradBucket]:
        return compressed_buckets(part, self.options, table, axes, seed)
