"""Weight: one parameter as this rank holds it."""

from dataclasses import dataclass

from torch import nn

from training.sharding.shard_spec import Piece


@dataclass(frozen=True)
class Weight:
    """A parameter as one process holds it.

    `full` is what the forward pass uses: the process's share under tensor parallelism. `own` is what this
    process updates, and stores: `full` itself, or its rows of it where ZeRO divides them; a plain tensor
    with a plain gradient, and memory of its own or a view of `full`. `counted` is true on one of the
    processes that hold the same piece: the one that contributes it to sums.
    """

    name: str
    full: nn.Parameter
    own: nn.Parameter
    piece: Piece
    counted: bool
