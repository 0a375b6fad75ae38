"""Which heads the kernel for different lengths takes; its call, by shape and by a stand-in of what torch documents."""

import sys
from collections.abc import Iterator
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from training.kernels.varlen_attention import has_varlen_kernel, takes_heads, varlen_attention
from training.memory.recompute import checkpoint_activations
from training.model.attention_mask import Mask
from training.model.documents import Documents

POSITIONS = torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7]])
BOUNDS = Documents.of(POSITIONS).bounds


def heads(dtype: torch.dtype, device: str = "cpu") -> Iterator[Tensor]:
    """Queries, keys and values of 4 and 2 heads of 8 features."""
    return (torch.randn(1, n, 16, 8, dtype=dtype, device=device) for n in (4, 2, 2))


@pytest.mark.parametrize(
    ("dtype", "features", "capability", "taken"),
    [
        (torch.bfloat16, 64, (8, 0), True),
        (torch.float16, 192, (12, 0), True),
        (torch.float32, 64, (9, 0), False),
        (torch.bfloat16, 20, (9, 0), False),
        (torch.bfloat16, 256, (9, 0), False),
        (torch.bfloat16, 64, (7, 5), False),
    ],
)
def test_heads_that_the_kernel_does_not_take_are_left_to_the_mask(
    dtype: torch.dtype, features: int, capability: tuple[int, int], taken: bool
) -> None:
    assert takes_heads(dtype, features, capability) == taken
    assert not has_varlen_kernel(torch.zeros(1, 2, 8, features, dtype=dtype))  # on a CPU


def documented(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, **options: Any
) -> Tensor:
    """What torch documents of varlen_attn: (tokens, heads, features), a window of tokens to the left and the right."""
    assert cu_q.dtype == torch.int32 and cu_k is cu_q and max_q == max_k >= int(cu_q.diff().max())
    (left, right), parts = options["window_size"], []
    assert right == 0 and options["enable_gqa"]
    for start, stop in pairwise(cu_q.tolist()):
        distance = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
        seen = (distance >= 0) & ((distance <= left) | torch.tensor(left < 0))
        q_, k_, v_ = (t[start:stop].transpose(0, 1) for t in (q, k, v))
        k_, v_ = (t.repeat_interleave(len(q_) // len(k_), 0) for t in (k_, v_))
        scores = (q_ @ k_.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
        parts.append((scores.softmax(-1) @ v_).transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("window", [0, 3])
def test_the_call_gives_the_attention_of_each_document(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("torch.nn.attention.varlen")
    module.varlen_attn = documented  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    q, k, v = heads(torch.float64)
    assert BOUNDS is not None
    found = varlen_attention(q, k, v, BOUNDS, 8, window)
    expected = Mask(window, documents=Documents.of(POSITIONS)).attend(q, k, v)
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)


class _Calls(TorchDispatchMode):
    """Counts the calls of the kernel's forward pass."""

    count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "torch_attn._varlen_attn." in str(operation)
        return operation(*args, **(kwargs or {}))


class _Block(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        assert BOUNDS is not None
        q, k, v = (x[:, :n] * 2 for n in (4, 2, 2))
        return varlen_attention(q, k, v, BOUNDS.to("meta"), 8, 3)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="the kernel has no grouped queries")
@pytest.mark.parametrize(("recompute", "calls"), [("none", 1), ("selective", 1), ("full", 2)])
def test_selective_recomputation_keeps_what_the_kernel_computed(recompute: Any, calls: int) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")  # on the meta device: shapes, and torch's own signature
    model = nn.Module()
    model.blocks = nn.ModuleList([_Block()])
    checkpoint_activations(model, recompute)
    x = torch.zeros(1, 4, 16, 8, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with _Calls() as counted:
        mixed = model.blocks[0](x)
        mixed.sum().backward()
    assert mixed.shape == x.shape and x.grad is not None and counted.count == calls and varlen
