"""Attention with sinks: a learned score of each head that takes a share of the weights, and adds no value.

It is a key that every query sees, of value 0 (gpt-oss's published code; Xiao et al. 2023, "StreamingLLM", section 3.3).
torch's fused kernels have no such key, and do not give gradients of the sum that it joins: it is block attention here.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from training.kernels.block_attention import Seen, attend_block, block_gradients, merge_sinks, sink_gradients
from training.kernels.precision import accumulation_dtype

_QUERIES = 512  # of a block, which sees no later keys


def sink_attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, seen: Seen) -> Tensor:
    """Return the causal attention of q (B, H, T, E) to k and v (B, kv_heads, T, E) with `sinks` (H,): (B, H, T, E).

    Memory grows with T, and with a window work with T x window.
    """
    # values may be a part of a product with queries and keys, which would be kept with them
    output: Tensor = _SinkAttention.apply(q, k, v.contiguous(), sinks, seen)
    return output


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, seen: Seen) -> Tensor:
        wide = accumulation_dtype(q.dtype)
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:3], dtype=wide)
        for rows, keys, own in _blocks(q.shape[2], seen):
            term, sums = attend_block(q[:, :, rows], k[:, :, keys], v[:, :, keys], own)
            merge_sinks(term, sums, sinks)
            out[:, :, rows], lse[:, :, rows] = term, sums
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.seen = seen
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        delta = (grad.to(lse.dtype) * out).sum(-1)
        grad_q, grad_k, grad_v = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
        for rows, keys, own in _blocks(q.shape[2], ctx.seen):
            output = (x[:, :, rows] for x in (grad, lse, delta))
            of_q, of_k, of_v = block_gradients(q[:, :, rows], k[:, :, keys], v[:, :, keys], own, *output)
            grad_q[:, :, rows] = of_q
            grad_k[:, :, keys] += of_k
            grad_v[:, :, keys] += of_v
        of_sinks = sink_gradients(sinks, lse, delta)
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), of_sinks, None


def _blocks(length: int, seen: Seen) -> Iterator[tuple[slice, slice, Seen]]:
    """Yield the queries, all keys that they see and some more, and which of these they see."""
    windowed = 0 < seen.window < length
    size = seen.window if windowed else _QUERIES
    for start in range(0, length, size):
        rows = slice(start, min(start + size, length))
        keys = slice(max(0, start - size) if windowed else 0, rows.stop)
        first = None if seen.first is None else seen.first[:, rows]
        yield rows, keys, seen._replace(query=start, key=keys.start, first=first)
