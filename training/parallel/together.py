"""Checks that recomputation and compilation go together with a grid of ranks and with context parallelism."""

from typing import TYPE_CHECKING

from gristmill.errors import require

if TYPE_CHECKING:
    from training.parallel.layout import ParallelConfig


def check_together(layout: "ParallelConfig", recompute: str, compiled: bool) -> None:
    """Raise UsageError for what does not go together with the resolved `layout`."""
    tensor, cp, context = layout.tensor, layout.cp, layout.context
    require(
        tensor == "1d" or not compiled,
        f"compile and parallel.tensor {tensor}: blocks whose products broadcast are not compiled yet; "
        "try --compile false, or --parallel.tensor 1d",
    )
    require(
        tensor == "1d" or recompute != "selective",
        f"memory.recompute selective and parallel.tensor {tensor}: it keeps the results of products, and on a grid "
        "a product is several that are added up; try --memory.recompute full, or --parallel.tensor 1d",
    )
    require(
        cp == 1 or context == "ring" or not compiled,
        f"compile and parallel.context {context}: blocks whose heads are exchanged are not compiled yet; "
        "try --compile false, or --parallel.context ring",
    )
    require(
        cp == 1 or not compiled or recompute != "full",
        f"compile and memory.recompute full with parallel.cp {cp}: a recomputed block is compiled in one piece, "
        "and a ring is not compiled; try --compile false, or --memory.recompute none",
    )
    require(
        cp == 1 or context != "ring" or recompute != "selective",
        "memory.recompute selective and parallel.context ring: it keeps the results of products, and those of a "
        "ring are the scores of all tokens; try --memory.recompute full, or --parallel.cp 1",
    )
