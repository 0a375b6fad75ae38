"""Ring attention: keys and values go around the ranks, and meet each rank's queries (Liu et al. 2023).

Rank r keeps its queries. In n steps it has the keys and values of ranks r, r - 1, …, sends them at the same time to
rank r + 1, and merges what its queries see of them (training/kernels/block_attention.py). The backward pass goes around
once more: the gradients of keys and values travel one step behind them, from rank to rank, which each add a term, and
end where the keys began. With N elements of keys and values on a rank it sends (n - 1) N forward and 2 (n - 1) N
backward, half of these in the accumulation dtype. It keeps queries, keys, values, outputs and a number for each query
and head, and nothing that grows with the square of the length.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from training.distributed.collectives import wait
from training.kernels.block_attention import (
    Seen,
    WeightDropout,
    attend_block,
    block_gradients,
    merge_block,
    merge_sinks,
    sink_gradients,
)
from training.kernels.precision import accumulation_dtype
from training.model.attention_mask import Mask
from training.model.dropout import Dropout
from training.parallel.context.tokens import TokenOrder
from training.sharding.axis import Axis

# Tags of messages.
_KEYS = 0
_GRADIENTS = 1


class RingAttention:
    """Attention of this rank's tokens to those of all ranks, in the place of `Mask`'s."""

    def __init__(self, order: TokenOrder) -> None:
        self.order = order

    def attend(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor, dropout: WeightDropout | None = None) -> Tensor:
        """Attend with q (B, H, T / n, E), k and v (B, kv_heads, T / n, E); with documents of all B in one sequence.

        `mask.bias`, where there is one, has the slopes (H,) of these heads, and not the bias of all pairs of tokens.
        """
        documents = mask.documents
        seen = Seen(0, 0, mask.window, slopes=mask.bias, dropout=dropout)
        if documents is None:
            return _Ring.apply(q, k, v, mask.sinks, _Blocks(self.order, q.shape[2], seen))
        q, k, v = (documents.split_sequences(x) for x in (q, k, v))
        local = torch.arange(q.shape[2], device=q.device)
        first = self.order.positions(local, len(local)) - documents.positions
        output = _Ring.apply(q, k, v, mask.sinks, _Blocks(self.order, q.shape[2], seen._replace(first=first)))
        return documents.join_sequences(output)

    def attend_with_dropout(
        self, mask: Mask, q: Tensor, k: Tensor, v: Tensor, dropout: Dropout, sample_ids: Tensor | None
    ) -> Tensor:
        """Attend as `attend`, with dropout of the weights, which are drawn again in the backward pass."""
        keys = dropout.keys(sample_ids)
        heads = dropout.index(q[:, :, 0, 0])
        tokens = q.shape[2] if mask.documents is None else mask.documents.positions.shape[1]
        return self.attend(mask, q, k, v, WeightDropout(dropout.p, keys, heads, tokens * self.order.axis.size))


class _Blocks:
    """The pairs of chunks, of this rank's queries and of a rank's keys, in which queries see keys."""

    def __init__(self, order: TokenOrder, length: int, seen: Seen) -> None:
        """`length`: tokens of a rank; `seen`: what is the same for all of their keys, with `first` (B, `length`)."""
        self.order = order
        self.axis = order.axis
        self.seen = seen
        self.size = length // order.per_rank

    def visible(self, source: int) -> Iterator[tuple[slice, slice, Seen]]:
        """Yield the queries, the keys of rank `source`, and which of these they see."""
        size = self.size
        for i, query in enumerate(self.order.chunks(self.axis.rank)):
            rows = slice(i * size, (i + 1) * size)
            first = None if self.seen.first is None else self.seen.first[:, rows]
            for j, key in enumerate(self.order.chunks(source)):
                seen = self.seen._replace(query=query * size, key=key * size, first=first)
                if seen.any(size, size):
                    yield rows, slice(j * size, (j + 1) * size), seen


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, blocks: _Blocks) -> Tensor:
        ctx.blocks = blocks
        wide = accumulation_dtype(q.dtype)
        own = torch.stack((k, v))
        out = torch.zeros_like(q, dtype=wide)
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=wide)
        for source, (keys, values) in around(own, blocks.axis):
            for rows, columns, seen in blocks.visible(source):
                term = attend_block(q[:, :, rows], keys[:, :, columns], values[:, :, columns], seen)
                merge_block(out[:, :, rows], lse[:, :, rows], term)
        if sinks is not None:
            merge_sinks(out, lse, sinks)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, own, sinks, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None]:
        q, own, sinks, out, lse = ctx.saved_tensors
        wide = lse.dtype
        blocks = ctx.blocks
        sent = None
        delta = (grad.to(wide) * out).sum(-1)
        grad_q = torch.zeros_like(q, dtype=wide)
        own_grad = torch.zeros_like(own, dtype=wide)
        for source, keys in around(own, blocks.axis):
            term = own_grad if source == blocks.axis.rank else torch.zeros_like(own_grad)
            _add_gradients(blocks, source, q, keys, (grad, lse, delta), grad_q, term)
            if source != blocks.axis.rank:
                sent = _SendReceive(term if sent is None else term.add_(sent.wait()), blocks.axis, _GRADIENTS)
        if sent is not None:
            own_grad += sent.wait()
        of_sinks = None if sinks is None else sink_gradients(sinks, lse, delta)
        return grad_q.to(q.dtype), own_grad[0].to(q.dtype), own_grad[1].to(q.dtype), of_sinks, None


def _add_gradients(
    blocks: _Blocks,
    source: int,
    q: Tensor,
    keys: Tensor,
    output: tuple[Tensor, Tensor, Tensor],
    grad_q: Tensor,
    grad_keys: Tensor,
) -> None:
    """Add the terms of the keys and values (2, B, kv_heads, T / n, E) of rank `source`, in place.

    `output`: its gradient, its sums and their delta, as of `block_gradients`.
    """
    for rows, columns, seen in blocks.visible(source):
        k, v = keys[:, :, :, columns]
        grad, lse, delta = (x[:, :, rows] for x in output)
        of_q, of_k, of_v = block_gradients(q[:, :, rows], k, v, seen, grad, lse, delta)
        grad_q[:, :, rows] += of_q
        grad_keys[0, :, :, columns] += of_k
        grad_keys[1, :, :, columns] += of_v


def around(x: Tensor, axis: Axis) -> Iterator[tuple[int, Tensor]]:
    """Yield each rank's `x` and its rank, from this one's backwards; the next one is sent at the same time."""
    for step in range(axis.size):
        sent = _SendReceive(x, axis, _KEYS) if step + 1 < axis.size else None
        yield (axis.rank - step) % axis.size, x
        if sent is not None:
            x = sent.wait()


class _SendReceive:
    """A tensor on its way to the next rank, and the one of the same shape that comes from the rank before."""

    def __init__(self, x: Tensor, axis: Axis, tag: int) -> None:
        self.group = axis.group
        self.tag = tag
        self.found = torch.empty_like(x)
        self.sent = x  # held until it has arrived
        before = (axis.rank - 1) % axis.size
        after = (axis.rank + 1) % axis.size
        both = [(dist.isend, x, after), (dist.irecv, self.found, before)]
        operations = [dist.P2POp(f, t, group=axis.group, tag=tag, group_peer=peer) for f, t, peer in both]
        self.works = dist.batch_isend_irecv(operations)

    def wait(self) -> Tensor:
        """Return the tensor of the rank before."""
        for work in self.works:
            wait(work, self.group)
        return self.found
