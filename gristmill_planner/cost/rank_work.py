"""Rank work: what a layer and the head compute on one rank, however the layout divides matrices and sequences."""

from dataclasses import replace
from functools import lru_cache

from gristmill_planner.cost.layer_work import Product, Work, attention_products, head_work, layer_work
from gristmill_planner.cost.planned_run import PlannedRun
from training.experimental.parallel_config import ParallelConfig
from training.model.model_config import ModelConfig

_RING_PASSES = 8
"""Times that a ring's scores are read or written in float32: training/kernels/block_attention.py, operator by
operator."""


def layer_of_rank(run: PlannedRun) -> Work:
    """Work of one decoder layer for a micro-batch."""
    layout = run.layout
    if layout.tensor != "1d":
        return _grid_layer(run.model, rank_sequences(run), run.seq_len, *sides(layout))
    divided = layout.cp > 1 and layout.context == "ring"
    return _layer(
        run.model, rank_sequences(run), run.seq_len, layout.tp, layout.sequence_shards, run.software.flash,
        layout.cp if divided else 1,
    )  # fmt: skip


def head_of_rank(run: PlannedRun) -> Work:
    """Work of the output matrix and the loss for a micro-batch."""
    if run.layout.tensor == "1d":
        return head_work(run.model, rank_sequences(run), run.seq_len, run.layout.tp)
    side, cube = sides(run.layout)
    tokens, vocabulary = rank_sequences(run) * run.seq_len, -(-run.model.vocab_size // side)
    return Work((_grid_product(tokens, vocabulary, run.model.width, side, cube),), 40.0 * tokens * vocabulary)


def rank_sequences(run: PlannedRun) -> float:
    """Sequences of a micro-batch on a rank; where it has some tokens of each, as many as these make."""
    return run.micro_batch / (run.layout.cp * run.layout.batch_shards)


def sides(layout: ParallelConfig) -> tuple[int, bool]:
    """Side of the grid of ranks, and whether it is a cube."""
    return layout.grid[1], layout.tensor == "3d"


@lru_cache(4096)
def _layer(model: ModelConfig, sequences: float, seq_len: int, tp: int, shards: int, flash: bool, ring: int) -> Work:
    """A layer under 1D tensor parallelism, whose attention `ring` ranks share; 1: no ring.

    Of a sequence's 2 n chunks each rank of n computes 2 n + 1 pairs, tile by tile: their scores pass through memory.
    """
    work = layer_work(model, sequences, seq_len, tp, shards, flash)
    if ring == 1:
        return work
    pairs = (2 * ring + 1) / (4 * ring) * sequences * seq_len**2  # of n times as many sequences of 1 / n of the tokens
    return replace(work, traffic=work.traffic + 4.0 * _RING_PASSES * pairs * model.heads / tp)


@lru_cache(4096)
def _grid_layer(model: ModelConfig, sequences: float, seq_len: int, side: int, cube: bool) -> Work:
    """A layer on a grid of side x side ranks, or on a layer of a cube."""
    tokens, width, ffn = sequences * seq_len, model.width, model.ffn_width
    heads, up = model.heads / side, ffn * (2 if model.is_gated else 1)
    shapes = (
        (model.q_width + 2 * model.kv_width, width), (width, model.q_width), (up, width), (width, ffn),
    )  # fmt: skip
    products = tuple(_grid_product(tokens, outputs / side, inputs, side, cube) for outputs, inputs in shapes)
    of_heads = attention_products(seq_len, model.head_dim, sequences * heads)
    features = (2 * 2 + 2 * 3) * width + 2 * model.q_width + up + ffn
    return Work((*products, *of_heads), 2.0 * tokens * features / side, of_heads)


def _grid_product(tokens: float, outputs: float, inputs: float, side: int, cube: bool) -> Product:
    """X W^T: of SUMMA `side` products of blocks; of a cube one of what is gathered: a layer's tokens, a row's inputs.

    `outputs`: those of a rank; `inputs`: all.
    """
    if cube:
        return Product(side * tokens, outputs, inputs / side)
    return Product(tokens, outputs, inputs / side, side)
