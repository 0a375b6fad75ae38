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
from torch.autograd.function import once_differentiable

_HAS_ONEDNN = torch.backends.mkldnn.is_available()


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias: `x` (…, inputs), `weight` (outputs, inputs), `bias` (outputs,) or None; (…, outputs)."""
    if not _suits(x, weight):
        return F.linear(x, weight, bias)
    (y,) = _Products.apply(x, weight.T)
    return y if bias is None else y + bias


def linears(x: Tensor, layers: Sequence[nn.Linear]) -> list[Tensor]:
    """What each of the layers makes of `x`, whose gradient is summed while it is multiplied."""
    if not _suits(x, layers[0].weight):
        return [layer(x) for layer in layers]
    found = _Products.apply(x, *(layer.weight.T for layer in layers))
    return [y if layer.bias is None else y + layer.bias for y, layer in zip(found, layers, strict=True)]


def _suits(x: Tensor, weight: Tensor) -> bool:
    """Whether a product is trained through, of numbers that oneDNN is better at; it prepares itself for each shape,
    which sampling, where each is another, would wait for."""
    return (
        _HAS_ONEDNN
        and x.dtype is weight.dtype is torch.float32
        and weight.requires_grad
        and torch.is_grad_enabled()
        and x.device.type == "cpu"
        and x.numel() > 0
        and weight.numel() > 0
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


class _Products(torch.autograd.Function):
    """x (…, inputs) times each of some matrices (inputs, outputs)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *matrices: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *matrices)
        return tuple(_product(x, matrix.T) for matrix in matrices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *matrices = ctx.saved_tensors
        # a pipeline may ask for the gradients of inputs and of weights at different times
        wants_x, *wanted = (_is_wanted(node) for node, _ in ctx.next_functions)
        dx = None
        if wants_x:
            for grad, matrix in zip(grads, matrices, strict=True):
                dx = _product(grad, matrix, dx)
        pairs = zip(grads, wanted, strict=True)
        return dx, *(_matrix_gradient(x, grad) if asked else None for grad, asked in pairs)


def _is_wanted(node: Any) -> bool:
    """Whether this backward pass goes on to `node`; of a leaf it can't be asked."""
    if node is None or node.name() == "torch::autograd::AccumulateGrad":
        return node is not None
    return bool(torch._C._will_engine_execute_node(node))


def _product(x: Tensor, weight: Tensor, added: Tensor | None = None) -> Tensor:
    """x W^T, and what is added to it."""
    if added is None:
        return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return torch.ops.mkldnn._linear_pointwise.binary(x, added, weight, None, "add")


def _matrix_gradient(x: Tensor, grad: Tensor) -> Tensor:
    """x^T grad; the narrower one is transposed, at which MKL is 10 % faster than at the other."""
    x, grad = x.flatten(0, -2), grad.flatten(0, -2)
    return x.T @ grad if x.shape[1] <= grad.shape[1] else (grad.T @ x).T
