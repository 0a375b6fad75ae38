"""Sliding-window attention: causal attention to the last tokens only (Jiang et al. 2023, "Mistral 7B", section 2)."""

import torch
import torch.nn.functional as F
from torch import Tensor


def windowed_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Return the attention of each token to itself and the `window` - 1 tokens before it, fewer than there are.

    `q` (B, H, T, E), `k` and `v` (B, kv_heads, T, E): returns (B, H, T, E). Each block of `window` queries attends to
    its own keys and to those of the block before (Beltagy et al. 2020, "Longformer", section 3.1): products and masks
    grow with T x window, and nothing of size (T, T) is made.
    """
    length = q.shape[2]
    blocks = -(-q.shape[2] // window)
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    if missing := blocks * window - length:
        # keys after the end are seen by queries after the end only, which are cut off again
        q, k, v = (F.pad(t, (0, 0, 0, missing)) for t in (q, k, v))
    start = slice(window)
    first = F.scaled_dot_product_attention(q[:, :, start], k[:, :, start], v[:, :, start], is_causal=True)
    others = F.scaled_dot_product_attention(
        _blocks(q[:, :, window:], window, window),
        _blocks(k, 2 * window, window),
        _blocks(v, 2 * window, window),
        attn_mask=_band(window, q.device),
    )
    others = others.unflatten(0, (q.shape[0], -1)).transpose(1, 2).flatten(2, 3)
    return torch.cat((first, others), dim=2)[:, :, :length]


def _blocks(x: Tensor, size: int, step: int) -> Tensor:
    """`size` tokens of each sequence from every `step`-th one: (B, H, T, E) to (B x blocks, H, size, E)."""
    return x.unfold(2, size, step).permute(0, 2, 1, 4, 3).flatten(0, 1)


def _band(window: int, device: torch.device) -> Tensor:
    """Return which keys of its own block and of the block before a block of queries sees: (window, 2 window) bool."""
    query = torch.arange(window, device=device)[:, None]
    key = torch.arange(2 * window, device=device)
    return (key > query) & (key <= query + window)
