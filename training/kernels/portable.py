"""Portable kernels: torch's operators, which compute on every device; dispatch.py says what each computes."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# each chunk of the loss reads and writes the whole gradient of the weight: with 128,256 ids 1 GiB makes that a fifth of
# the time of the products on a GPU, and 32 MiB six times as much as the products
LOGITS_BYTES = 1 << 30
_aten = torch.ops.aten
PRODUCTS = frozenset({
    _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten._grouped_mm.default,
})  # fmt: skip

SPLITS_DOCUMENTS = False

linear = F.linear
embedding = F.embedding


def fused_linears(x: Tensor, layers: Sequence[nn.Linear]) -> Sequence[Tensor]:
    """Apply one layer after the other."""
    return [layer(x) for layer in layers]


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """torch's kernel where it has one: in bf16 on GPUs, for rows of multiples of 16 bytes."""
    if x.is_meta:  # `counts` has no values; one product has the same shape
        return linear(x, weight[0])
    if x.is_cuda and x.dtype is torch.bfloat16 and weight.shape[1] % 8 == weight.shape[2] % 8 == 0:
        return grouped_kernel(x, weight, counts)
    return grouped_loop(x, weight, counts, linear)


def grouped_kernel(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Return one kernel for all matrices."""
    return torch._grouped_mm(x, weight.mT, offs=counts.cumsum(0, dtype=torch.int32))


def grouped_loop(x: Tensor, weight: Tensor, counts: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """A product after the other; `unbind` gives all matrices one gradient, where an index would make one for each."""
    parts = zip(x.split(counts.tolist()), weight.unbind(), strict=True)
    return torch.cat([product(part, matrix) for part, matrix in parts])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    wide = x.to(cos.dtype)
    return torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, -1), sin, value=sign).to(x.dtype)


def gelu(x: Tensor, approximate: str) -> Tensor:
    return F.gelu(x, approximate=approximate)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def prepare_process() -> None:
    """Nothing to tune."""
