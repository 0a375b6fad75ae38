"""Experiment: what an experimental kind of parallelism takes over. The core asks `experiment_of(layout)`, and no more.

The kinds are in training/experimental; the layout's class registers which of them its options ask for.
"""

from collections.abc import Callable, Mapping
from functools import singledispatch
from typing import TYPE_CHECKING, ClassVar

from training.model.model_config import ModelConfig
from training.parallel.layout import Layout
from training.parallel.parameter_shapes import ParameterShape
from training.parallel.traffic_inputs import Traffic, TrafficInputs

if TYPE_CHECKING:  # options are read without torch
    from training.model.decoder import Decoder
    from training.parallel.data.grad_reducer import GradBucket
    from training.sharding.axis import Axes
    from training.sharding.placement import Placement
    from training.sharding.shard_spec import ShardSpec


class Experiment:
    """Takes over nothing, as where the core's kinds are used alone; an experimental kind overrides what it replaces."""

    tp_axes: Mapping[str, int] = {}
    """Axes into which the tensor-parallel ranks are divided, with their sizes, outermost first."""
    batch_axes: ClassVar[tuple[str, ...]] = ()
    """Those of them that divide the sequences of a replica."""
    vocabulary_axis: str = "tp"
    """The axis that divides the vocabulary."""

    def placements(self) -> "dict[str, Placement] | None":
        """Return the placement of each parameter over the tensor-parallel ranks, by the end of its name."""

    def shard_modules(self, part: "Decoder", pieces: "Mapping[str, ShardSpec]", axes: "Axes") -> bool | None:
        """Replace the modules of a part on the meta device, as tensor parallelism does; True if it did."""

    def make_bucket(
        self, part: "Decoder", table: "Mapping[str, Placement]", axes: "Axes", seed: int
    ) -> "Callable[..., GradBucket] | None":
        """Return what makes the gradient buckets of a part, from the arguments of `GradBucket`."""

    def parameters(self, model: ModelConfig, layers: range, stage: int, tp_rank: int) -> list[ParameterShape] | None:
        """Return the blocks of a stage's parameters on a tensor-parallel rank."""

    def tensor_traffic(self, inputs: TrafficInputs) -> Traffic | None:
        """Return the traffic within layers, and of the gradients that tensor-parallel ranks sum, by its formulas."""

    def reduction_traffic(self, inputs: TrafficInputs) -> Traffic | None:
        """Return the traffic of the gradients that replicas sum, by its formulas."""


@singledispatch
def experiment_of(_layout: Layout) -> Experiment:
    """Return the experiment that the options of a layout ask for."""
    return Experiment()
