"""Initial weights as a function of (seed, parameter name, index): the same for every layout and order.

A parameter's element i is drawn from a counter-based generator, SplitMix64 (Steele et al. 2014, figure
11), whose key is the seed and the name; so a shard can draw its own elements and no others.
"""

import hashlib
import math

import torch
from torch import Tensor, nn

from training.config import ModelConfig
from training.model import Decoder

_CHUNK = 1 << 20  # elements drawn at once: bounds the memory for the float64 in between


def materialize(model: Decoder, device: torch.device, seed: int) -> Decoder:
    """Give a model built on the meta device its memory on `device`, and its initial weights."""
    model.to_empty(device=device)
    model.tie()  # to_empty gave the tied matrices a memory each
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(name, parameter, model.config, seed))
    return model


def initial_value(name: str, parameter: nn.Parameter, config: ModelConfig, seed: int) -> Tensor:
    """Ones for a norm, zeros for a bias, else normal with the deviation GPT-2 gives it; on parameter's device.

    What adds to the residual stream is scaled by 1 / sqrt(2 layers) (Radford et al. 2019, section 2.3).
    """
    if name.endswith("bias"):
        return torch.zeros_like(parameter)
    if parameter.ndim == 1:
        return torch.ones_like(parameter)
    residual = name.endswith(("attention.o.weight", "mlp.down.weight"))
    deviation = config.init_std / math.sqrt(2 * config.layers) if residual else config.init_std
    values = torch.empty_like(parameter)
    for start in range(0, values.numel(), _CHUNK):
        stop = min(start + _CHUNK, values.numel())
        index = torch.arange(start, stop, device=values.device)
        values.view(-1)[start:stop] = keyed_normal(seed, name, index) * deviation
    return values


def keyed_normal(seed: int, name: str, index: Tensor) -> Tensor:
    """Standard normal numbers (float64), element by element a function of seed, name and index (int64)."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    bits = _splitmix64(index + 1, int.from_bytes(digest, "little", signed=True))
    uniform = (_shift_right(bits, 11).double() + 0.5) * 2.0**-53
    return torch.special.ndtri(uniform)


def _splitmix64(counter: Tensor, key: int) -> Tensor:
    """The counter-th output of SplitMix64 from state `key`; int64 arithmetic wraps as uint64 would."""
    z = counter * _signed(0x9E3779B97F4A7C15) + key
    z = (z ^ _shift_right(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift_right(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shift_right(z, 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: int64's own copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
