"""Sliding-window attention is that of a (T, T) mask, and makes nothing of that size."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from training.kernels.windowed_attention import windowed_attention


def with_mask(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    position = torch.arange(q.shape[2])
    distance = position[:, None] - position
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    return scores.masked_fill((distance < 0) | (distance >= window), -torch.inf).softmax(-1) @ v


def tensors(length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    return [
        torch.randn((2, heads, length, 6), generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2)
    ]


@pytest.mark.parametrize("length", [2, 9, 16, 17])
@pytest.mark.parametrize("window", [1, 2, 3, 8])
def test_it_is_attention_with_a_mask(length: int, window: int) -> None:
    if window >= length:
        return
    q, k, v = tensors(length)
    found, wanted = windowed_attention(q, k, v, window), with_mask(q, k, v, window)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    weights = torch.randn(found.shape, dtype=torch.float64)
    pairs = [torch.autograd.grad((y * weights).sum(), (q, k, v)) for y in (found, wanted)]
    for ours, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


class Largest(TorchDispatchMode):
    """The most elements of any tensor that is made."""

    numel = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = operation(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple) else (found,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return found


def test_nothing_grows_with_the_square_of_the_sequence() -> None:
    q, k, v = (t.float() for t in tensors(512))
    with Largest() as made:
        windowed_attention(q, k, v, 16)
    assert made.numel < 2 * 4 * 2 * 600 * 8 < 512 * 512
