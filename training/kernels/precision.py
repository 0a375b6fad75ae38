"""Precision: the dtypes of mixed precision (Micikevicius et al. 2018, section 3.1).

Products, activations and what ranks send of them are in the compute dtype, from copies of the weights in that dtype.
The weights that the optimizer updates, its moments, gradient sums, statistics and the loss are in the accumulation
dtype of the compute dtype.
"""

import torch

COMPUTE_DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to sum in: float32 for 16-bit dtypes, else `dtype` itself."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
