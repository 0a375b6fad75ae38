"""Attention of a block: projections, rotation of queries and keys, and attention to the tokens that are not hidden."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from training.kernels.dispatch import embedding
from training.kernels.rotary import apply_rotary
from training.model.attention_mask import Mask
from training.model.documents import Documents
from training.model.dropout import Dropout
from training.model.layers import EmbeddingTable, Linear, build_norm
from training.model.model_config import ModelConfig
from training.model.positions import DocumentTable, PositionTable, SequenceTable


class Attention(nn.Module):
    """Causal self-attention with grouped-query heads (Vaswani et al. 2017; Ainslie et al. 2023)."""

    attend: Callable[[Mask, Tensor, Tensor, Tensor], Tensor] = staticmethod(Mask.attend)
    """Attention to the tokens that a mask does not hide; another one where a sequence is on several ranks."""
    attend_with_dropout: Callable[[Mask, Tensor, Tensor, Tensor, Dropout, Tensor | None], Tensor] = staticmethod(
        Mask.attend_with_dropout
    )
    """The same with dropout of the weights."""
    joint_norms = False
    """Norms of the queries and keys of all heads together."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.window = config.layer_window(layer)
        self.sinks = nn.Parameter(torch.empty(config.heads)) if config.sinks else None
        self.dropout = Dropout(config.dropout, f"blocks.{layer}.attention")
        bias = bool(config.qkv_bias)
        self.q = Linear(config.width, config.q_width, bias=bias)
        self.k = Linear(config.width, config.kv_width, bias=bias)
        self.v = Linear(config.width, config.kv_width, bias=bias)
        self.joint_norms = joint = bool(config.qk_norm_joint)
        self.q_norm = build_norm(config, config.q_width if joint else config.head_dim) if config.qk_norm else None
        self.k_norm = build_norm(config, config.kv_width if joint else config.head_dim) if config.qk_norm else None
        self.o = Linear(config.q_width, config.width, bias=bool(config.out_bias))

    def forward(self, x: Tensor, table: PositionTable, sample_ids: Tensor | None) -> Tensor:
        """Return (B, T, D) to (B, T, D); `sample_ids` (B,) int64.

        Where documents do not see each other, all sequences are one of B T tokens until the last projection.
        """
        table, documents = table if isinstance(table, DocumentTable) else (table, None)
        q, k, v = self.heads(x, table, documents)
        mask = Mask(self.window, table if isinstance(table, Tensor) else None, documents, self.sinks)
        return self.o(self.mix(mask, q, k, v, sample_ids).transpose(1, 2).reshape(*x.shape[:2], -1))

    def heads(self, x: Tensor, table: SequenceTable, documents: Documents | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries, keys and values of features (B, T, D), each (B, H, T, E), rotated.

        With documents (1, H, B T, E).
        """
        projected = self.project(x, documents)
        if documents is not None:
            projected = [y.flatten(0, 1)[None] for y in projected]
        q, k, v = projected
        if self.joint_norms:  # Muennighoff et al. 2024, OLMoE
            q, k = self._norm(q, k)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (q, k, v))
        if not self.joint_norms:
            q, k = self._norm(q, k)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        if isinstance(table, tuple):
            q = apply_rotary(q, table)
            k = apply_rotary(k, table)
        return q, k, v

    def mix(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor, sample_ids: Tensor | None) -> Tensor:
        """Return the values weighted by attention, (B, H, T, E)."""
        if self.training and self.dropout.p:
            return self.attend_with_dropout(mask, q, k, v, self.dropout, sample_ids)
        return self.attend(mask, q, k, v)

    def _norm(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalised queries and keys, of each head or of all together.

        Source: Dehghani et al. 2023, "ViT-22B", section 2.
        """
        if self.q_norm is None or self.k_norm is None:
            return q, k
        return self.q_norm(q), self.k_norm(k)

    def project(self, x: Tensor, _documents: Documents | None) -> Sequence[Tensor]:
        """Return the queries, keys and values of features (B, T, D), each (B, T, …)."""
        return self.q.fused_with(x, self.k, self.v)


class QueryAttention(Attention):
    """Attention whose queries are learned, one per position: of the next token's (Zeng et al. 2021, PanGu-α, 3.2)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.query = EmbeddingTable(config.context, config.width)

    def project(self, x: Tensor, documents: Documents | None) -> Sequence[Tensor]:
        positions = torch.arange(x.shape[1], device=x.device) if documents is None else documents.positions
        q = self.q(embedding(positions, self.query.weight))
        return q.expand(len(x), -1, -1), *self.k.fused_with(x, self.v)
