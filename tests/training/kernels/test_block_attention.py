"""Terms of blocks of keys merge to attention to all of them, forward and backward."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from training.kernels import block_attention
from training.kernels.block_attention import Seen, WeightDropout, attend_block, block_gradients, merge_block
from training.model.dropout import Dropout

B, H, G, T, E = 2, 6, 3, 12, 4
BLOCKS = ((0, 5), (5, 6), (6, 12))  # of keys


def seen_by_all(window: int, first: Tensor | None) -> Tensor:
    """(B, 1, T, T) bool."""
    query, key = torch.arange(T)[:, None], torch.arange(T)
    seen = (key <= query) & ((key > query - window) | torch.tensor(not window))
    return seen.expand(B, 1, T, T) if first is None else seen & (key >= first[:, None, :, None])


@pytest.mark.parametrize("tile", [1, 32 << 20])
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("documents", [False, True])
def test_blocks_add_up_to_attention(monkeypatch: pytest.MonkeyPatch, tile: int, window: int, documents: bool) -> None:
    monkeypatch.setitem(block_attention.TILE_BYTES, "cpu", tile)
    shapes = ((B, H, T, E), (B, G, T, E), (B, G, T, E), (B, H, T, E))
    torch.manual_seed(1)
    q, k, v, grad = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    first = torch.tensor([[0] * 4 + [4] * 8, [0] * 7 + [7, 8, 8, 8, 8]]) if documents else None
    whole = F.scaled_dot_product_attention(q, k, v, attn_mask=seen_by_all(window, first), enable_gqa=True)
    expected = torch.autograd.grad(whole, (q, k, v), grad)
    out, lse = torch.zeros_like(q).detach(), torch.full((B, H, T), -torch.inf, dtype=torch.float64)
    blocks = [(slice(*block), Seen(0, block[0], window, first)) for block in BLOCKS]
    with torch.no_grad():
        for keys, seen in reversed(blocks):  # in which the first queries see nothing yet
            merge_block(out, lse, attend_block(q, k[:, :, keys], v[:, :, keys], seen))
        torch.testing.assert_close(out, whole, rtol=1e-12, atol=1e-12)
        delta, found = (grad * out).sum(-1), [torch.zeros_like(x) for x in (q, k, v)]
        for keys, seen in blocks:
            terms = block_gradients(q, k[:, :, keys], v[:, :, keys], seen, grad, lse, delta)
            found[0] += terms[0]
            found[1][:, :, keys], found[2][:, :, keys] = terms[1], terms[2]
    torch.testing.assert_close(tuple(found), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tile", [1, 32 << 20])
def test_blocks_of_biased_and_dropped_weights_add_up_to_attention(monkeypatch: pytest.MonkeyPatch, tile: int) -> None:
    monkeypatch.setitem(block_attention.TILE_BYTES, "cpu", tile)
    torch.manual_seed(1)
    q, grad = torch.randn(2, B, H, T, E, dtype=torch.float64)
    k, v = torch.randn(2, B, G, T, E, dtype=torch.float64)
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    slopes, first_head, sample_ids, dropout = torch.rand(H, dtype=torch.float64), 3, torch.arange(B), Dropout(0.3, "a")
    # as one process: bias and dropped weights of all pairs, of which these heads are some
    bias = slopes[:, None, None] * (torch.arange(T) - torch.arange(T)[:, None]).masked_fill(~seen_by_all(0, None), 0)
    keys, values = (x.repeat_interleave(H // G, 1) for x in whole[1:])
    scores = (whole[0] @ keys.mT * E**-0.5 + bias).masked_fill(~seen_by_all(0, None), -torch.inf)
    every = torch.cat([torch.zeros(B, first_head, T, T, dtype=torch.float64), scores.softmax(-1)], 1)
    expected = dropout(every, sample_ids)[:, first_head:] @ values
    gradients = torch.autograd.grad(expected, whole, grad)
    weights = WeightDropout(0.3, dropout.keys(sample_ids), torch.arange(first_head, first_head + H), T)
    blocks = [(slice(*block), Seen(0, block[0], slopes=slopes, dropout=weights)) for block in BLOCKS]
    out, lse = torch.zeros_like(q), torch.full((B, H, T), -torch.inf, dtype=torch.float64)
    for part, seen in blocks:
        merge_block(out, lse, attend_block(q, k[:, :, part], v[:, :, part], seen))
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    delta = (grad * out).sum(-1)
    terms = [block_gradients(q, k[:, :, part], v[:, :, part], seen, grad, lse, delta) for part, seen in blocks]
    found = sum(term[0] for term in terms), *(torch.cat([term[i] for term in terms], 2) for i in (1, 2))
    torch.testing.assert_close(found, gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("seen", "some"),
    [
        (Seen(4, 4), True), (Seen(4, 7), True), (Seen(4, 8), False),
        (Seen(8, 0, 5), False), (Seen(8, 0, 6), True), (Seen(8, 0), True),
    ],
)  # fmt: skip
def test_blocks_that_no_query_sees_are_known(seen: Seen, some: bool) -> None:
    hidden = seen.hidden(slice(0, 4), 4, torch.device("cpu"))
    assert seen.any(4, 4) == some == (hidden is None or not bool(hidden.all()))
