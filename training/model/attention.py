"""Attention of a block: projections, rotation of queries and keys, and the mask."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.kernels.dispatch import embedding, fused_linears
from training.kernels.precision import accumulation_dtype
from training.kernels.rotary import apply_rotary
from training.kernels.windowed_attention import windowed_attention
from training.model.dropout import Dropout
from training.model.layers import Linear, build_norm
from training.model.model_config import ModelConfig
from training.model.positions import PositionTable


class Attention(nn.Module):
    """Causal self-attention with grouped-query heads (Vaswani et al. 2017; Ainslie et al. 2023)."""

    def __init__(self, config: ModelConfig, name: str) -> None:
        super().__init__()
        self.head_dim, self.window = config.head_dim, config.window
        self.dropout = Dropout(config.dropout, f"{name}.attention")
        bias = bool(config.qkv_bias)
        self.q = Linear(config.width, config.q_width, bias=bias)
        self.k = Linear(config.width, config.kv_width, bias=bias)
        self.v = Linear(config.width, config.kv_width, bias=bias)
        self.q_norm = build_norm(config, config.head_dim) if config.qk_norm else None
        self.k_norm = build_norm(config, config.head_dim) if config.qk_norm else None
        self.o = Linear(config.q_width, config.width, bias=bool(config.out_bias))

    def forward(self, x: Tensor, table: PositionTable, sample_ids: Tensor | None) -> Tensor:
        """(B, T, D) to (B, T, D); `sample_ids` (B,) int64."""
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in self.project(x))
        if self.q_norm is not None and self.k_norm is not None:  # Dehghani et al. 2023, "ViT-22B", section 2
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        bias = table if isinstance(table, Tensor) else None
        if isinstance(table, tuple):
            q, k = apply_rotary(q, table), apply_rotary(k, table)
        if self.training and self.dropout.p:
            mixed = self._attention_with_dropout(q, k, v, bias, sample_ids)
        elif 0 < self.window < q.shape[2]:
            mixed = windowed_attention(q, k, v, self.window)
        elif bias is not None:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=q.shape[1] != k.shape[1])
        else:
            grouped = q.shape[1] != k.shape[1]
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.o(mixed.transpose(1, 2).flatten(-2))

    def project(self, x: Tensor) -> Sequence[Tensor]:
        """Queries, keys and values of features (B, T, D), each (B, T, …)."""
        return fused_linears(x, (self.q, self.k, self.v))

    def _attention_with_dropout(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sample_ids: Tensor | None
    ) -> Tensor:
        """Attention with all (T, T) weights in memory: torch's fused kernel has no counter-based dropout.

        `q` (B, H, T, E); `k` and `v` (B, kv_heads, T, E).
        """
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        scores = q @ k.transpose(-2, -1) * self.head_dim**-0.5
        scores = scores if bias is None else scores + bias
        hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
        if self.window:
            hidden |= hidden.new_ones(hidden.shape).tril(-self.window)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1, dtype=accumulation_dtype(q.dtype))
        return self.dropout(weights, sample_ids).to(v.dtype) @ v


class QueryAttention(Attention):
    """Attention whose queries are learned, one per position: of the next token's (Zeng et al. 2021, PanGu-α, 3.2)."""

    def __init__(self, config: ModelConfig, name: str) -> None:
        super().__init__(config, name)
        self.query = nn.Embedding(config.context, config.width)

    def project(self, x: Tensor) -> Sequence[Tensor]:
        q = self.q(embedding(torch.arange(x.shape[1], device=x.device), self.query.weight))
        return q.expand(len(x), -1, -1), *fused_linears(x, (self.k, self.v))
