"""Precision: the dtype of matrix products; parameters, gradient sums and the loss stay in float32."""

from typing import Literal

import torch

Precision = Literal["fp32", "bf16", "fp16", "fp64"]
_AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Autocast context for bf16 and fp16: matrix products in that dtype, norms and softmax in float32."""
    dtype = _AUTOCAST_DTYPES.get(precision, torch.bfloat16)
    return torch.autocast(device.type, dtype, enabled=precision in _AUTOCAST_DTYPES)
