"""Checks that gradient compression fits a layout."""

from typing import TYPE_CHECKING

from gristmill.errors import require
from training.model.model_config import ModelConfig

if TYPE_CHECKING:
    from training.parallel.layout import ParallelConfig

DEFAULT_RANK = 4  # PowerSGD's, the largest of the paper's experiments


def check_compression(layout: "ParallelConfig", model: ModelConfig) -> None:
    """Raise UsageError unless gradients of the resolved `layout` can be compressed as it says."""
    how, rank = layout.compression, layout.compression_rank
    require(
        how == "powersgd" or rank == DEFAULT_RANK,
        f"parallel.compression_rank {rank} has no effect with parallel.compression {how}; "
        "try --parallel.compression powersgd",
    )
    if how == "none":
        return
    require(
        layout.replicas > 1,
        f"parallel.compression {how} and one replica, which sends no gradients; try --parallel.dp 2, or "
        "--parallel.compression none",
    )
    require(
        layout.zero == 0,
        f"parallel.compression {how} and parallel.zero {layout.zero}: ZeRO sends the parameters of every step in full, "
        "so that compressed gradients save little; try --parallel.zero 0",
    )
    require(
        layout.tensor == "1d",
        f"parallel.compression {how} and parallel.tensor {layout.tensor}: the blocks of a grid are not compressed yet; "
        "try --parallel.tensor 1d",
    )
    require(
        not layout.reduce_bf16,
        f"parallel.compression {how} and parallel.reduce_bf16 are two ways to send less; try --parallel.reduce_bf16 "
        "false",
    )
    require(
        not model.tied or layout.pp == 1 or layout.stage_ranks[0] == layout.stage_ranks[-1],
        f"parallel.compression {how}, model.tied and parallel.pp {layout.pp}: two ranks have terms of the embedding's "
        "gradient, and what each leaves out is not one memory; try --model.tied false, or --parallel.pp 1",
    )
