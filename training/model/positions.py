"""Positions: a learned embedding per position, or the angles that rotate queries and keys."""

import torch
from torch import Tensor, nn

from training.kernels.dispatch import embedding
from training.kernels.precision import accumulation_dtype
from training.kernels.rotary import rotary_table
from training.model.model_config import ModelConfig


class PositionEmbedding(nn.Embedding):
    """Learned embedding of the positions of features (B, T, D): (T, D)."""

    def forward(self, x: Tensor) -> Tensor:
        return embedding(self.positions(x), self.weight)

    def positions(self, x: Tensor) -> Tensor:
        """Positions of the tokens in their sequence, (T,) int64."""
        return torch.arange(x.shape[1], device=x.device)


class Rotary(nn.Module):
    """The pair cos, sin of the positions of features (B, T, D), each (T, E); None for a model without rotary ones."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        config = self.config
        if config.positions != "rope":
            return None
        return rotary_table(self.positions(x), config.head_dim, config.rope_base, accumulation_dtype(x.dtype))

    def positions(self, x: Tensor) -> Tensor:
        """Positions of the tokens in their sequence, (T,) int64."""
        return torch.arange(x.shape[1], device=x.device)
