"""Fused elementwise kernels for one CPU core: float32 loops that numba compiles to vector instructions.

torch needs several passes over memory for each kernel, and its exponentials cost more than the passes.
"""

import numpy as np
from numpy.typing import NDArray

from gristmill.kernels import kernel

Floats = NDArray[np.float32]
Rows = tuple[Floats, int]  # rows of a tensor: flat memory from the first element to the last, and the row stride

_f32 = np.float32
_HALF = _f32(0.5)
_ONE = _f32(1)


@kernel(inline="always", error_model="numpy")
def _row(x: Rows, r: int, width: int) -> Floats:
    """Row `r` of `x`: (width,)."""
    return x[0][r * x[1] : r * x[1] + width]


@kernel(inline="always", error_model="numpy", fastmath={"contract"})
def _exp(x: np.float32) -> np.float32:
    """e^x for x <= 0, relative error 1e-7; the polynomial is that of Cephes' expf (Moshier 1992)."""
    x = max(x, _f32(-87))
    exponent = np.floor(x * _f32(1.44269504) + _HALF)
    # ln 2 = 0.693359375 (exact in float32) - 2.12e-4
    r = x - exponent * _f32(0.693359375) + exponent * _f32(2.12194440e-4)
    p = _f32(1.9875691500e-4) * r + _f32(1.3981999507e-3)
    p = ((p * r + _f32(8.3334519073e-3)) * r + _f32(4.1665795894e-2)) * r + _f32(1.6666665459e-1)
    p = (p * r + _HALF) * r * r + r + _ONE
    return p * np.int32((np.int32(exponent) + np.int32(127)) * np.int32(1 << 23)).view(np.float32)


@kernel(inline="always", error_model="numpy", fastmath={"contract"})
def _sigmoid(x: np.float32) -> np.float32:
    small = _exp(-abs(x))
    large = _ONE / (_ONE + small)
    return small * large if x < _f32(0) else large


@kernel(error_model="numpy", fastmath={"contract"})
def gelu(x: Floats, y: Floats, derivative: Floats) -> None:
    """Exact GELU: y = x Φ(x) and its derivative Φ(x) + x φ(x); Φ by Abramowitz & Stegun 7.1.26, error 1e-7."""
    for i in range(len(x)):
        z = abs(x[i]) * _f32(0.70710678118)
        gauss = _exp(-z * z)
        t = _ONE / (_ONE + _f32(0.3275911) * z)
        p = (_f32(1.061405429) * t + _f32(-1.453152027)) * t + _f32(1.421413741)
        tail = _HALF * ((p * t + _f32(-0.284496736)) * t + _f32(0.254829592)) * t * gauss
        cdf = tail if x[i] < _f32(0) else _ONE - tail
        y[i] = x[i] * cdf
        derivative[i] = cdf + x[i] * gauss * _f32(0.3989422804)


@kernel(error_model="numpy", fastmath={"contract"})
def gelu_tanh(x: Floats, y: Floats, derivative: Floats) -> None:
    """GPT-2's GELU: y = x s and its derivative; s = (1 + tanh u) / 2 = sigmoid(2 u), u = √(2/π) (x + 0.044715 x³)."""
    for i in range(len(x)):
        square = x[i] * x[i]
        s = _sigmoid(x[i] * (_f32(1.5957691216) + _f32(0.0713548163) * square))
        y[i] = x[i] * s
        derivative[i] = s + y[i] * (_ONE - s) * (_f32(1.5957691216) + _f32(0.2140644488) * square)


@kernel(error_model="numpy", fastmath={"contract"})
def swiglu(gate: Rows, up: Rows, y: Floats) -> None:
    """y = silu(gate) × up; `y` (rows, width)."""
    rows, width = y.shape
    for r in range(rows):
        g = _row(gate, r, width)
        u = _row(up, r, width)
        out = y[r]
        for i in range(width):
            out[i] = g[i] * _sigmoid(g[i]) * u[i]


@kernel(error_model="numpy", fastmath={"contract"})
def swiglu_backward(gate: Rows, up: Rows, dy: Floats, dgate: Floats, dup: Floats) -> None:
    """Gradients of gate and up from that of y; each (rows, width)."""
    rows, width = dy.shape
    for r in range(rows):
        g = _row(gate, r, width)
        u = _row(up, r, width)
        d = dy[r]
        for i in range(width):
            s = _sigmoid(g[i])
            dgate[r, i] = d[i] * u[i] * (s + g[i] * s * (_ONE - s))
            dup[r, i] = d[i] * g[i] * s


@kernel(error_model="numpy", fastmath={"contract"})
def apply_rotary(x: Rows, cos: Floats, sin: Floats, sign: np.float32, y: Floats) -> None:
    """y = x cos + roll(x) sin × `sign`; roll swaps the halves of a head. `cos`, `sin` (T, E), `y` (rows, heads, E)."""
    rows, heads, width = y.shape
    half = width // 2
    for r in range(rows):
        c = cos[r % len(cos)]
        s = sin[r % len(sin)]
        row = _row(x, r, heads * width)
        for h in range(heads):
            first = row[h * width : h * width + half]
            second = row[h * width + half : (h + 1) * width]
            for i in range(half):
                y[r, h, i] = first[i] * c[i] + second[i] * (sign * s[i])
                y[r, h, half + i] = second[i] * c[half + i] + first[i] * (sign * s[half + i])


@kernel(error_model="numpy", fastmath={"contract", "reassoc"})
def rms_norm(x: Floats, weight: Floats, eps: np.float32, y: Floats, inverse: Floats) -> None:
    """y = x × inverse × weight, with `inverse` (rows,) = 1 / √(mean of x² + eps); `x`, `y` (rows, width)."""
    rows, width = x.shape
    for r in range(rows):
        square = _f32(0)
        for i in range(width):
            square += x[r, i] * x[r, i]
        inverse[r] = _ONE / np.sqrt(square / _f32(width) + eps)
        for i in range(width):
            y[r, i] = x[r, i] * inverse[r] * weight[i]


@kernel(error_model="numpy", fastmath={"contract", "reassoc"})
def rms_norm_backward(
    x: Floats, weight: Floats, inverse: Floats, dy: Floats, dx: Floats, dw: NDArray[np.float64]
) -> None:
    """Set `dx` (rows, width) and add to `dw` (width,): float64, as it sums over all rows."""
    rows, width = x.shape
    for r in range(rows):
        projection = _f32(0)
        for i in range(width):
            projection += dy[r, i] * weight[i] * x[r, i]
        projection *= inverse[r] * inverse[r] / _f32(width)
        for i in range(width):
            dx[r, i] = (dy[r, i] * weight[i] - x[r, i] * projection) * inverse[r]
            dw[i] += dy[r, i] * x[r, i] * inverse[r]
