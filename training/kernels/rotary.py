"""Rotary position embeddings, RoPE (Su et al. 2021, "RoFormer")."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from training.kernels.dispatch import rotate_pairs
from training.kernels.precision import accumulation_dtype


def rotary_frequencies(head_dim: int, base: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """RoPE's angle from one position to the next, of each pair of a head's features, (E/2,) (equation 15)."""
    frequencies: Tensor = base ** (-torch.arange(0, head_dim, 2, device=device, dtype=dtype) / head_dim)
    return frequencies


def rotary_table(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """RoPE's cos and sin of position × frequency, each (T, E) (equation 15).

    `positions` (T,) int64; `frequencies` (E/2,), whose dtype, float32 or float64, is that of the angles, too. Columns i
    and i + E/2 belong to one pair; sin is negative in the first half.
    """
    angles = positions.to(frequencies.dtype)[:, None] * frequencies
    cos = angles.cos()
    sin = angles.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def apply_rotary(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate each pair (x[i], x[i + R/2]) of `x` (B, H, T, E) by its position's angle in `rotary_table` (T, R).

    Features from R on stay as they are. The result has the dtype of `x`; 16-bit tensors are rotated in float32.
    """
    rotated = table[0].shape[-1]
    if rotated < x.shape[-1]:
        parts = (apply_rotary(x[..., :rotated], table), x[..., rotated:])
        # in the projection's memory layout, (B, T, H, E): attention's output has that of its queries
        return torch.cat([part.transpose(1, 2) for part in parts], -1).transpose(1, 2)
    cos, sin = (t.to(accumulation_dtype(x.dtype)) for t in table)
    # torch 2.11 compiled _Rotary with a gradient of zeros for float32 on a GPU
    if torch.is_inference_mode_enabled() or torch.compiler.is_compiling():
        return rotate_pairs(x, cos, sin, 1)
    return _Rotary.apply(x, cos, sin)


class _Rotary(torch.autograd.Function):
    """RoPE; the backward pass rotates the gradient by the negative angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate_pairs(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotate_pairs(grad, cos, sin, -1), None, None
