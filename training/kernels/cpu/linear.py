"""Linear layers on a CPU, with the faster of torch's two CPU libraries for each matrix product.

torch multiplies float32 matrices with MKL, and calls oneDNN only through an operator meant for its compiler.
On matrices outside the cache oneDNN is 10 to 20 % faster at x W^T and at the gradient of x, and MKL at the
gradient of W. Other dtypes use `torch.nn.functional.linear`.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.kernels import portable

ONEDNN = torch.ops.mkldnn._linear_pointwise.default if torch.backends.mkldnn.is_available() else None
"""oneDNN's linear operator, (x, weight, bias, …) to x W^T; None if torch was built without oneDNN."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias."""
    if not _use_onednn(x, weight):
        return F.linear(x, weight, bias)
    y: Tensor = _OneDNNLinear.apply(x, weight.T)
    return y if bias is None else y + bias


def fused_linears(x: Tensor, layers: Sequence[nn.Linear]) -> Sequence[Tensor]:
    """Apply several layers to the same `x`, in one product if they are small.

    One product saves oneDNN calls, but keeps a copy of the concatenated weights until the backward pass: it is
    only used if they are no larger than `x`.
    """
    if sum(layer.weight.numel() for layer in layers) > x.numel() or not _use_onednn(x, layers[0].weight):
        return portable.fused_linears(x, layers)
    bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
    y = linear(x, torch.cat([layer.weight for layer in layers]), bias)
    return y.split([len(layer.weight) for layer in layers], -1)


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """One product after the other."""
    return portable.grouped_loop(x, weight, counts, linear)


def _use_onednn(x: Tensor, weight: Tensor) -> bool:
    """True for float32 products in training.

    Not for sampling: oneDNN prepares a kernel per shape, and each sampled token gives a new shape.
    """
    return (
        ONEDNN is not None
        and x.dtype is weight.dtype is torch.float32
        and weight.requires_grad
        and torch.is_grad_enabled()
        and x.numel() > 0
        and weight.numel() > 0
        and not torch.compiler.is_compiling()
    )


class _OneDNNLinear(torch.autograd.Function):
    """Product of x (…, in) and a matrix (in, out)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor) -> Tensor:
        ctx.save_for_backward(x, matrix)
        return _onednn(x, matrix.T)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, matrix = ctx.saved_tensors
        # zero-bubble pipelines compute the gradients of inputs and of weights in separate backward passes
        needs_x, needs_matrix = (_needs_grad(node) for node, _ in ctx.next_functions)
        dx = _onednn(grad, matrix) if needs_x else None
        return dx, (grad.flatten(0, -2).T @ x.flatten(0, -2)).T if needs_matrix else None


def _needs_grad(node: Any) -> bool:
    """True if the current backward pass executes `node`; always for leaves, as autograd cannot answer for them."""
    if node is None or node.name() == "torch::autograd::AccumulateGrad":
        return node is not None
    return bool(torch._C._will_engine_execute_node(node))


def _onednn(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T with oneDNN."""
    assert ONEDNN is not None
    y: Tensor = ONEDNN(x, weight, None, "none", [], "")
    return y
