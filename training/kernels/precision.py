"""The numbers a run computes with: the matrix products' format, while weights and sums stay in float32."""

from typing import Literal

import torch

Precision = Literal["fp32", "bf16", "fp16", "fp64"]
_LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Matrix products in bfloat16 or float16; what float32 is needed for is left alone."""
    return torch.autocast(device.type, _LOW.get(precision, torch.bfloat16), enabled=precision in _LOW)
