"""Weight initialisation, counter-based: a function of (seed, parameter name, index), the same for every layout."""

import math

from torch import Tensor

from training.kernels.keyed_random import keyed_normal
from training.model.model_config import ModelConfig
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
    deviation = deviation_of(name, spec.global_shape, config)
    flat = values.view(-1)
    for start in range(0, spec.numel, _CHUNK):
        stop = min(start + _CHUNK, spec.numel)
        flat[start:stop] = keyed_normal(seed, name, spec.indices(start, stop, values.device)) * deviation


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
