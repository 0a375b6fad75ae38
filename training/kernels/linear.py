"""Linear layers on a CPU: each product is made by whichever of torch's two libraries is the faster one for it.

torch multiplies float32 matrices by MKL, and reaches oneDNN only through an operator that its compiler uses.
On matrices that are no longer in the cache oneDNN is 10 to 20 % faster at x W^T and at the gradient of x,
MKL at the gradient of W. On other devices and types all of this is `torch.nn.functional.linear`.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ONEDNN = torch.ops.mkldnn._linear_pointwise.default if torch.backends.mkldnn.is_available() else None
"""(x, weight, bias, …) to x W^T; None where torch was built without it."""


class Linear(nn.Linear):
    """torch's layer; its products are made by `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias: `x` (…, inputs), `weight` (outputs, inputs), `bias` (outputs,) or None; (…, outputs)."""
    if not _suits(x, weight):
        return F.linear(x, weight, bias)
    y: Tensor = _Product.apply(x, weight.T)
    return y if bias is None else y + bias


def linears(x: Tensor, layers: Sequence[nn.Linear]) -> Sequence[Tensor]:
    """What each of the layers makes of `x`.

    Small ones are one product, as a call of oneDNN costs as much as a small product does. For that the weights
    are copied side by side, and kept for the backward pass: so only where they are no larger than `x`.
    """
    if sum(layer.weight.numel() for layer in layers) > x.numel() or not _suits(x, layers[0].weight):
        return [layer(x) for layer in layers]
    bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
    y = linear(x, torch.cat([layer.weight for layer in layers]), bias)
    return y.split([len(layer.weight) for layer in layers], -1)


def _suits(x: Tensor, weight: Tensor) -> bool:
    """Whether a product is trained through, of numbers that oneDNN is better at; it prepares itself for each shape,
    which sampling, where each is another, would wait for."""
    return (
        ONEDNN is not None
        and x.dtype is weight.dtype is torch.float32
        and weight.requires_grad
        and torch.is_grad_enabled()
        and x.device.type == "cpu"
        and x.numel() > 0
        and weight.numel() > 0
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


class _Product(torch.autograd.Function):
    """x (…, inputs) times a matrix (inputs, outputs)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor) -> Tensor:
        ctx.save_for_backward(x, matrix)
        return _product(x, matrix.T)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, matrix = ctx.saved_tensors
        # a pipeline may ask for the two at different times
        wants_x, wants_matrix = (_is_wanted(node) for node, _ in ctx.next_functions)
        dx = _product(grad, matrix) if wants_x else None
        return dx, (grad.flatten(0, -2).T @ x.flatten(0, -2)).T if wants_matrix else None


def _is_wanted(node: Any) -> bool:
    """Whether this backward pass goes on to `node`; of a leaf it can't be asked."""
    if node is None or node.name() == "torch::autograd::AccumulateGrad":
        return node is not None
    return bool(torch._C._will_engine_execute_node(node))


def _product(x: Tensor, weight: Tensor) -> Tensor:
    assert ONEDNN is not None
    y: Tensor = ONEDNN(x, weight, None, "none", [], "")
    return y
