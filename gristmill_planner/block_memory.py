"""Activations of one block: the features a token that it keeps for its backward pass, and those computed again."""

from functools import lru_cache
from typing import NamedTuple

from training.memory.memory_config import Recompute
from training.model.model_config import ModelConfig
from training.parallel.tensor.options import kv_copies

# of the features inside an MLP; others keep 2
_MLP_TENSORS = {"swiglu": 4, "swiglu-clamped": 7, "geglu": 5, "gelu-fast": 3, "relu": 1}


class BlockFeatures(NamedTuple):
    """Features a token, in the compute dtype and, `wide`, in float32."""

    kept: int
    wide: int
    again: int = 0
    """Those that recomputation adds to what is kept, until the block's backward pass ends."""
    again_wide: int = 0


@lru_cache(4096)
def block_features(
    model: ModelConfig, parts: int, divided: tuple[bool, bool], by_windows: bool, recompute: Recompute, sparse: bool
) -> BlockFeatures:
    """Return the features that a dense or sparse block keeps, divided into `parts` by tensor parallelism.

    Korthikanti et al. 2022, section 4, count 34 bytes a token and feature in 16 bits, with dropout and attention's
    weights. Here those are never kept (Dao et al. 2022), and `selective` keeps the outputs of products and attention.
    `divided`: the features between tensor-parallel regions, and those that go into them. `by_windows`: attention works
    with copies of windows.
    """
    rows = 0  # features of the rows of chosen experts
    inner = 0  # features within the chosen experts
    dense = model.ffn_width // parts  # of the MLP that all tokens pass
    if sparse:
        rows = model.experts_per_token * model.width
        inner = model.experts_per_token * (model.expert_width // parts)
        dense = model.shared_experts * model.expert_width // parts
    hidden = model.width // parts if any(divided) else model.width
    whole = model.width // parts if divided[1] else model.width
    attention = _attention_features(model, parts, divided[1], by_windows)
    sums = model.heads // parts  # attention's log-sum-exp
    streams = hidden * (1 if model.residual == "parallel" else 2) + 2 * whole
    wide = sums + 2 * (1 if model.norm == "rms" else 2)
    if sparse:  # the router reads a float32 copy; of the rows' order four int64 a choice
        if not dense:
            streams -= hidden
        wide += hidden + model.experts + 8 * model.experts_per_token
    # of experts gates, ups and their weighted products
    tensors, of_block = _tensors(model)
    features = streams + attention.all + rows + 3 * inner + tensors * dense + of_block * hidden
    if recompute == "none":
        return BlockFeatures(features, wide)
    if recompute == "full":  # the input only (Chen et al. 2016)
        return BlockFeatures(hidden, 0, features - hidden, wide)
    q = model.q_width // parts
    into_mlp = dense * (2 if model.is_gated else 1)
    kept = hidden + attention.products + q + whole * (1 + (dense > 0)) + into_mlp + rows + 2 * inner
    as_it_is = hidden + q + into_mlp
    if not by_windows:  # others are copied: rotated, sorted, normed
        as_it_is += attention.kept_as_is
    return BlockFeatures(kept, sums + model.experts * sparse, features - as_it_is, wide - sums)


def _tensors(model: ModelConfig) -> tuple[int, int]:
    """Return tensors that a backward pass needs: of the features inside the MLP, and of the stream for an own block."""
    usual = _MLP_TENSORS.get(str(model.mlp), 2)
    if not model.own_names:
        return usual, 0
    from training.model.block import kept_by_block  # imports torch
    from training.model.own_parts import kept_by_mlp

    return kept_by_mlp(model, usual), kept_by_block(model)


class _AttentionFeatures(NamedTuple):
    """Features a token of attention: all that it keeps, outputs of its products, and those kept as they are."""

    all: int
    products: int
    kept_as_is: int


def _attention_features(model: ModelConfig, parts: int, is_divided: bool, by_windows: bool) -> _AttentionFeatures:
    """Return attention's features; `is_divided`: those that go into tensor-parallel regions are."""
    q = model.q_width // parts
    if model.kv_lora_rank:  # the vectors are normed; values are as wide as keys for attention, and its outputs cut
        values = model.value_width // parts
        compressed = model.q_lora_rank + model.kv_lora_rank + model.qk_rope_head_dim
        features = 4 * q + values + 2 * compressed - model.qk_rope_head_dim
        products = q + compressed + model.heads * model.qk_nope_head_dim // parts + values
        return _AttentionFeatures(features, products, compressed)
    copies = 1 if is_divided else kv_copies(model, parts)
    kv = model.kv_width * copies // parts
    products = q + 2 * kv
    # by windows: queries, and once more, with keys and values of two windows
    features = q + (8 * q if by_windows else products)
    if model.qk_norm:
        features += q + kv
    kept_as_is = kv if model.positions == "rope" else products
    return _AttentionFeatures(features, products, kept_as_is)


def mlp_features(model: ModelConfig, sparse: bool) -> int:
    """Return the features that an MLP's backward pass needs beyond what is kept: gradients of its inputs and outputs.

    Experts' features are combined once more from gates and ups, as only their weighted products are kept.
    """
    if not sparse:
        return 2 * model.ffn_width
    combined = _tensors(model)[0] - 3
    return ((4 + combined) * model.experts_per_token + 2 * model.shared_experts) * model.expert_width
