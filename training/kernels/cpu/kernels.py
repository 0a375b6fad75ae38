"""The kernels of a CPU, by the names of dispatch.py's Kernels; most are autograd functions with their own backward.

Products: torch multiplies float32 matrices with MKL, and calls oneDNN only through an operator meant for its compiler.
On matrices outside the cache oneDNN is 10 to 20 % faster at x W^T and at the gradient of x, and MKL at the gradient of
W. Other dtypes use `torch.nn.functional.linear`.

Norms, rotation, GELU and SwiGLU: on one thread, torchrun's default, float32 tensors go through the fused loops of
`numba_loops`; with more threads, or in other dtypes, through torch's operators. So does text that is written, in
inference mode: for one token a call of torch takes a third of the time of a call of a loop.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from training.kernels import portable
from training.kernels.cpu import numba_loops
from training.kernels.cpu.allocator import keep_freed_memory
from training.kernels.precision import accumulation_dtype

LOGITS_BYTES = 32 << 20  # fits in a cache
SPLITS_DOCUMENTS = True
ONEDNN = torch.ops.mkldnn._linear_pointwise.default if torch.backends.mkldnn.is_available() else None
"""oneDNN's linear operator, (x, weight, bias, …) to x W^T; None if torch was built without oneDNN."""
PRODUCTS = portable.PRODUCTS | ({ONEDNN} if ONEDNN is not None else set())

prepare_process = keep_freed_memory


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
    if not _use_onednn(x, layers[0].weight) or sum(layer.weight.numel() for layer in layers) > x.numel():
        return portable.fused_linears(x, layers)
    bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
    y = linear(x, torch.cat([layer.weight for layer in layers]), bias)
    return y.split([len(layer.weight) for layer in layers], -1)


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Multiply one pair of matrices after the other."""
    return portable.grouped_loop(x, weight, counts, linear)


def _use_onednn(x: Tensor, weight: Tensor) -> bool:
    """Return True for float32 products in training.

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
    """Return True if the current backward pass executes `node`.

    Always for leaves, as autograd cannot answer for them.
    """
    if node is None or node.name() == "torch::autograd::AccumulateGrad":
        return node is not None
    return bool(torch._C._will_engine_execute_node(node))


def _onednn(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T with oneDNN."""
    assert ONEDNN is not None
    y: Tensor = ONEDNN(x, weight, None, "none", [], "")
    return y


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Return the rows `ids` of `weight`."""
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


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of `x`."""
    if torch.is_inference_mode_enabled():
        return portable.rms_norm(x, weight, eps)
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    """RMSNorm; saves x itself and not its float32 copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(accumulation_dtype(x.dtype))
        scale = weight.to(accumulation_dtype(x.dtype))
        if _use_numba(wide):
            y = torch.empty(x.shape)
            inverse = torch.empty(x[..., :1].shape)
            numba_loops.rms_norm(
                _as_numpy(wide), _copy_to_numpy(scale), np.float32(eps), _as_numpy(y), inverse.view(-1).numpy()
            )
        else:
            squares = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
            inverse = squares.div_(x.shape[-1]).add_(eps).rsqrt_()
            y = (wide * inverse).mul_(scale)
        ctx.save_for_backward(x, inverse, weight)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, inverse, weight = ctx.saved_tensors
        wide, scale, dy = (t.to(inverse.dtype) for t in (x, weight, grad))
        if _use_numba(wide):
            dx = torch.empty(x.shape)
            sums = torch.zeros(weight.shape, dtype=torch.float64)
            arrays = (
                _as_numpy(wide),
                _copy_to_numpy(scale),
                inverse.view(-1).numpy(),
                _as_numpy(dy),
                _as_numpy(dx),
                sums.numpy(),
            )
            numba_loops.rms_norm_backward(*arrays)
            dw = sums.float()
        else:
            product = dy * wide
            projection = (product @ scale)[..., None] * inverse**3 / -x.shape[-1]  # of the gradient onto x
            dx = (dy * scale).mul_(inverse).addcmul_(wide, projection)
            dw = product.flatten(0, -2).T @ inverse.flatten()
        return dx.to(x.dtype), dw.to(weight.dtype), None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm of `x`."""
    if x.dtype == accumulation_dtype(x.dtype):
        return portable.layer_norm(x, weight, bias, eps)
    return _LayerNorm.apply(x, weight, bias, eps)


class _LayerNorm(torch.autograd.Function):
    """16-bit LayerNorm: torch computes statistics and sums in 16 bits; saves x itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        shift = None if bias is None else bias.float()
        y, mean, inverse = torch.native_layer_norm(x.float(), weight.shape, weight.float(), shift, eps)
        ctx.save_for_backward(x, mean, inverse, weight, bias)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, inverse, weight, bias = ctx.saved_tensors
        wide, scale, shift, dy = (None if t is None else t.float() for t in (x, weight, bias, grad))
        mask = [True, True, bias is not None]
        gradients = torch.ops.aten.native_layer_norm_backward(dy, wide, weight.shape, mean, inverse, scale, shift, mask)
        return *(None if g is None else g.to(x.dtype) for g in gradients), None


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """x cos + roll(x) sin × `sign`."""
    wide = x.to(cos.dtype)
    if not _use_numba(wide):
        return portable.rotate_pairs(x, cos, sin, sign)
    wide = wide.transpose(1, 2)  # back to the projection's memory layout, (B, T, H, E)
    y = torch.empty(wide.shape)
    numba_loops.apply_rotary(
        _as_rows(wide.flatten(2)), cos.numpy(), sin.numpy(), np.float32(sign), y.flatten(0, 1).numpy()
    )
    return y.transpose(1, 2).to(x.dtype)


def gelu(x: Tensor, approximate: str) -> Tensor:
    """GELU, exact for `approximate` "none", GPT-2's variant for "tanh"."""
    return _GELU.apply(x, approximate) if _use_numba(x) else portable.gelu(x, approximate)


class _GELU(torch.autograd.Function):
    """GELU; computes the derivative in the forward pass and saves it instead of x: both need the same exponential."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, approximate: str) -> Tensor:
        y = torch.empty(x.shape)
        derivative = torch.empty(x.shape)
        kernel = numba_loops.gelu if approximate == "none" else numba_loops.gelu_tanh
        kernel(*(_as_numpy(t).ravel() for t in (x, y, derivative)))
        ctx.save_for_backward(derivative)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.saved_tensors[0], None


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU's elementwise part."""
    return _SwiGLU.apply(gate, up) if _use_numba(gate) else portable.swiglu(gate, up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        y = torch.empty(gate.shape)
        numba_loops.swiglu(_as_rows(gate), _as_rows(up), _as_numpy(y))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        dgate = torch.empty(gate.shape)
        dup = torch.empty(up.shape)
        numba_loops.swiglu_backward(_as_rows(gate), _as_rows(up), _as_numpy(grad), _as_numpy(dgate), _as_numpy(dup))
        return dgate, dup


def _use_numba(x: Tensor) -> bool:
    """Return True for float32 on a single thread, outside torch.compile and inference mode."""
    return (
        x.dtype is torch.float32
        and torch.get_num_threads() == 1
        and x.numel() > 0
        and not torch.is_inference_mode_enabled()
        and not torch.compiler.is_compiling()
    )


def _as_numpy(x: Tensor) -> numba_loops.Floats:
    """View of `x` (…, N) as a numpy array (rows, N); a copy if x is not contiguous."""
    array: numba_loops.Floats = x.detach().contiguous().flatten(0, -2).numpy()
    return array


def _copy_to_numpy(weight: Tensor) -> numba_loops.Floats:
    """Copy of a parameter as a numpy array: a storage that numpy refers to cannot be resized, and FSDP resizes it."""
    array: numba_loops.Floats = weight.detach().clone().numpy()
    return array


def _as_rows(x: Tensor) -> numba_loops.Rows:
    """View of `x` (…, N) as strided rows; a copy if a row itself is not contiguous."""
    rows = x.detach().flatten(0, -2)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    stride = rows.stride(0)
    return rows.as_strided(((len(rows) - 1) * stride + rows.shape[1],), (1,)).numpy(), stride
