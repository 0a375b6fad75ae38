"""Checks that tensor-parallel ranks form a grid or a cube, and that a model fits it."""

import math
from typing import TYPE_CHECKING

from gristmill.errors import require
from training.model.model_config import ModelConfig
from training.parallel.tensor.options import possible_sizes

if TYPE_CHECKING:
    from training.parallel.layout import ParallelConfig


def check_grid(layout: "ParallelConfig", model: ModelConfig) -> None:
    """Raise UsageError unless the resolved `layout` has a grid of ranks that divides the model."""
    _check_ranks(layout)
    _check_sizes(layout, model)


def _check_ranks(layout: "ParallelConfig") -> None:
    tensor, tp, depth = layout.tensor, layout.tp, layout.depth
    require(
        (depth > 1) == (tensor == "2.5d"),
        f"parallel.depth {depth} with parallel.tensor {tensor}: a 2d grid has one layer, a 2.5d one two or more, and "
        "a 3d one as many as rows; try "
        + ("--parallel.tensor 2.5d" if depth > 1 else "--parallel.tensor 2d, or --parallel.depth 2 with 8 ranks"),
    )
    cube = tensor == "3d"
    side = max(2, layout.grid[1])
    wanted = side**3 if cube else depth * side * side
    kind = "cube of l x l x l ranks" if cube else f"grid of q x q ranks times parallel.depth {depth}"
    require(tp == wanted, f"parallel.tp {tp} is no {kind}; try --parallel.tp {wanted}")
    require(
        not layout.sequence_parallel,
        f"parallel.sequence_parallel with parallel.tensor {tensor}: a grid divides all activations already; "
        "try --parallel.sequence_parallel false",
    )


def _check_sizes(layout: "ParallelConfig", model: ModelConfig) -> None:
    side = layout.grid[1]
    inputs = side * side if layout.tensor == "3d" else side  # of matrices, which layers of a cube divide once more
    heads = inputs if model.q_width % inputs else side
    parts = {"heads": heads, "kv_heads": side, "width": inputs, "ffn_width": inputs}
    for name, count in parts.items():
        size = getattr(model, name)
        require(
            size % count == 0,
            f"model.{name} {size} is not divisible by {count}, as {layout.tensor} on parallel.tp {layout.tp} ranks "
            f"divides it; try {_sizes_that_fit(model, parts)}, or {_without_grid(layout, model)}",
        )
    require(
        model.vocab_size >= side * side,
        f"a vocabulary of {model.vocab_size} is too small for a grid of {side} columns; "
        f"try {_without_grid(layout, model)}",
    )


def _sizes_that_fit(model: ModelConfig, parts: dict[str, int]) -> str:
    """Options that make each size divisible by its `parts`, by as little as heads and their features allow."""
    kv_heads = _multiple(model.kv_heads, parts["kv_heads"])
    heads = _multiple(model.heads, math.lcm(parts["heads"], kv_heads))
    is_given = model.head_dim * model.heads != model.width
    features = 1 if is_given else 2 * heads  # an even number a head, as rotary positions need
    width = _multiple(model.width, math.lcm(parts["width"], features))
    wanted = {"heads": heads, "kv_heads": kv_heads, "width": width}
    wanted["ffn_width"] = _multiple(model.ffn_width, parts["ffn_width"])
    changed = {name for name, size in wanted.items() if size != getattr(model, name)}
    # defaults that follow from another size
    changed |= {"ffn_width"} if "width" in changed else set()
    changed |= {"kv_heads"} if "heads" in changed else set()
    return " ".join(f"--model.{name} {size}" for name, size in wanted.items() if name in changed)


def _without_grid(layout: "ParallelConfig", model: ModelConfig) -> str:
    """Options of 1d on as many of the ranks as divide the model."""
    tp = max(n for n in possible_sizes(model) if layout.tp % n == 0)
    depth = " --parallel.depth 1" if layout.depth > 1 else ""
    return f"--parallel.tensor 1d{depth} --parallel.tp {tp}"


def _multiple(size: int, parts: int) -> int:
    return -(-size // parts) * parts
