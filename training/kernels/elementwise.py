"""The decoder's norm, rotation and activations: what is done to each number or row of features by itself.

torch has no backward of its own for some of them, and would record each of their parts. On one core of a CPU, as
torchrun starts processes, each is a loop of `loops`; with more, or on other devices and types, torch's operators.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from training.kernels import loops


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight along the last dimension (Zhang & Sennrich 2019, equation 4)."""
    if x.device.type == "cpu":
        return _RMSNorm.apply(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if _in_a_loop(x):
            y, inverse = torch.empty(x.shape), torch.empty(x[..., :1].shape)
            loops.rms_norm(_array(x), _copy(weight), np.float32(eps), _array(y), inverse.view(-1).numpy())
        else:
            squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
            inverse = squares.div_(x.shape[-1]).add_(eps).rsqrt_()
            y = (x * inverse).mul_(weight)
        ctx.save_for_backward(x, inverse, weight)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, inverse, weight = ctx.saved_tensors
        if _in_a_loop(x):
            dx, dw = torch.empty(x.shape), torch.zeros(weight.shape, dtype=torch.float64)
            arrays = _array(x), _copy(weight), inverse.view(-1).numpy(), _array(grad), _array(dx), dw.numpy()
            loops.rms_norm_backward(*arrays)
            return dx, dw.float(), None
        product = grad * x
        along = (product @ weight)[..., None] * inverse**3 / -x.shape[-1]  # how much of the gradient lies along x
        dx = (grad * weight).mul_(inverse).addcmul_(x, along)
        return dx, product.flatten(0, -2).T @ inverse.flatten(), None


def rotary_table(positions: Tensor, features: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin of position × frequency, float32 (Su et al. 2021, equation 15).

    Each (T, features), for both members of a pair; the first one's sin is negative.
    """
    frequencies = base ** (-torch.arange(0, features, 2, device=positions.device, dtype=torch.float32) / features)
    angles = positions.float()[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (x[i], x[i + E/2]) of `x` (B, heads, T, E) by its position's angle."""
    return _Rotation.apply(x, *(t.to(x.dtype) for t in table))


class _Rotation(torch.autograd.Function):
    """Its gradient is turned back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, sin, -1), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    if not _in_a_loop(x):
        return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin, value=sign)
    x = x.transpose(1, 2)  # as it lies in memory
    y = torch.empty(x.shape)
    loops.rotate(_rows(x.flatten(2)), cos.numpy(), sin.numpy(), np.float32(sign), y.flatten(0, 1).numpy())
    return y.transpose(1, 2)


def gelu(x: Tensor, form: str) -> Tensor:
    """GELU (Hendrycks & Gimpel 2016, section 2), exact where `form` is "none", or GPT-2's, "tanh"."""
    return _GELU.apply(x, form) if _in_a_loop(x) else F.gelu(x, approximate=form)


class _GELU(torch.autograd.Function):
    """Its slope is computed beside it and kept in place of x: both need the one exponential, which is the work."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, form: str) -> Tensor:
        y, slope = torch.empty(x.shape), torch.empty(x.shape)
        loop = loops.gelu if form == "none" else loops.gelu_tanh
        loop(*(_array(t).ravel() for t in (x, y, slope)))
        ctx.save_for_backward(slope)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.saved_tensors[0], None


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020, equation 6)."""
    return _SwiGLU.apply(gate, up) if _in_a_loop(gate) else F.silu(gate) * up


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        y = torch.empty(gate.shape)
        loops.swiglu(_rows(gate), _rows(up), _array(y))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        dgate, dup = torch.empty(gate.shape), torch.empty(up.shape)
        loops.swiglu_backward(_rows(gate), _rows(up), _array(grad), _array(dgate), _array(dup))
        return dgate, dup


def _in_a_loop(x: Tensor) -> bool:
    return (
        x.dtype is torch.float32
        and x.device.type == "cpu"
        and torch.get_num_threads() == 1
        and x.numel() > 0
        and not torch.compiler.is_compiling()
    )


def _array(x: Tensor) -> loops.Floats:
    """`x` (…, N) as (rows, N); a copy only where its numbers do not lie in order."""
    array: loops.Floats = x.detach().contiguous().flatten(0, -2).numpy()
    return array


def _copy(weight: Tensor) -> loops.Floats:
    """Memory that numpy has seen can't be resized any more, as FSDP resizes that of parameters."""
    array: loops.Floats = weight.detach().clone().numpy()
    return array


def _rows(x: Tensor) -> loops.Rows:
    """`x` (…, N), where rows may lie apart; a copy only where the numbers within one do."""
    rows = x.detach().flatten(0, -2)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    between = rows.stride(0)
    return rows.as_strided(((len(rows) - 1) * between + rows.shape[1],), (1,)).numpy(), between
