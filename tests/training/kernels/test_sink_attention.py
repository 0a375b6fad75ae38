"""Attention with sinks beside its formula: values and every gradient."""

import pytest
import torch
from torch import Tensor

from training.kernels import sink_attention as kernel
from training.kernels.block_attention import Seen
from training.kernels.sink_attention import sink_attention


def plain(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int, first: Tensor | None) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    key = torch.arange(q.shape[2])
    hidden = (key > key[:, None]) | ((key <= key[:, None] - window) if window else False)
    hidden = hidden if first is None else hidden | (key < first[:, None, :, None])
    scores = torch.cat((scores.masked_fill(hidden, -torch.inf), sinks[:, None, None].expand(*q.shape[:3], 1)), -1)
    return scores.softmax(-1)[..., :-1] @ v


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("length", "window"), [(11, 0), (11, 3), (12, 4), (5, 9)])
def test_values_and_gradients_are_those_of_the_formula(
    monkeypatch: pytest.MonkeyPatch, length: int, window: int, documents: bool
) -> None:
    monkeypatch.setattr(kernel, "_QUERIES", 4)  # several blocks
    torch.manual_seed(0)
    shapes = (2, 4, length, 6), (2, 2, length, 6), (2, 2, length, 6), (4,)
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    first = torch.arange(length).expand(2, -1) // 3 * 3 if documents else None
    found, wanted = sink_attention(*given, Seen(0, 0, window, first)), plain(*given, window, first)
    torch.testing.assert_close(found, wanted)
    direction = torch.randn_like(found)
    for own, formula in zip(*(torch.autograd.grad(x, given, direction) for x in (found, wanted)), strict=True):
        torch.testing.assert_close(own, formula)


def test_a_small_sink_changes_nothing() -> None:
    q, k, v = torch.randn(3, 1, 2, 8, 4, dtype=torch.float64)
    found = sink_attention(q, k, v, torch.full((2,), -1e4).double(), Seen(0, 0))
    torch.testing.assert_close(found, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
