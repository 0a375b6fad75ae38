"""Ulysses: ranks exchange tokens for heads around attention (Jacobs et al. 2023, "DeepSpeed Ulysses").

Rank r of n has chunk r of each sequence. One all-to-all sends each rank the queries, keys and values of its heads, so
that it has H / n heads of all tokens, and attends as one process does; another one returns the outputs. Both passes
send (n - 1) / n of B T / n (2 h + 2 h') numbers a rank, h features of queries and h' of keys: unlike a ring's, that
shrinks with n. But n divides the heads, those of keys too.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from training.distributed.collectives import Collective
from training.model.attention_mask import Mask
from training.model.dropout import Dropout
from training.parallel.context.tokens import TokenOrder
from training.sharding.axis import Axis


class Ulysses:
    """Attention of this rank's heads among all tokens, in the place of `Mask`'s."""

    def __init__(self, order: TokenOrder) -> None:
        self.axis = order.axis

    def attend(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with q (B, H, T / n, E), k and v (B, kv_heads, T / n, E); with documents of all B in one sequence.

        `mask` is that of all tokens, and its bias that of this rank's heads.
        """
        return self._attend(mask, self._of_own_heads(mask).attend, q, k, v)

    def attend_with_dropout(
        self, mask: Mask, q: Tensor, k: Tensor, v: Tensor, dropout: Dropout, sample_ids: Tensor | None
    ) -> Tensor:
        """Attend as `attend`; `dropout` is that of this rank's heads."""
        attend = partial(self._of_own_heads(mask).attend_with_dropout, dropout=dropout, sample_ids=sample_ids)
        return self._attend(mask, attend, q, k, v)

    def _of_own_heads(self, mask: Mask) -> Mask:
        own = None if mask.sinks is None else mask.sinks.chunk(self.axis.size)[self.axis.rank]
        return mask._replace(sinks=own)

    def _attend(self, mask: Mask, attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        documents = mask.documents
        if documents is None:
            return self._to_tokens(attend(*self._to_heads(q, k, v)))
        sequences = len(documents.positions)
        q, k, v = (x[0].unflatten(1, (sequences, -1)).transpose(0, 1) for x in (q, k, v))
        output = attend(*(documents.join_sequences(x) for x in self._to_heads(q, k, v)))
        return documents.join_sequences(self._to_tokens(documents.split_sequences(output)))

    def _to_heads(self, *each: Tensor) -> tuple[Tensor, ...]:
        """All heads of this rank's tokens to its heads of all tokens: (B, H, T / n, E) to (B, H / n, T, E) each."""
        ranks = self.axis.size
        sent = torch.cat([x.unflatten(1, (ranks, -1)) for x in each], 2).transpose(0, 1)
        received = Collective.apply(sent, self.axis, exchange, exchange)  # (n, B, heads, T / n, E)
        return received.permute(1, 2, 0, 3, 4).flatten(2, 3).split([x.shape[1] // ranks for x in each], 1)

    def _to_tokens(self, x: Tensor) -> Tensor:
        """Return the opposite."""
        sent = x.unflatten(2, (self.axis.size, -1)).permute(2, 0, 1, 3, 4)
        received = Collective.apply(sent, self.axis, exchange, exchange)
        return received.transpose(0, 1).flatten(1, 2)


def exchange(x: Tensor, axis: Axis) -> Tensor:
    """All-to-all of (n, …) over the n ranks of `axis`; without autograd."""
    x = x.contiguous()
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=axis.group)
    return received
