"""Block: attention and MLP, each with its norm, on the residual stream."""

from torch import Tensor, nn

from training.model.attention import Attention
from training.model.dropout import Dropout
from training.model.layers import build_norm
from training.model.mlp import build_mlp
from training.model.model_config import ModelConfig


class Block(nn.Module):
    """Pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, name: str) -> None:
        super().__init__()
        self.attention_norm = build_norm(config)
        self.attention = Attention(config, name)
        self.attention_dropout = Dropout(config.dropout, f"{name}.attention.out")
        self.mlp_norm = build_norm(config)
        self.mlp = build_mlp(config)
        self.mlp_dropout = Dropout(config.dropout, f"{name}.mlp.out")

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, sample_ids: Tensor | None) -> Tensor:
        x = x + self.attention_dropout(self.attention(self.attention_norm(x), rotary, sample_ids), sample_ids)
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)), sample_ids)
