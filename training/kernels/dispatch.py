"""Dispatch: the decoder's operations, computed by the kernels of the device that holds the tensors.

Here alone is chosen between devices: CPUs have kernels of their own (training/kernels/cpu), which nothing else imports,
and which a run on GPUs never imports; all other devices use torch's operators (portable.py).
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from training.kernels import portable


class Kernels(Protocol):
    """The kernels of a device; this module's functions of the same names say what they compute."""

    LOGITS_BYTES: int
    """Memory for logits at a time, in bytes, in the loss."""
    PRODUCTS: frozenset[Any]
    """Operators, as they are below autograd, that multiply matrices: the most expensive ones."""

    SPLITS_DOCUMENTS: bool
    """Attention within documents computes one after the other: the device launches small kernels at little cost."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, /) -> Tensor: ...
    def fused_linears(self, x: Tensor, layers: Sequence[nn.Linear], /) -> Sequence[Tensor]: ...
    def grouped_linear(self, x: Tensor, weight: Tensor, counts: Tensor, /) -> Tensor: ...
    def embedding(self, ids: Tensor, weight: Tensor, /) -> Tensor: ...
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, /) -> Tensor: ...
    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, /) -> Tensor: ...
    def rotate_pairs(self, x: Tensor, cos: Tensor, sin: Tensor, sign: int, /) -> Tensor: ...
    def gelu(self, x: Tensor, approximate: str, /) -> Tensor: ...
    def swiglu(self, gate: Tensor, up: Tensor, /) -> Tensor: ...

    def prepare_process(self) -> None:
        """Tune this process, before it allocates large tensors on the device."""


def kernels_for(device: torch.device) -> Kernels:
    """Return the kernels of a device."""
    if device.type != "cpu":
        return portable
    from training.kernels.cpu import kernels  # here, as it imports numba

    return kernels


@contextmanager
def deterministic_kernels(asked: bool) -> Iterator[None]:
    """If `asked`, use kernels that give the same bits in every run; to be entered before the first product on a GPU."""
    if not asked:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS's condition, read with its first product
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # we read no such memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias: `x` (…, in), `weight` (out, in), `bias` (out,) or None; returns (…, out)."""
    return kernels_for(x.device).linear(x, weight, bias)


def fused_linears(x: Tensor, layers: Sequence[nn.Linear]) -> Sequence[Tensor]:
    """Apply several layers to the same `x` (…, in), in one product where that is faster; one (…, out) per layer."""
    return kernels_for(x.device).fused_linears(x, layers)


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """x W_e^T: rows `x` (N, in), of which the first `counts[0]` are of matrix 0, and so on; `weight` (E, out, in)."""
    return kernels_for(x.device).grouped_linear(x, weight, counts)


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Return the rows `ids` (…) int64 of `weight` (V, D): (…, D)."""
    return kernels_for(weight.device).embedding(ids, weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of `x` (…, D) with `weight` (D,): x / rms(x) * weight (Zhang & Sennrich 2019, equation 4).

    As of all norms the result has the dtype of `x`, and the statistics of 16-bit tensors are float32.
    """
    return kernels_for(x.device).rms_norm(x, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm of `x` (…, D) with `weight` and `bias` (D,) (Ba et al. 2016, equation 4)."""
    return kernels_for(x.device).layer_norm(x, weight, bias, eps)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """x cos + roll(x) sin × `sign`, where roll swaps the halves of `x` (B, H, T, E); `cos`, `sin` (T, E).

    Computed in the dtype of `cos`; the result has that of `x`. Differentiate `apply_rotary` instead.
    """
    return kernels_for(x.device).rotate_pairs(x, cos, sin, sign)


def gelu(x: Tensor, approximate: str) -> Tensor:
    """GELU (Hendrycks & Gimpel 2016, section 2): exact for `approximate` "none", GPT-2's variant for "tanh"."""
    return kernels_for(x.device).gelu(x, approximate)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU's elementwise part: silu(gate) * up, tensors of one shape (Shazeer 2020, equation 6)."""
    return kernels_for(gate.device).swiglu(gate, up)
