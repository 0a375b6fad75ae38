"""Weight initialisation, counter-based: a function of (seed, parameter name, index), the same for every layout."""

import math

from torch import Tensor

from training.kernels.keyed_random import keyed_normal
from training.model.decoder import Decoder
from training.model.model_config import ModelConfig
from training.model.own_parts import own_values, own_weights
from training.sharding.shard_spec import ShardSpec

_CHUNK = 1 << 20  # elements drawn at a time: bounds the memory for float64 intermediates


def init_shard(values: Tensor, name: str, spec: ShardSpec, config: ModelConfig, seed: int) -> None:
    """Initialise a shard in place: zeros for biases and sinks, ones for norms, else normal (see `deviation_of`).

    `values` has shape `spec.size`; `name` is the parameter's name. Draws the shard's elements only; on the meta device
    there are none.
    """
    if values.is_meta:
        return
    if name.endswith(("bias", "sinks")):
        values.zero_()
        return
    if len(spec.global_shape) == 1:
        values.fill_(1.0)
        return
    _fill_normal(values, name, spec, deviation_of(name, spec.global_shape, config), seed)


def _fill_normal(values: Tensor, name: str, spec: ShardSpec, deviation: float, seed: int) -> None:
    flat = values.view(-1)
    for start in range(0, spec.numel, _CHUNK):
        stop = min(start + _CHUNK, spec.numel)
        flat[start:stop] = keyed_normal(seed, name, spec.indices(start, stop, values.device)) * deviation


class InitialValues:
    """The first values of a model's parameters: ours, or those that own parts of the user's say."""

    def __init__(self, decoder: Decoder, seed: int) -> None:
        self.decoder = decoder
        self.seed = seed
        self._weights = own_weights(decoder)
        self._made: tuple[str, dict[str, Tensor]] = ("", {})  # the own part that was made last, and its values

    def fill(self, values: Tensor, name: str, spec: ShardSpec) -> None:
        """Initialise a shard of a parameter in place; `values` has shape `spec.size`."""
        config = self.decoder.config
        weight = self._weights.get(name)
        if weight is None:
            init_shard(values, name, spec, config, self.seed)
        elif values.is_meta:
            return
        elif weight.initial == "own":
            values.copy_(self._own(name)[spec.slices])
        elif isinstance(weight.initial, str):
            scale = 1 / math.sqrt(2 * config.layers) if weight.initial == "residual" else 1.0
            _fill_normal(values, name, spec, config.init_std * scale, self.seed)
        else:
            values.fill_(weight.initial)

    def _own(self, name: str) -> Tensor:
        """Return the parameter as the own part that has it makes it: the block, or else the MLP."""
        parts = name.split(".")
        path = ".".join(parts[: 2 if self.decoder.config.block else 3])
        if self._made[0] != path:
            self._made = (path, own_values(self.decoder, path, self.decoder.config, self.seed))
        return self._made[1][name.removeprefix(f"{path}.")]


def deviation_of(name: str, shape: tuple[int, ...], config: ModelConfig) -> float:
    """Standard deviation of a matrix's initial weights: `init_std`, but for two kinds.

    Matrices that add to the residual stream are scaled by 1 / sqrt(2 layers), as in GPT-2 (Radford et al. 2019, section
    2.3). With DeepNorm all matrices of blocks have Xavier's, sqrt(2 / (inputs + outputs)), and all but queries' and
    keys' that times 1 / sqrt(2 layers) (Zeng et al. 2022, GLM-130B, section 2.1; which: Wang et al. 2022, DeepNet,
    figure 2).
    """
    scale = 1 / math.sqrt(2 * config.layers)
    if config.residual == "deepnorm" and name.startswith("blocks."):
        xavier = math.sqrt(2 / sum(shape[-2:]))
        return xavier if name.endswith(("attention.q.weight", "attention.k.weight")) else xavier * scale
    return config.init_std * scale if name.endswith(("attention.o.weight", ".down.weight")) else config.init_std
