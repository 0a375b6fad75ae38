"""MLP of a block, gated or not."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.kernels.dispatch import gelu, swiglu
from training.model.layers import Linear
from training.model.model_config import ModelConfig
from training.model.own_parts import OwnMLP, build_own_mlp, own_activation
from training.own_code import is_own


def gate_function(config: ModelConfig) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the elementwise part of a gated MLP."""
    own = own_activation(config)
    return own or {"geglu": geglu, "swiglu-clamped": clamped_swiglu}.get(str(config.mlp), swiglu)


class GatedMLP(nn.Module):
    """SwiGLU or GeGLU MLP: down(silu(gate x) * up x), or with GELU (Shazeer 2020, "GLU variants", equations 6, 5)."""

    last = "down"

    def __init__(self, config: ModelConfig, features: int = 0) -> None:
        super().__init__()
        bias = bool(config.mlp_bias)
        features = features or config.ffn_width
        self.gate = Linear(config.width, features, bias=bias)
        self.up = Linear(config.width, features, bias=bias)
        self.down = Linear(features, config.width, bias=bias)
        self.combine = gate_function(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.combine(*self.gate.fused_with(x, self.up)))


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """GeGLU's elementwise part, with the exact GELU: tensors of one shape (Shazeer 2020, equation 5)."""
    return gelu(gate, "none") * up


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return (up + 1) gate σ(1.702 gate) of clamped tensors of one shape, as gpt-oss's published code has it."""
    gate = gate.clamp(max=7.0)
    up = up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


class MLP(nn.Module):
    """MLP without gate: down(activation(up x)); `activate` has the activations."""

    last = "down"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = Linear(config.width, config.ffn_width, bias=bool(config.mlp_bias))
        self.down = Linear(config.ffn_width, config.width, bias=bool(config.mlp_bias))
        self.activation = own_activation(config) or partial(activate, kind=str(config.mlp))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


def activate(x: Tensor, kind: str) -> Tensor:
    """ReLU, or GELU: exact, GPT-2's tanh approximation, or x σ(1.702 x) (Hendrycks & Gimpel 2016, section 2)."""
    if kind == "relu":
        return F.relu(x)
    if kind == "gelu-fast":
        return x * torch.sigmoid(1.702 * x)
    return gelu(x, "none" if kind == "gelu-exact" else "tanh")


def build_mlp(config: ModelConfig) -> GatedMLP | MLP | OwnMLP:
    """Return the MLP of a dense layer, (…, D) to (…, D)."""
    if is_own(config.mlp) and own_activation(config) is None:
        return build_own_mlp(config)
    return GatedMLP(config) if config.is_gated else MLP(config)
