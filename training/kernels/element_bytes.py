"""Bytes of an element by precision, without torch's dtypes: for formulas of memory and traffic."""

COMPUTE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
"""In the compute dtype (precision.py)."""
ACCUMULATION_BYTES = {"fp32": 4, "bf16": 4, "fp16": 4, "fp64": 8}
"""Of masters, moments, gradient sums, statistics and the loss."""
