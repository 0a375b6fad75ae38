"""Attention of a block: projections, rotation of queries and keys, and the mask."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.kernels.dispatch import fused_linears
from training.kernels.precision import accumulation_dtype
from training.kernels.rotary import apply_rotary
from training.kernels.windowed_attention import windowed_attention
from training.model.dropout import Dropout
from training.model.layers import Linear, build_norm
from training.model.model_config import ModelConfig


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

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, sample_ids: Tensor | None) -> Tensor:
        """(B, T, D) to (B, T, D); `rotary` is the pair cos, sin of `rotary_table`, `sample_ids` (B,) int64."""
        projected = fused_linears(x, (self.q, self.k, self.v))
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in projected)
        if self.q_norm is not None and self.k_norm is not None:  # Dehghani et al. 2023, "ViT-22B", section 2
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        if rotary is not None:
            q, k = apply_rotary(q, rotary), apply_rotary(k, rotary)
        if self.training and self.dropout.p:
            mixed = self._attention_with_dropout(q, k, v, sample_ids)
        elif 0 < self.window < q.shape[2]:
            mixed = windowed_attention(q, k, v, self.window)
        else:
            grouped = q.shape[1] != k.shape[1]
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.o(mixed.transpose(1, 2).flatten(-2))

    def _attention_with_dropout(self, q: Tensor, k: Tensor, v: Tensor, sample_ids: Tensor | None) -> Tensor:
        """Attention with all (T, T) weights in memory: torch's fused kernel has no counter-based dropout.

        `q` (B, H, T, E); `k` and `v` (B, kv_heads, T, E).
        """
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        scores = q @ k.transpose(-2, -1) * self.head_dim**-0.5
        hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
        if self.window:
            hidden |= hidden.new_ones(hidden.shape).tril(-self.window)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1, dtype=accumulation_dtype(q.dtype))
        return self.dropout(weights, sample_ids).to(v.dtype) @ v
