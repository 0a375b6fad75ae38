"""MLP of a block, gated or not."""

from torch import Tensor, nn

from training.kernels.dispatch import fused_linears, gelu, swiglu
from training.model.layers import Linear
from training.model.model_config import ModelConfig


class GatedMLP(nn.Module):
    """SwiGLU MLP: down(silu(gate x) * up x) (Shazeer 2020, "GLU variants", equation 6)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        bias = bool(config.mlp_bias)
        self.gate = Linear(config.width, config.ffn_width, bias=bias)
        self.up = Linear(config.width, config.ffn_width, bias=bias)
        self.down = Linear(config.ffn_width, config.width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(swiglu(*fused_linears(x, (self.gate, self.up))))


class MLP(nn.Module):
    """GELU MLP: down(gelu(up x)), with GPT-2's tanh approximation or exact (Hendrycks & Gimpel 2016, section 2)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = Linear(config.width, config.ffn_width, bias=bool(config.mlp_bias))
        self.down = Linear(config.ffn_width, config.width, bias=bool(config.mlp_bias))
        self.approximate = "none" if config.mlp == "gelu-exact" else "tanh"

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gelu(self.up(x), self.approximate))


def build_mlp(config: ModelConfig) -> nn.Module:
    """The MLP of a block, (…, D) to (…, D)."""
    return GatedMLP(config) if config.mlp == "swiglu" else MLP(config)
