"""Checks that a model and its sequences fit context parallelism."""

import math
from typing import TYPE_CHECKING

from gristmill.errors import require
from training.model.model_config import ModelConfig

if TYPE_CHECKING:
    from training.parallel.layout import ParallelConfig


def check_context(layout: "ParallelConfig", model: ModelConfig, seq_len: int) -> None:
    """Raise UsageError unless the resolved `layout` can divide the model's sequences, of `seq_len` tokens, over cp."""
    cp = layout.cp
    require(
        cp > 1 or layout.context == "ring",
        f"parallel.context {layout.context} has no effect with parallel.cp 1; try --parallel.cp 2",
    )
    if cp == 1:
        return
    require(
        layout.tensor == "1d",
        f"parallel.cp {cp} and parallel.tensor {layout.tensor}: a grid divides sequences among its rows, and not yet "
        "their tokens; try --parallel.tensor 1d",
    )
    _check_model(layout, model)
    parts = layout.sequence_parts
    of_tp = f" and its tokens over parallel.tp {layout.tp}" if layout.sequence_parallel else ""
    require(
        seq_len % parts == 0,
        f"data.seq_len {seq_len} is not divisible by {parts}: {layout.context} divides a sequence into "
        f"{cp * layout.context_chunks} chunks over parallel.cp {cp}{of_tp}; try --data.seq_len "
        f"{-(-seq_len // parts) * parts}",
    )


def _check_model(layout: "ParallelConfig", model: ModelConfig) -> None:
    """Refuse the parts of models whose tokens on other ranks are not reached yet."""
    cp = layout.cp
    require(
        not model.query_layer,
        f"model.query_layer and parallel.cp {cp}: its queries are not divided yet; try --parallel.cp 1 and more "
        "--parallel.tp",
    )
    common = math.gcd(model.heads, model.kv_heads) // layout.tp
    possible = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
    require(
        layout.context == "ring" or common % cp == 0,
        f"model.heads {model.heads} and kv_heads {model.kv_heads} are not divisible by parallel.tp {layout.tp} x "
        f"parallel.cp {cp}, over which ulysses divides them; try --parallel.context ring, or cp of {possible}",
    )
