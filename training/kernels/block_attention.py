"""Block attention: attention of some queries to some keys, as a term that merges with those of other keys.

A term is the mean of the values weighted by exp(score), and the log of the sum of those weights. Terms of disjoint keys
merge to that of all of them (Milakov & Gimelshein 2018, "Online normalizer calculation for softmax"; Dao et al. 2022,
FlashAttention, section 3.1). Scores are computed a tile of queries at a time, forward and backward, and never kept.

Shapes: q (B, H, Q, E), k and v (B, kv_heads, K, E), lse (B, H, Q); sums are in the accumulation dtype.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from training.kernels.keyed_random import keyed_bernoulli
from training.kernels.precision import accumulation_dtype

TILE_BYTES = {"cpu": 1 << 20}  # of scores in memory at a time: a core's cache has them
_TILE_BYTES = 64 << 20  # on other devices, which are busy with more at a time


class WeightDropout(NamedTuple):
    """Dropout of attention's weights, which depends on the sequence, the head, and the positions of query and key."""

    p: float
    keys: Tensor
    """Of each sequence, (B,) int64."""
    heads: Tensor
    """Numbers of these heads among all of a layer, (H,) int64."""
    length: int
    """Tokens of a whole sequence."""

    def dropped(self, query: Tensor, key: Tensor) -> Tensor:
        """Return True where a weight is dropped, (B, H, Q, K); of positions `query` (Q, 1) and `key` (K,)."""
        index = (self.heads[:, None, None] * self.length + query) * self.length + key
        return keyed_bernoulli(self.p, self.keys[:, None, None, None], index)


class Seen(NamedTuple):
    """The keys of a block that its queries see: of positions from `first`, or from the window's start, to their own.

    `slopes` and `dropout` say how much they see of them.
    """

    query: int
    """Position of the block's first query."""
    key: int
    """Position of its first key."""
    window: int = 0
    """How many tokens a query sees, itself included; 0: all."""
    first: Tensor | None = None
    """Position of the first token that each query sees, (B, Q) int64."""
    slopes: Tensor | None = None
    """Of each head's bias by distance (ALiBi), (H,)."""
    dropout: WeightDropout | None = None

    def any(self, queries: int, keys: int) -> bool:
        """Return False if surely no query sees a key."""
        last_key = self.key + keys - 1
        too_old = self.window and last_key <= self.query - self.window
        return self.key < self.query + queries and not too_old

    def hidden(self, rows: slice, keys: int, device: torch.device) -> Tensor | None:
        """Return the keys that queries `rows` do not see, (Q, K) or (B, 1, 1, Q, K) bool; None if they see all."""
        start = self.query + rows.start
        last = self.query + rows.stop - 1
        all_before = self.key + keys - 1 <= start
        in_window = not self.window or last - self.window < self.key
        if all_before and in_window and self.first is None:
            return None
        query, key = self.positions(rows, keys, device)
        hidden = key > query
        if not in_window:
            hidden |= key <= query - self.window
        if self.first is None:
            return hidden
        return hidden | (key < self.first[:, None, None, rows, None])

    def bias(self, slopes: Tensor, rows: slice, keys: int) -> Tensor:
        """ALiBi's bias of queries `rows` with slopes (H,): (H, Q, K) (Press et al. 2022, section 3)."""
        query, key = self.positions(rows, keys, slopes.device)
        return slopes[:, None, None] * (key - query)

    def positions(self, rows: slice, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the positions of queries `rows`, (Q, 1), and of the keys, (K,)."""
        query = torch.arange(self.query + rows.start, self.query + rows.stop, device=device)
        return query[:, None], torch.arange(self.key, self.key + keys, device=device)


def attend_block(q: Tensor, k: Tensor, v: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
    """Return the term (out, lse) of a block; a query that sees no key has -inf as lse, and zeros."""
    wide = accumulation_dtype(q.dtype)
    parts = []
    k = k.to(wide)
    v = v.to(wide)
    for rows in _tiles(q, k):
        scores = _scores(_grouped(q[:, :, rows].to(wide), k), k, seen, rows)
        lse = scores.logsumexp(-1)
        weights = scores.sub_(_finite(lse)[..., None]).exp_()
        mixed = _drop(weights, _dropped(k, seen, rows), seen) @ v
        parts.append((_ungrouped(mixed, q), lse.reshape(*q.shape[:2], -1)))
    outs, sums = zip(*parts, strict=True)
    return torch.cat(outs, 2), torch.cat(sums, 2)


def merge_block(out: Tensor, lse: Tensor, term: tuple[Tensor, Tensor]) -> None:
    """Merge a block's term into those before, (B, H, Q, E) and (B, H, Q), in place."""
    both = torch.logaddexp(lse, term[1])
    old, new = ((each - _finite(both)).exp_()[..., None] for each in (lse, term[1]))
    out.mul_(old).add_(term[0].mul_(new))
    lse.copy_(both)


def merge_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Merge the key of value 0 that each query of a head sees, with the head's score, `sinks` (H,); in place."""
    both = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    out.mul_((lse - both).exp_()[..., None])
    lse.copy_(both)


def sink_gradients(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Return the gradient of `sinks` (H,); `lse` and `delta` as of `block_gradients`."""
    weights = (sinks.to(lse.dtype)[:, None] - lse).exp_()
    return -(weights * delta).sum((0, 2)).to(sinks.dtype)


def block_gradients(
    q: Tensor, k: Tensor, v: Tensor, seen: Seen, grad: Tensor, lse: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a block's terms of the gradients of q, k and v (Dao et al. 2022, algorithm 4).

    `grad` is that of the merged output, `lse` the merged one, `delta` the sum of grad x output over E, (B, H, Q).
    """
    wide = accumulation_dtype(q.dtype)
    scale = q.shape[-1] ** -0.5
    parts = []
    k = k.to(wide)
    v = v.to(wide)
    grad_k = torch.zeros_like(k)
    grad_v = torch.zeros_like(v)
    for rows in _tiles(q, k):
        queries, grads = (_grouped(x[:, :, rows].to(wide), k) for x in (q, grad))
        sums, deltas = (x[:, :, rows].reshape(*k.shape[:2], -1, 1) for x in (lse, delta))
        weights = _scores(queries, k, seen, rows).sub_(sums).exp_()
        dropped = _dropped(k, seen, rows)
        grad_v += _drop(weights, dropped, seen).mT @ grads
        grad_scores = weights.mul_(_drop(grads @ v.mT, dropped, seen).sub_(deltas)).mul_(scale)
        grad_k += grad_scores.mT @ queries
        parts.append(_ungrouped(grad_scores @ k, q))
    return torch.cat(parts, 2), grad_k, grad_v


def _tiles(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Return the queries whose scores are in memory at a time."""
    queries = q.shape[2]
    row_bytes = q.shape[0] * q.shape[1] * k.shape[2] * k.itemsize
    count = max(1, TILE_BYTES.get(q.device.type, _TILE_BYTES) // row_bytes)
    return (slice(start, min(start + count, queries)) for start in range(0, queries, count))


def _scores(queries: Tensor, k: Tensor, seen: Seen, rows: slice) -> Tensor:
    """Scaled scores of queries (B, kv_heads, H / kv_heads x Q, E), biased by distance, -inf where they are hidden."""
    scores = queries @ k.mT * queries.shape[-1] ** -0.5
    if seen.slopes is not None:
        bias = seen.bias(seen.slopes.to(scores.dtype), rows, k.shape[2])
        scores += bias.unflatten(0, (k.shape[1], -1)).flatten(1, 2)
    hidden = seen.hidden(rows, k.shape[2], k.device)
    if hidden is not None:
        scores.unflatten(2, (-1, rows.stop - rows.start)).masked_fill_(hidden, -torch.inf)
    return scores


def _dropped(k: Tensor, seen: Seen, rows: slice) -> Tensor | None:
    """Return the weights that are dropped, in the shape of the scores; None without dropout."""
    if seen.dropout is None:
        return None
    dropped = seen.dropout.dropped(*seen.positions(rows, k.shape[2], k.device))
    return dropped.unflatten(1, (k.shape[1], -1)).flatten(2, 3)


def _drop(x: Tensor, dropped: Tensor | None, seen: Seen) -> Tensor:
    """Return the weights, or their gradient, after dropout."""
    if dropped is None or seen.dropout is None:
        return x
    return x.masked_fill(dropped, 0.0).div_(1.0 - seen.dropout.p)


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """Return (B, H, Q, E) to (B, kv_heads, H / kv_heads x Q, E): the queries of all heads that share keys."""
    return x.unflatten(1, (k.shape[1], -1)).flatten(2, 3)


def _ungrouped(x: Tensor, q: Tensor) -> Tensor:
    """Return the opposite."""
    return x.unflatten(2, (q.shape[1] // x.shape[1], -1)).flatten(1, 2)


def _finite(lse: Tensor) -> Tensor:
    """Return the sums, but a large negative number for -inf, so that exp(-inf - lse) is 0."""
    return lse.clamp(min=torch.finfo(lse.dtype).min)
