"""The mask of attention: causal, within a window, by distance, within a document; only here is decided what is seen.

Shapes: q (B, H, T, E), k and v (B, kv_heads, T, E), results (B, H, T, E). With documents that do not see each other all
sequences are one, (1, H, B T, E): within a document attention is that of a sequence of its length.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from training.kernels.block_attention import Seen
from training.kernels.dispatch import kernels_for
from training.kernels.precision import accumulation_dtype
from training.kernels.sink_attention import sink_attention
from training.kernels.varlen_attention import has_varlen_kernel, varlen_attention
from training.kernels.windowed_attention import windowed_attention
from training.model.documents import Documents
from training.model.dropout import Dropout


class Mask(NamedTuple):
    """A token sees itself and the tokens before it, of which the other fields hide some."""

    window: int = 0
    """How many tokens it sees, itself included; 0: all."""
    bias: Tensor | None = None
    """Added to the scores by distance (ALiBi): (1, H, T, T), -inf for later tokens."""
    documents: Documents | None = None
    """It sees those of its document."""
    sinks: Tensor | None = None
    """Of each head the score of a key of value 0, which it sees besides, (H,)."""

    def hidden(self, length: int, device: torch.device) -> Tensor:
        """Return the tokens that a token does not see, bool: (T, T), or of documents (B, 1, T, T), queries by keys."""
        hidden = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
        if self.window:
            hidden |= hidden.new_ones(hidden.shape).tril(-self.window)
        return hidden if self.documents is None else hidden | ~self.documents.same()

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return attention by torch's fused kernels: no weights, and on most devices no mask, of (T, T) in memory."""
        documents = self.documents
        if self.sinks is not None:
            return self._attend_with_sinks(q, k, v, self.sinks)
        if documents is None:
            return self._attend_within_sequence(q, k, v)
        if documents.bounds is None or torch.compiler.is_compiling():
            return self._attend_with_mask(q, k, v, documents)
        if kernels_for(q.device).SPLITS_DOCUMENTS:
            return self._attend_by_document(q, k, v, documents.bounds)
        if self.bias is None and has_varlen_kernel(q):
            return varlen_attention(q, k, v, documents.bounds, documents.positions.shape[1], self.window)
        return self._attend_with_mask(q, k, v, documents)

    def attend_with_dropout(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: Dropout, sample_ids: Tensor | None
    ) -> Tensor:
        """Return attention with all (T, T) weights in memory: torch's fused kernels have no counter-based dropout."""
        if self.documents is not None:
            q, k, v = (self.documents.split_sequences(t) for t in (q, k, v))
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        scores = scores if self.bias is None else scores + self.bias
        hidden = self.hidden(q.shape[2], q.device)
        scores = scores.masked_fill(hidden, -torch.inf)
        if self.sinks is not None:
            scores = torch.cat((scores, self.sinks[:, None, None].expand(*scores.shape[:3], 1)), -1)
        weights = scores.softmax(-1, dtype=accumulation_dtype(q.dtype))[..., : k.shape[2]]
        mixed = dropout(weights, sample_ids).to(v.dtype) @ v
        return mixed if self.documents is None else self.documents.join_sequences(mixed)

    def _attend_with_sinks(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        if self.documents is None:
            return sink_attention(q, k, v, sinks, Seen(0, 0, self.window))
        q, k, v = (self.documents.split_sequences(t) for t in (q, k, v))
        first = torch.arange(q.shape[2], device=q.device) - self.documents.positions
        return self.documents.join_sequences(sink_attention(q, k, v, sinks, Seen(0, 0, self.window, first)))

    def _attend_within_sequence(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[2]
        grouped = q.shape[1] != k.shape[1]
        if 0 < self.window < length:
            return windowed_attention(q, k, v, self.window)
        if self.bias is not None:
            bias = self.bias[..., :length, :length]
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=grouped)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    def _attend_by_document(self, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
        """Attend within one document after the other: no mask, and no work on tokens that are not seen."""
        lengths = bounds.diff().tolist()
        parts = zip(q.split(lengths, 2), k.split(lengths, 2), v.split(lengths, 2), strict=True)
        return torch.cat([self._attend_within_sequence(*part) for part in parts], dim=2)

    def _attend_with_mask(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
        """With a mask of (B, 1, T, T) in memory: its shape depends on no document, as torch.compile needs it."""
        q, k, v = (documents.split_sequences(t) for t in (q, k, v))
        hidden = self.hidden(q.shape[2], q.device)
        seen = ~hidden if self.bias is None else self.bias.masked_fill(hidden, -torch.inf)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=q.shape[1] != k.shape[1])
        return documents.join_sequences(mixed)
