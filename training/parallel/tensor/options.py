"""Checks that a model and its sequences fit tensor parallelism by rows and columns (1d)."""

import math
from typing import TYPE_CHECKING

from gristmill.errors import require
from training.model.model_config import ModelConfig

if TYPE_CHECKING:
    from training.parallel.layout import ParallelConfig


def check_tensor(layout: "ParallelConfig", model: ModelConfig, seq_len: int) -> None:
    """Raise UsageError unless the resolved `layout` divides the model, and with sequence parallelism the sequences."""
    tp = layout.tp
    require(layout.depth == 1, f"parallel.depth {layout.depth} with parallel.tensor 1d; try --parallel.tensor 2.5d")
    possible = possible_sizes(model)
    advice = f"try --parallel.tp {max(n for n in possible if n <= tp)}; {', '.join(map(str, possible))} are possible"
    for name in ("heads", "kv_heads", "ffn_width"):
        size = getattr(model, name)
        require(size % tp == 0, f"model.{name} {size} is not divisible by parallel.tp {tp}; {advice}")
    require(tp in possible, f"a vocabulary of {model.vocab_size} is too small for parallel.tp {tp}; {advice}")
    require(
        not layout.sequence_parallel or tp > 1,
        "parallel.sequence_parallel shards the sequence over parallel.tp, which is 1; try --parallel.tp 2",
    )
    require(
        not layout.sequence_parallel or seq_len % tp == 0,
        f"data.seq_len {seq_len} is not divisible by parallel.tp {tp}, over which sequence_parallel shards it; "
        f"try --data.seq_len {-(-seq_len // tp) * tp}",
    )


def possible_sizes(model: ModelConfig) -> list[int]:
    """The numbers of ranks that divide the model, in ascending order."""
    common = math.gcd(model.heads, model.kv_heads, model.ffn_width)
    # with a smaller vocabulary the last rank could be left without a row
    return [n for n in range(1, common + 1) if common % n == 0 and n * n <= model.vocab_size]
