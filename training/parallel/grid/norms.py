"""Norms on a grid: each rank has some of a token's features, and the statistics are those of all."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from training.kernels.precision import accumulation_dtype
from training.model.layers import LayerNorm, RMSNorm
from training.sharding.axis import Axis


class GridRMSNorm(RMSNorm):
    """RMSNorm of features split along `axis` (Zhang & Sennrich 2019, equation 4): sums one number a token."""

    def __init__(self, full: RMSNorm, axis: Axis) -> None:
        nn.Module.__init__(self)
        self.weight, self.eps, self.axis = full.weight, full.eps, axis

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(accumulation_dtype(x.dtype))
        scale = torch.rsqrt(mean_over(wide.square(), self.axis) + self.eps)
        return (wide * scale * self.weight).to(x.dtype)


class GridLayerNorm(LayerNorm):
    """LayerNorm of features split along `axis` (Ba et al. 2016, equation 4): sums two numbers a token, one by one.

    The paper sums x and x^2 at once; the variance as their difference loses digits where the mean is large.
    """

    def __init__(self, full: LayerNorm, axis: Axis) -> None:
        nn.Module.__init__(self)
        self.weight, self.bias, self.eps, self.axis = full.weight, full.bias, full.eps, axis

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(accumulation_dtype(x.dtype))
        centred = wide - mean_over(wide, self.axis)
        y = centred * torch.rsqrt(mean_over(centred.square(), self.axis) + self.eps) * self.weight
        return (y if self.bias is None else y + self.bias).to(x.dtype)


def mean_over(x: Tensor, axis: Axis) -> Tensor:
    """Mean of the last dimension, which the ranks along `axis` split evenly: (..., F / n) to (..., 1)."""
    return _SumOver.apply(x.sum(-1, keepdim=True), axis) / (axis.size * x.shape[-1])


class _SumOver(torch.autograd.Function):
    """All-reduce; and of the gradient, of which each rank has the term that comes from its features."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        x = x.clone()
        dist.all_reduce(x, group=axis.group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _SumOver.forward(ctx, grad, ctx.axis), None
