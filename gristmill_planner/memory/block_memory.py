"""Block memory: what a block keeps for its backward pass, by mode of recomputation, and what the loss works with.

Korthikanti et al. 2022, section 4, count 34 bytes a token and feature in 16 bits, with dropout and attention's weights.
Here attention's weights are never kept (Dao et al. 2022, FlashAttention), and the features are those of the model's
own parts. docs/training-memory.md has the same tables in words.
"""

from dataclasses import dataclass
from typing import Literal

from training.config import Precision
from training.kernels.precision import COMPUTE_DTYPES, accumulation_dtype
from training.memory.memory_config import Recompute
from training.model.model_config import ModelConfig

_FLOAT32 = 4


@dataclass(frozen=True)
class BlockSizes:
    """What decides the activations of a block on one rank, for a micro-batch of `sequences` x `seq_len` tokens."""

    model: ModelConfig
    sequences: int
    seq_len: int
    precision: Precision
    tp: int = 1
    sequence_parallel: bool = False
    fused_loops: bool = False
    """Elementwise functions as one loop each: float32 on one CPU thread."""
    fused_products: bool = False
    """Products of one input as one product, where the matrices are no larger than it: float32 on a CPU."""
    cp: int = 1
    context: Literal["ring", "ulysses"] = "ring"
    tensor: Literal["1d", "2d", "2.5d", "3d"] = "1d"
    """Not 1d: `tp` is the side of the grid, and `sequences` are those of one row of a layer of it."""

    @property
    def length(self) -> int:
        """Tokens of a sequence on this rank."""
        return self.seq_len // self.cp

    @property
    def tokens(self) -> int:
        """Tokens on this rank."""
        return self.sequences * self.length

    @property
    def is_ring(self) -> bool:
        """True if keys and values go around between ranks."""
        return self.cp > 1 and self.context == "ring"

    @property
    def exchanges_heads(self) -> bool:
        """True if a rank has all tokens of some heads in attention (Jacobs et al. 2023)."""
        return self.cp > 1 and self.context == "ulysses"

    @property
    def attention_parts(self) -> int:
        """Parts into which ranks divide the heads, in attention."""
        return self.tp * (self.cp if self.exchanges_heads else 1)

    @property
    def vocabulary(self) -> int:
        """Ids of the rank that has most of them."""
        return -(-self.model.vocab_size // self.tp)

    @property
    def logits(self) -> int:
        """All logits of this rank's tokens and ids."""
        return self.tokens * self.vocabulary

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the residual stream."""
        return COMPUTE_DTYPES[self.precision].itemsize

    @property
    def wide(self) -> int:
        """Bytes of an element of statistics, softmax and loss."""
        return accumulation_dtype(COMPUTE_DTYPES[self.precision]).itemsize

    @property
    def hidden(self) -> int:
        """Features a token of the residual stream on this rank: with sequence parallelism 1 / tp of the tokens."""
        return self.model.width // (self.tp if self.sequence_parallel or self.on_grid else 1)

    @property
    def on_grid(self) -> bool:
        """True if ranks divide all activations by sequences and features (Xu et al. 2021)."""
        return self.tensor != "1d"

    @property
    def whole(self) -> int:
        """Features of what goes into a tensor-parallel region, and comes out of it: all of them, but on a grid."""
        return self.hidden if self.on_grid else self.model.width

    @property
    def windows(self) -> int:
        """Windows into which attention cuts a sequence, the last one filled up; 0: it has no window."""
        return -(-self.seq_len // self.window) if 0 < self.window < self.seq_len and not self.is_ring else 0

    @property
    def window(self) -> int:
        """Tokens that a token attends to; 0: all before it."""
        return self.model.window or 0

    @property
    def attended(self) -> int:
        """Tokens of attention's outputs."""
        if self.windows:
            return self.sequences * self.windows * self.window
        return self.tokens * (self.cp if self.exchanges_heads else 1)


def kept_bytes(sizes: BlockSizes, recompute: Recompute) -> int:
    """Bytes that a block keeps from its forward pass to its backward pass."""
    if recompute == "full":  # the input only (Chen et al. 2016)
        return sizes.tokens * sizes.hidden * sizes.itemsize
    if recompute == "selective":  # also what is costly to compute again (Korthikanti et al. 2022, section 5)
        features = sizes.hidden + sum(_products(sizes).values()) - _products(sizes)["attention"]
        return sizes.tokens * features * sizes.itemsize + _attention_outputs(sizes) + _attention_statistics(sizes)
    features = sum(_all_features(sizes).values())
    windowed = _attention_outputs(sizes) + _window_copies(sizes) if sizes.windows else 0
    statistics = sizes.tokens * _norm_statistics(sizes) + _attention_statistics(sizes)
    return sizes.tokens * features * sizes.itemsize + windowed + statistics + _concatenated_weights(sizes)


def recomputed_bytes(sizes: BlockSizes, recompute: Recompute) -> int:
    """Bytes of a block that is computed again, beside what it kept.

    With the gradient of its output, which sequence parallelism has gathered by then.
    """
    if recompute == "none":
        return 0
    gathered = sizes.model.width if sizes.sequence_parallel else 0
    gradient = sizes.tokens * (sizes.hidden + gathered) * sizes.itemsize
    if recompute == "full":
        return kept_bytes(sizes, "none") - kept_bytes(sizes, "full") + gradient
    features = sum(_all_features(sizes).values()) - sizes.hidden - sum(_shared_with_products(sizes).values())
    per_token = features * sizes.itemsize + _norm_statistics(sizes)
    return sizes.tokens * per_token + _window_copies(sizes) + _concatenated_weights(sizes) + gradient


def held_gradients(sizes: BlockSizes) -> int:
    """Bytes that a split backward pass (Qi et al. 2023) keeps until the weights' gradients follow from them.

    The gradients of the outputs of all products and norms.
    """
    model, of_heads = sizes.model, sizes.model.q_width + sizes.model.kv_width
    features = sum(_products(sizes).values()) - _products(sizes)["attention"] + 2 * sizes.hidden
    features += of_heads // sizes.tp if model.qk_norm else 0
    return sizes.tokens * features * sizes.itemsize


def _all_features(sizes: BlockSizes) -> dict[str, int]:
    """Features a token that are saved without recomputation."""
    model, tp = sizes.model, sizes.tp
    q, kv, ffn = model.q_width // tp, model.kv_width // tp, model.ffn_width // tp
    features = {"input": sizes.hidden, "norm": sizes.whole}
    is_joined = _is_fused(sizes, _projections(sizes))
    fused = model.positions == "rope" and is_joined
    in_product = fused and not sizes.windows and sizes.cp == 1  # values are kept as a part of one product
    if sizes.is_ring and is_joined and model.positions != "rope" and not model.qk_norm:
        features["joined"] = 2 * kv  # queries are a part of one product, and those that go around are copies
    if sizes.exchanges_heads:  # what comes back from the ranks of other heads
        features["exchanged"] = q
    if not sizes.windows:  # whose copies are kept instead
        # rotated queries and keys are new; the values are part of one product
        features |= {"queries": q, "keys": kv, "values": q + 2 * kv if in_product else kv}
    if model.qk_norm and not in_product:
        features["unnormed"] = q + 2 * kv if fused else q + kv
    features |= {"attention": q, "middle": sizes.hidden, "norm 2": sizes.whole}
    if model.residual == "parallel":
        del features["middle"]  # the second norm's input is the first one's
    return features | dict.fromkeys(_mlp_features(sizes), ffn)


def _mlp_features(sizes: BlockSizes) -> tuple[str, ...]:
    """Inner tensors of the MLP that are saved."""
    if sizes.model.is_gated:
        if sizes.model.mlp == "geglu":  # fused loops save GELU's derivative; the gate is part of a fused product
            fused = sizes.fused_loops and _is_fused(sizes, 2 * sizes.model.ffn_width // sizes.tp)
            return ("gate", "up", "product", "activation", "derivative")[: 5 if fused else 4]
        return ("gate", "up", "product") if sizes.fused_loops else ("gate", "up", "product", "activation")
    if sizes.model.mlp == "relu":
        return ("relu",)  # which is positive where its input is
    return ("up", "gelu", "logistic") if sizes.model.mlp == "gelu-fast" else ("up", "gelu")  # or gelu's derivative


def _products(sizes: BlockSizes) -> dict[str, int]:
    """Features a token of the outputs of matrix products and attention."""
    model, tp = sizes.model, sizes.tp
    q, kv, ffn = model.q_width // tp, model.kv_width // tp, model.ffn_width // tp
    up = {"gate": ffn, "up": ffn} if model.is_gated else {"up": ffn}
    return {"queries": q, "keys": kv, "values": kv, "attention": q, "o": sizes.whole, **up, "down": sizes.whole}


def _shared_with_products(sizes: BlockSizes) -> dict[str, int]:
    """Features of `_all_features` that selective recomputation has kept, and does not compute again."""
    kept, every = _products(sizes), _all_features(sizes)
    names = set() if sizes.windows else {"attention"}  # of windows, which are put together again
    if not (sizes.fused_products and sizes.model.qkv_bias):  # with a bias those products are not yet what is used
        names |= {"values", "unnormed"} | ({"queries", "keys"} if sizes.model.positions != "rope" else set())
    if not (sizes.fused_products and sizes.model.mlp_bias):
        names |= {"gate"} | ({"up"} if sizes.model.is_gated or not sizes.fused_loops else set())
    return {name: every[name] for name in names if name in every and name in (*kept, "unnormed")}


def _attention_outputs(sizes: BlockSizes) -> int:
    """Bytes of what attention's kernels return."""
    return sizes.attended * sizes.itemsize * sizes.model.q_width // sizes.attention_parts


def _attention_statistics(sizes: BlockSizes) -> int:
    """Bytes of attention's log-sum-exp, a float32 per token and head (Dao et al. 2022)."""
    return sizes.attended * _FLOAT32 * sizes.model.heads // sizes.attention_parts


def _window_copies(sizes: BlockSizes) -> int:
    """Bytes of the inputs of attention in windows, and of its mask (training/kernels/windowed_attention.py).

    Queries, keys and values of all query heads, filled up to whole windows; and of all windows but the first the
    queries again, with keys and values of two windows each, which are no copies if there are no more than two.
    """
    if not sizes.windows:
        return 0
    window, later = sizes.window, sizes.windows - 1 if sizes.windows > 2 else 0
    features = (3 * sizes.windows + 5 * later) * window * sizes.model.q_width // sizes.attention_parts
    return (sizes.sequences * features + 2 * window**2) * sizes.itemsize


def _norm_statistics(sizes: BlockSizes) -> int:
    """Bytes a token of the norms' statistics: the inverse root mean square, or mean and inverse deviation."""
    model, per_norm = sizes.model, sizes.wide * (1 if sizes.model.norm == "rms" else 2)
    of_heads = (model.heads + model.kv_heads) // sizes.tp if model.qk_norm else 0
    return 2 * per_norm * sizes.hidden // sizes.whole + per_norm * of_heads


def _projections(sizes: BlockSizes) -> int:
    return (sizes.model.q_width + 2 * sizes.model.kv_width) // sizes.tp


def _is_fused(sizes: BlockSizes, outputs: int) -> bool:
    """True if products with `outputs` features together are one: if their matrices are no larger than their input.

    A grid joins them all.
    """
    return sizes.on_grid or (sizes.fused_products and outputs <= sizes.tokens)


def _concatenated_weights(sizes: BlockSizes) -> int:
    """Bytes of the matrices that are joined for fused products; a grid joins them again in the backward pass."""
    if sizes.on_grid:
        return 0
    joined = [_projections(sizes)] + [2 * sizes.model.ffn_width // sizes.tp] * sizes.model.is_gated
    return sum(n * sizes.model.width * sizes.itemsize for n in joined if _is_fused(sizes, n))


def backward_bytes(sizes: BlockSizes) -> int:
    """Bytes at work in a block's backward pass: the gradients of the MLP's two inner tensors."""
    return 2 * sizes.tokens * sizes.itemsize * sizes.model.ffn_width // sizes.tp


def weights_pass_bytes(sizes: BlockSizes) -> int:
    """Bytes at work in a pass for weights: a norm's gradient of its input; in 16 bits it and what it is of, wide."""
    return sizes.tokens * sizes.hidden * sizes.wide * (1 if sizes.itemsize == sizes.wide else 3)
