"""Initial weights as a function of (seed, parameter name, index): the same for every layout and order."""

import math

from torch import Tensor

from training.kernels.keyed_random import keyed_normal
from training.model.model_config import ModelConfig
from training.sharding.shard_spec import ShardSpec

_CHUNK = 1 << 20  # elements drawn at once: bounds the memory for the float64 in between


def fill_initial(values: Tensor, name: str, spec: ShardSpec, config: ModelConfig, seed: int) -> None:
    """Set `values` to a shard of the parameter `name`: ones for a norm, zeros for a bias, else normal.

    The deviation is GPT-2's, and what adds to the residual stream is scaled by 1 / sqrt(2 layers)
    (Radford et al. 2019, section 2.3). A process draws the elements of its shard and no others.
    """
    if name.endswith("bias"):
        values.zero_()
        return
    if len(spec.shape) == 1:
        values.fill_(1.0)
        return
    residual = name.endswith(("attention.o.weight", "mlp.down.weight"))
    deviation = config.init_std / math.sqrt(2 * config.layers) if residual else config.init_std
    flat = values.view(-1)
    for start in range(0, spec.numel, _CHUNK):
        stop = min(start + _CHUNK, spec.numel)
        flat[start:stop] = keyed_normal(seed, name, spec.indices(start, stop, values.device)) * deviation
