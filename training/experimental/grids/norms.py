"""Norms on a grid: each rank has some of a token's features, and the statistics are those of all.

Until the backward pass a norm keeps its input and the statistics, as those of one device do.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from training.experimental.grids.summa import needs_gradient
from training.kernels.precision import accumulation_dtype
from training.model.layers import LayerNorm, RMSNorm
from training.sharding.axis import Axis


class GridRMSNorm(RMSNorm):
    """RMSNorm of features split along `axis` (Zhang & Sennrich 2019, equation 4): sums one number a token."""

    def __init__(self, full: RMSNorm, axis: Axis) -> None:
        nn.Module.__init__(self)
        self.weight = full.weight
        self.eps = full.eps
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        return _GridRMSNorm.apply(x, self.weight, self.eps, self.axis)


class GridLayerNorm(LayerNorm):
    """LayerNorm of features split along `axis` (Ba et al. 2016, equation 4): sums two numbers a token, one by one.

    The paper sums x and x^2 at once; the variance as their difference loses digits where the mean is large.
    """

    def __init__(self, full: LayerNorm, axis: Axis) -> None:
        nn.Module.__init__(self)
        self.weight = full.weight
        self.bias = full.bias
        self.eps = full.eps
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        return _GridLayerNorm.apply(x, self.weight, self.bias, self.eps, self.axis)


class _GridRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, axis: Axis) -> Tensor:
        wide = x.to(accumulation_dtype(x.dtype))
        scale = torch.rsqrt(mean_over(wide.square(), axis) + eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.axis = axis
        return (wide * scale * weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        normed = x.to(scale.dtype) * scale
        grad = grad.to(scale.dtype)
        dx = None
        if needs_gradient(ctx, 0):
            own = grad * weight
            dx = (own - normed * mean_over(own * normed, ctx.axis)).mul_(scale).to(x.dtype)
        return dx, _sum_of_tokens(grad * normed, weight), None, None


class _GridLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, axis: Axis) -> Tensor:
        wide = x.to(accumulation_dtype(x.dtype))
        mean = mean_over(wide, axis)
        centred = wide - mean
        scale = torch.rsqrt(mean_over(centred.square(), axis) + eps)
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.axis = axis
        ctx.has_bias = bias is not None
        y = centred.mul_(scale) * weight
        return (y if bias is None else y + bias).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        normed = (x.to(scale.dtype) - mean).mul_(scale)
        grad = grad.to(scale.dtype)
        dx = None
        if needs_gradient(ctx, 0):
            own = grad * weight
            shift, slope = mean_over(torch.stack((own, own * normed)), ctx.axis)
            dx = (own - shift - normed * slope).mul_(scale).to(x.dtype)
        db = _sum_of_tokens(grad, weight) if ctx.has_bias else None
        return dx, _sum_of_tokens(grad * normed, weight), db, None, None


def mean_over(x: Tensor, axis: Axis) -> Tensor:
    """Return the mean of the last dimension, which the ranks along `axis` split evenly: (..., F / n) to (..., 1)."""
    total = x.sum(-1, keepdim=True)
    dist.all_reduce(total, group=axis.group)
    return total / (axis.size * x.shape[-1])


def _sum_of_tokens(grad: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of a vector from that of each token, (..., F) to (F,)."""
    return grad.flatten(0, -2).sum(0).to(weight.dtype)
