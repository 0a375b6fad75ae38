"""Embedding lookup on a CPU, whose gradient is summed in float32."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from training.kernels.precision import accumulation_dtype


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Rows `ids` of `weight`."""
    if weight.dtype == accumulation_dtype(weight.dtype):
        return F.embedding(ids, weight)
    return _Embedding.apply(ids, weight)


class _Embedding(torch.autograd.Function):
    """16-bit embedding: torch sums a frequent id's gradient in 16 bits: it stops growing early."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows = len(weight)
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (ids,) = ctx.saved_tensors
        wide = grad.to(accumulation_dtype(grad.dtype))
        return None, torch.ops.aten.embedding_dense_backward(wide, ids, ctx.rows, -1, False).to(grad.dtype)
