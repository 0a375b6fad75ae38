"""Checks that tensor-parallel ranks form a grid or a cube, and that a model fits it."""

from typing import TYPE_CHECKING

from gristmill.errors import require
from training.model.model_config import ModelConfig

if TYPE_CHECKING:
    from training.distributed.layout import ParallelConfig


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
    for name, parts in (("heads", heads), ("kv_heads", side), ("width", inputs), ("ffn_width", inputs)):
        size = getattr(model, name)
        require(
            size % parts == 0,
            f"model.{name} {size} is not divisible by {parts}, as {layout.tensor} on parallel.tp {layout.tp} ranks "
            f"divides it; try --model.{name} {-(-size // parts) * parts}, or --parallel.tensor 1d",
        )
    require(
        model.vocab_size >= side * side,
        f"a vocabulary of {model.vocab_size} is too small for a grid of {side} columns; try --parallel.tensor 1d",
    )
