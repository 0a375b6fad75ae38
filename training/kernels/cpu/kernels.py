"""The kernels of a CPU, by the names of dispatch.py's Kernels."""

from training.kernels import portable
from training.kernels.cpu.allocator import keep_freed_memory as prepare_process
from training.kernels.cpu.elementwise import gelu, layer_norm, rms_norm, rotate_pairs, swiglu
from training.kernels.cpu.embedding import embedding
from training.kernels.cpu.linear import ONEDNN, fused_linears, grouped_linear, linear

LOGITS_BYTES = 32 << 20  # fits in a cache
SPLITS_DOCUMENTS = True
PRODUCTS = portable.PRODUCTS | ({ONEDNN} if ONEDNN is not None else set())

__all__ = [
    "LOGITS_BYTES",
    "PRODUCTS",
    "SPLITS_DOCUMENTS",
    "embedding",
    "fused_linears",
    "gelu",
    "grouped_linear",
    "layer_norm",
    "linear",
    "prepare_process",
    "rms_norm",
    "rotate_pairs",
    "swiglu",
]
