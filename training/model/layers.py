"""Layers that the parts of a model share: linear layers, embeddings and norms."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from training.kernels.dispatch import fused_linears, layer_norm, linear, rms_norm
from training.model.model_config import ModelConfig


class Linear(nn.Linear):
    """Linear layer x W^T + bias."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def fused_with(self, x: Tensor, *others: nn.Linear) -> Sequence[Tensor]:
        """Apply this layer and `others` to the same `x`, in one product where that is faster."""
        return fused_linears(x, (self, *others))


class EmbeddingTable(nn.Embedding):
    """Embedding that draws no values on the meta device: torch would import torch._dynamo for it, in half a second."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension (Zhang & Sennrich 2019, equation 4)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.LayerNorm):
    """LayerNorm over the last dimension (Ba et al. 2016, equation 4)."""

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)


def build_norm(config: ModelConfig, features: int = 0) -> nn.Module:
    """RMSNorm or LayerNorm over `features`, or the D of the residual stream."""
    features = features or config.width
    if config.norm == "rms":
        return RMSNorm(features, config.norm_eps)
    return LayerNorm(features, config.norm_eps, bias=bool(config.bias))
