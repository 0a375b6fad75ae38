"""Variable-length attention: causal attention within documents of different lengths, in one kernel of torch's.

The kernel is FlashAttention 2 (Dao 2023), behind torch.nn.attention.varlen, which not every build of torch has.
"""

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

_DTYPES = (torch.bfloat16, torch.float16)
_MOST_FEATURES = 192  # of a head, in backward passes on every GPU from Ampere on
_AMPERE = (8, 0)


def has_varlen_kernel(q: Tensor) -> bool:
    """Return whether `varlen_attention` computes queries like `q` (…, E) on their device."""
    if not q.is_cuda or torch.__version__ < "2.12":  # whose kernel has no grouped queries
        return False
    return takes_heads(q.dtype, q.shape[-1], torch.cuda.get_device_capability(q.device))


@cache
def takes_heads(dtype: torch.dtype, features: int, capability: tuple[int, int]) -> bool:
    """Return whether the kernel takes heads of so many features on a GPU of this compute capability."""
    return (
        dtype in _DTYPES
        and features % 8 == 0
        and features <= _MOST_FEATURES
        and capability >= _AMPERE
        and find_spec("torch.nn.attention.varlen") is not None
    )


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, window: int) -> Tensor:
    """Attention of each token to itself and those before it in its document, the last `window` of them, if it is not 0.

    `q` (1, H, N, E), `k` and `v` (1, kv_heads, N, E); document i is tokens bounds[i] … bounds[i + 1], `bounds`
    (documents + 1,) int32, none of more than `longest`. Returns (1, H, N, E).
    """
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (t[0].transpose(0, 1) for t in (q, k, v))
    before = (window - 1, 0)  # tokens that are seen to the left and to the right; without a window (-1, 0): all before
    mixed = varlen_attn(q, k, v, bounds, bounds, longest, longest, window_size=before, enable_gqa=True)
    assert isinstance(mixed, Tensor)
    return mixed.transpose(0, 1)[None]


def varlen_operators() -> frozenset[Any]:
    """Return the kernel's forward pass as it is below autograd; none before torch.nn.attention.varlen is imported."""
    operator = getattr(torch.ops.torch_attn, "_varlen_attn", None)
    return frozenset() if operator is None else frozenset({operator.default})
