"""Compute time: the products and memory traffic of a layer and of the head on one rank, and the seconds of a product.

b sequences of s tokens, h width, f feed-forward width, a heads of d features, V vocabulary, t tensor-parallel ranks.
A product's rate depends on its shape.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from gristmill_planner.fitted_constants import Constants
from gristmill_planner.hardware import Device
from gristmill_planner.planned_run import PlannedRun
from training.model.model_config import ModelConfig
from training.parallel.tensor.options import kv_copies


@dataclass(frozen=True)
class Product:
    """`count` products of an m x k by a k x n matrix."""

    m: float
    n: float
    k: float
    count: float = 1.0

    @property
    def flops(self) -> float:
        """Return a multiplication and an addition each: 2 m n k."""
        return 2.0 * self.count * self.m * self.n * self.k

    @property
    def elements(self) -> float:
        """Return the elements read and written, if each matrix passes once."""
        return self.count * (self.m * self.k + self.k * self.n + self.m * self.n)

    def backward(self) -> "tuple[Product, Product]":
        """Return the products for the gradients of the input and of the weights."""
        return Product(self.m, self.k, self.n, self.count), Product(self.k, self.n, self.m, self.count)


@dataclass(frozen=True)
class RankWork:
    """The products and the memory traffic of a layer or the head in a forward pass."""

    products: tuple[Product, ...]
    traffic: float
    """Bytes that the kernels other than the products read and write, in 16 bits; twice that in a backward pass."""
    attention: tuple[Product, ...] = ()
    """Those of the products that are of queries and keys, and of weights and values."""

    @property
    def flops(self) -> float:
        return sum(product.flops for product in self.products)


IMBALANCE = 1.2
"""Tokens that the busiest expert-parallel rank gets, over the mean; assumed."""
_ROW_PASSES = 6
"""Times that a token's vectors are read or written for each of its experts, sorted by expert and summed again."""
_SCORE_PASSES = 8
"""Times that scores are read or written in float32 where flash attention has no kernel, in a ring and with sinks:
training/kernels/block_attention.py, operator by operator."""


@lru_cache(4096)
def layer_work(
    model: ModelConfig, sequences: float, seq_len: int, parts: int = 1, shards: int = 1, flash: bool = True,
    tensor: str = "1d", ring: int = 1, ep: int = 1,
) -> RankWork:  # fmt: skip
    """Return RankWork of one decoder layer, whose features are divided into t `parts`, and its experts over `ep` ranks.

    Of sparse and dense layers, and of those with a window and without, it is the mean.

    Its norms and residual sums see 1 / `shards` of the tokens. `flash`: attention's weights never leave the chip (Dao
    et al. 2022), but for those of a `ring` of n ranks and of sinks; else the softmax reads and writes b a s² / t.
    """
    tokens = sequences * seq_len
    width = model.width
    heads = model.heads / parts
    attention = model.q_width / parts
    ffn = model.active_width / parts
    sparse = len(model.sparse_layers) / model.layers
    gates = 2 if model.is_gated else 1
    of_heads = tuple(_attention_products(model, seq_len, sequences * heads))
    if model.kv_lora_rank:
        into_heads = _latent(model, tokens, parts)
    else:
        into_heads = _heads(model, tokens, parts, tensor)
    out_of_heads = _matrix(tokens, width, model.value_width, parts, tensor, by_inputs=True)
    products = (*into_heads, *of_heads, out_of_heads)
    for count, rows, features in _mlps(model, tokens, ep, sparse):
        up = _matrix(rows, gates * features, width, parts, tensor)
        down = _matrix(rows, width, features, parts, tensor, by_inputs=True)
        products += (replace(up, count=up.count * count), replace(down, count=down.count * count))
    if sparse:
        products += (Product(tokens, model.experts, width, sparse),)
    whole = (2 * 2 + 2 * 3) * width / shards  # two norms, and two sums with the residual stream
    whole += sparse * model.experts_per_token * _ROW_PASSES * width
    divided = 2 * attention + (gates + 1) * ffn  # attention's output rearranged, and the activation function
    weights = 0.0 if flash else 2 * heads * seq_len
    scores = 0.0
    if ring > 1 or model.sinks:
        scores = tokens * heads * _scores(model, seq_len, ring)
    traffic = 2.0 * tokens * (whole + divided + weights) + 4.0 * _SCORE_PASSES * scores
    return RankWork(products, traffic, of_heads)


def _heads(model: ModelConfig, tokens: float, parts: int, tensor: str) -> tuple[Product, ...]:
    """Return the product for queries, keys and values in one."""
    copies = kv_copies(model, parts) if tensor == "1d" else 1
    outputs = model.q_width + 2 * copies * model.kv_width
    return (_matrix(tokens, outputs, model.width, parts, tensor),)


def _latent(model: ModelConfig, tokens: float, parts: int) -> tuple[Product, ...]:
    """Return products to compressed vectors, whole on each rank, and to its heads (DeepSeek-AI 2024, section 2.1)."""
    rank = model.q_lora_rank
    width = model.width
    compressed = model.kv_lora_rank + model.qk_rope_head_dim
    heads = model.heads * model.qk_nope_head_dim + model.value_width
    return (
        Product(tokens, rank + compressed, width),
        Product(tokens, model.q_width / parts, rank or width),
        Product(tokens, heads / parts, model.kv_lora_rank),
    )


def _mlps(model: ModelConfig, tokens: float, ep: int, sparse: float) -> Iterator[tuple[float, float, int]]:
    """Yield the MLPs of a layer, `sparse` of which are of experts: how many, their rows and features.

    Tokens of `ep` ranks fall on the experts of this one; it gets as many as all are assumed to (IMBALANCE).
    """
    if sparse < 1:
        yield 1 - sparse, tokens, model.ffn_width
    if sparse:
        rows = tokens * model.experts_per_token / model.experts * ep
        if ep > 1:
            rows *= IMBALANCE
        yield sparse * model.experts / ep, 8 * math.ceil(rows / 8), model.expert_width  # a grouped product aligns them
    if model.shared_experts:
        yield sparse, tokens, model.shared_experts * model.expert_width


def _matrix(
    tokens: float, outputs: float, inputs: float, parts: int, tensor: str, by_inputs: bool = False
) -> "Product":
    """Return X W^T of all `outputs` and `inputs` on one rank.

    1D divides W by outputs or, `by_inputs`, by inputs. SUMMA takes `parts` products of blocks; a cube one of what is
    gathered: a layer's tokens, a row's inputs.
    """
    if tensor == "1d" and by_inputs:
        return Product(tokens, outputs, inputs / parts)
    if tensor == "1d":
        return Product(tokens, outputs / parts, inputs)
    if tensor == "3d":
        return Product(parts * tokens, outputs / parts, inputs / parts)
    return Product(tokens, outputs / parts, inputs / parts, parts)


def _attention_products(model: ModelConfig, seq_len: int, count: float) -> Iterator[Product]:
    """Return the products of queries and keys, and of weights and values, of `count` heads; as if all tokens saw all.

    With a window blocks of as many queries see their own keys and those of the block before.
    """
    window = model.window or 0
    share = _windowed(model, seq_len)
    for queries, keys, of_layers in ((seq_len, seq_len, 1 - share), (window, 2 * window, share)):
        if of_layers:
            blocks = count * of_layers * seq_len / queries
            yield Product(queries, keys, model.head_dim, blocks)
            yield Product(queries, model.head_dim, keys, blocks)


def _windowed(model: ModelConfig, seq_len: int) -> float:
    """Return the share of layers whose blocks of a window are shorter than the sequence."""
    window = model.window or 0
    if not 0 < 2 * window < seq_len:
        return 0.0
    return sum(model.layer_window(layer) > 0 for layer in range(model.layers)) / model.layers


def _scores(model: ModelConfig, seq_len: int, ring: int) -> float:
    """Return the scores of a token and head that pass through memory, of a layer on average.

    Over a ring of n ranks a sequence has 2 n chunks, of which each rank computes 2 n + 1 pairs, tile by tile; with a
    window those that it reaches.
    """
    window = model.window or 0
    if ring > 1:
        chunk = seq_len / (2 * ring)
        all_pairs = (2 * ring + 1) / 2 * chunk
        in_window = min(all_pairs, chunk * (1 + math.ceil(window / chunk)))
    else:
        all_pairs = seq_len / 2
        in_window = 2 * window
    share = _windowed(model, seq_len)
    return (1 - share) * all_pairs + share * in_window


def head_work(model: ModelConfig, sequences: float, seq_len: int, parts: int = 1, tensor: str = "1d") -> RankWork:
    """RankWork of the output matrix and the loss, which reads or writes each logit about ten times in float32."""
    tokens = sequences * seq_len
    vocabulary = -(-model.vocab_size // parts)
    product = _matrix(tokens, parts * vocabulary, model.width, parts, tensor)
    return RankWork((product,), 40.0 * tokens * vocabulary)


def model_flops(model: ModelConfig, sequences: int, seq_len: int, recompute: str = "none") -> float:
    """Return the FLOPs of a step over `sequences`, backward pass and what is computed again included.

    72 B s L h² (1 + s / 6h + V / 12Lh) without recomputation, 96 B s L h² (1 + s / 6h + V / 16Lh) with all layers
    computed again (Narayanan et al. 2021, equation 3), for f = 4h; other shapes by their products.
    """
    layers = model.layers * layer_work(model, 1, seq_len).flops
    head = head_work(model, 1, seq_len).flops
    again = {"none": 0.0, "selective": 0.0, "full": layers}[recompute]
    return sequences * (3 * (layers + head) + again)


def layer_of_rank(run: PlannedRun) -> RankWork:
    """Return the RankWork of one decoder layer for a micro-batch."""
    layout = run.layout
    parts = run.parts
    shards = parts if layout.on_grid else layout.sequence_shards
    ring = layout.cp if layout.context == "ring" else 1
    return layer_work(
        run.model, rank_sequences(run), run.seq_len, parts, shards, run.software.flash, layout.tensor, ring,
        run.axes["ep"].ranks,
    )  # fmt: skip


def head_of_rank(run: PlannedRun) -> RankWork:
    """Return the RankWork of the output matrix and the loss for a micro-batch."""
    return head_work(run.model, rank_sequences(run), run.seq_len, run.parts, run.layout.tensor)


def rank_sequences(run: PlannedRun) -> float:
    """Return the sequences of a micro-batch on a rank; where it has some tokens of each, as many as these make."""
    return run.micro_batch / (run.layout.cp * run.layout.batch_shards)


_TILES = {(256, 128): 1.0, (128, 256): 1.0, (128, 128): 0.9, (128, 64): 0.75, (64, 128): 0.75}
"""Tiles of the result that libraries compute on one multiprocessor, and the share of the best rate that they reach.

Small ones load more for each FLOP (NVIDIA, "Matrix Multiplication Background", which has the sizes; the shares are
assumed, not fitted).
"""


def product_time(product: Product, device: Device, constants: Constants) -> float:
    """Return the seconds of a product: FLOPs at a rate that saturates with the summed side, bytes, and a latency.

    Tensor cores need rows of a multiple of 8 elements, 16 bytes (NVIDIA, "Matrix Multiplication Background").
    """
    share = constants.product_share * product.k / (product.k + constants.product_depth)
    if product.n % 8 or product.k % 8:
        share /= constants.misaligned
    share *= wave_share(product, device)
    size = product.elements * device.element_bytes
    return product.flops / (share * device.flops) + size / (0.9 * device.bandwidth) + constants.product_latency


def wave_share(product: Product, device: Device) -> float:
    """Return the share of multiprocessors' time that tiles of a product fill, with the best tile; 1 without those.

    Tiles reach over the edges, and the last wave of them leaves multiprocessors idle (NVIDIA, "Matrix Multiplication
    Background", on tile and wave quantization).
    """
    if not device.processors:
        return 1.0
    return max(share * _filled(product, *tile, device.processors) for tile, share in _TILES.items())


def _filled(product: Product, rows: int, columns: int, processors: int) -> float:
    tiles = math.ceil(product.m / rows) * math.ceil(product.n / columns) * product.count
    exact = product.m * product.n * product.count / (rows * columns)
    return exact / (math.ceil(tiles / processors) * processors)
