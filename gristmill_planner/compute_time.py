"""Compute time: the products and memory traffic of a layer and of the head on one rank, and the seconds of a product.

b sequences of s tokens, h width, f feed-forward width, a heads of d features, V vocabulary, t tensor-parallel ranks.
A product's rate depends on its shape.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from gristmill_planner.fitted_constants import Constants
from gristmill_planner.hardware import Device
from gristmill_planner.planned_run import PlannedRun
from training.experimental.parallel_config import ParallelConfig
from training.model.model_config import ModelConfig


@dataclass(frozen=True)
class Product:
    """`count` products of an m x k by a k x n matrix."""

    m: float
    n: float
    k: float
    count: float = 1.0

    @property
    def flops(self) -> float:
        """A multiplication and an addition each: 2 m n k."""
        return 2.0 * self.count * self.m * self.n * self.k

    @property
    def elements(self) -> float:
        """Read and written, if each matrix passes once."""
        return self.count * (self.m * self.k + self.k * self.n + self.m * self.n)

    def backward(self) -> "tuple[Product, Product]":
        """The products for the gradients of the input and of the weights."""
        return Product(self.m, self.k, self.n, self.count), Product(self.k, self.n, self.m, self.count)


@dataclass(frozen=True)
class RankWork:
    """What a layer or the head computes in a forward pass."""

    products: tuple[Product, ...]
    traffic: float
    """Bytes that the kernels beside the products read and write, in 16 bits; twice that in a backward pass."""
    attention: tuple[Product, ...] = ()
    """Those of the products that are of queries and keys, and of weights and values."""

    @property
    def flops(self) -> float:
        return sum(product.flops for product in self.products)


def layer_work(model: ModelConfig, sequences: float, seq_len: int, tp: int, shards: int, flash: bool) -> RankWork:
    """RankWork of one decoder layer; its norms and residual sums see 1 / `shards` of the tokens.

    `flash`: attention's weights never leave the chip (Dao et al. 2022); else the softmax reads and writes b a s² / t.
    """
    tokens, width, heads, head_dim = sequences * seq_len, model.width, model.heads / tp, model.head_dim
    attention, ffn = model.q_width / tp, model.ffn_width / tp
    up = ffn * (2 if model.is_gated else 1)
    of_heads = attention_products(seq_len, head_dim, sequences * heads)
    products = (
        Product(tokens, attention + 2 * model.kv_width / tp, width),
        *of_heads,
        Product(tokens, width, attention),
        Product(tokens, up, width),
        Product(tokens, width, ffn),
    )
    whole = (2 * 2 + 2 * 3) * width / shards  # two norms, and two sums with the residual stream
    divided = 2 * attention + up + ffn  # attention's output rearranged, and the activation function
    weights = 0.0 if flash else 2 * heads * seq_len
    return RankWork(products, 2.0 * tokens * (whole + divided + weights), of_heads)


def attention_products(seq_len: int, head_dim: int, count: float) -> tuple[Product, Product]:
    """Of queries and keys, and of weights and values, of `count` heads of sequences; as if all tokens saw all."""
    return Product(seq_len, seq_len, head_dim, count), Product(seq_len, head_dim, seq_len, count)


def head_work(model: ModelConfig, sequences: float, seq_len: int, tp: int) -> RankWork:
    """RankWork of the output matrix and the loss, which reads or writes each logit about ten times in float32."""
    tokens, vocabulary = sequences * seq_len, -(-model.vocab_size // tp)
    return RankWork((Product(tokens, vocabulary, model.width),), 40.0 * tokens * vocabulary)


def model_flops(model: ModelConfig, sequences: int, seq_len: int, recompute: str = "none") -> float:
    """FLOPs of a step over `sequences`, backward pass and what is computed again included.

    72 B s L h² (1 + s / 6h + V / 12Lh) without recomputation, 96 B s L h² (1 + s / 6h + V / 16Lh) with all layers
    computed again (Narayanan et al. 2021, equation 3), for f = 4h; other shapes by their products.
    """
    layers = model.layers * layer_work(model, 1, seq_len, 1, 1, True).flops
    head = head_work(model, 1, seq_len, 1).flops
    again = {"none": 0.0, "selective": 0.0, "full": layers}[recompute]
    return sequences * (3 * (layers + head) + again)


_RING_PASSES = 8
"""Times that a ring's scores are read or written in float32: training/kernels/block_attention.py, operator by
operator."""


def layer_of_rank(run: PlannedRun) -> RankWork:
    """RankWork of one decoder layer for a micro-batch."""
    layout = run.layout
    if layout.tensor != "1d":
        return _grid_layer(run.model, rank_sequences(run), run.seq_len, *sides(layout))
    divided = layout.cp > 1 and layout.context == "ring"
    return _layer(
        run.model, rank_sequences(run), run.seq_len, layout.tp, layout.sequence_shards, run.software.flash,
        layout.cp if divided else 1,
    )  # fmt: skip


def head_of_rank(run: PlannedRun) -> RankWork:
    """RankWork of the output matrix and the loss for a micro-batch."""
    if run.layout.tensor == "1d":
        return head_work(run.model, rank_sequences(run), run.seq_len, run.layout.tp)
    side, cube = sides(run.layout)
    tokens, vocabulary = rank_sequences(run) * run.seq_len, -(-run.model.vocab_size // side)
    return RankWork((_grid_product(tokens, vocabulary, run.model.width, side, cube),), 40.0 * tokens * vocabulary)


def rank_sequences(run: PlannedRun) -> float:
    """Sequences of a micro-batch on a rank; where it has some tokens of each, as many as these make."""
    return run.micro_batch / (run.layout.cp * run.layout.batch_shards)


def sides(layout: ParallelConfig) -> tuple[int, bool]:
    """Side of the grid of ranks, and whether it is a cube."""
    return layout.grid[1], layout.tensor == "3d"


@lru_cache(4096)
def _layer(
    model: ModelConfig, sequences: float, seq_len: int, tp: int, shards: int, flash: bool, ring: int
) -> RankWork:
    """A layer under 1D tensor parallelism, whose attention `ring` ranks share; 1: no ring.

    Of a sequence's 2 n chunks each rank of n computes 2 n + 1 pairs, tile by tile: their scores pass through memory.
    """
    work = layer_work(model, sequences, seq_len, tp, shards, flash)
    if ring == 1:
        return work
    pairs = (2 * ring + 1) / (4 * ring) * sequences * seq_len**2  # of n times as many sequences of 1 / n of the tokens
    return replace(work, traffic=work.traffic + 4.0 * _RING_PASSES * pairs * model.heads / tp)


@lru_cache(4096)
def _grid_layer(model: ModelConfig, sequences: float, seq_len: int, side: int, cube: bool) -> RankWork:
    """A layer on a grid of side x side ranks, or on a layer of a cube."""
    tokens, width, ffn = sequences * seq_len, model.width, model.ffn_width
    heads, up = model.heads / side, ffn * (2 if model.is_gated else 1)
    shapes = (
        (model.q_width + 2 * model.kv_width, width), (width, model.q_width), (up, width), (width, ffn),
    )  # fmt: skip
    products = tuple(_grid_product(tokens, outputs / side, inputs, side, cube) for outputs, inputs in shapes)
    of_heads = attention_products(seq_len, model.head_dim, sequences * heads)
    features = (2 * 2 + 2 * 3) * width + 2 * model.q_width + up + ffn
    return RankWork((*products, *of_heads), 2.0 * tokens * features / side, of_heads)


def _grid_product(tokens: float, outputs: float, inputs: float, side: int, cube: bool) -> Product:
    """X W^T: of SUMMA `side` products of blocks; of a cube one of what is gathered: a layer's tokens, a row's inputs.

    `outputs`: those of a rank; `inputs`: all.
    """
    if cube:
        return Product(side * tokens, outputs, inputs / side)
    return Product(tokens, outputs, inputs / side, side)


_TILES = {(256, 128): 1.0, (128, 256): 1.0, (128, 128): 0.9, (128, 64): 0.75, (64, 128): 0.75}
"""Tiles of the result that libraries compute on one multiprocessor, and the share of the best rate that they reach.

Small ones load more for each FLOP (NVIDIA, "Matrix Multiplication Background", which has the sizes; the shares are
assumed, not fitted).
"""


def product_time(product: Product, device: Device, constants: Constants) -> float:
    """Seconds of a product: its FLOPs at a rate that saturates with the summed side, its bytes, and a latency.

    Tensor cores need rows of a multiple of 8 elements, 16 bytes (NVIDIA, "Matrix Multiplication Background").
    """
    share = constants.product_share * product.k / (product.k + constants.product_depth)
    if product.n % 8 or product.k % 8:
        share /= constants.misaligned
    share *= wave_share(product, device)
    size = product.elements * device.element_bytes
    return product.flops / (share * device.flops) + size / (0.9 * device.bandwidth) + constants.product_latency


def wave_share(product: Product, device: Device) -> float:
    """Share of the multiprocessors' time that the tiles of a product fill, with the best tile; 1 without those.

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
