"""The decoder's modules on a cube of ranks: what apply_cube puts in the place of those for one device.

Rank (k, i, j) has of the residual stream the sequences of (k, i) and the features of column j, as on a grid. Between
the two products of attention, those of the MLP and after the output matrix it has the sequences of (k, j) and the
heads, features or ids of row i: those are the sequences of rank (k, j, i).
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from training.distributed.collectives import Collective, gather_rows, scatter_rows
from training.experimental.grids.cube import Turn, gather_inputs, product_3d, scatter_inputs
from training.experimental.grids.grid_modules import GridHead, GridLinear, on_grid, replace_modules
from training.experimental.grids.summa import Grid
from training.experimental.grids.tokens import exchange
from training.model.attention import Attention
from training.model.decoder import Decoder
from training.model.documents import Documents
from training.model.embedding import Head, TokenEmbedding
from training.model.layers import Linear
from training.model.positions import Alibi, DocumentTable
from training.parallel.tensor.tensor_parallel import ShardedAlibi, lookup
from training.sharding.axis import Axis
from training.sharding.shard_spec import ShardSpec

_LAST = ("attention.o", "mlp.down")  # products back to the residual stream


def apply_cube(part: Decoder, pieces: Mapping[str, ShardSpec], grid: Grid, layers: Axis) -> None:
    """Replace the modules of a decoder, or a pipeline stage of one, that is on the meta device; in place.

    `pieces`: those of the placement table, by the names of the part's parameters.
    """
    turn = Turn(grid.column, grid.row, layers)

    def find(name: str, module: nn.Module) -> nn.Module | None:
        return _on_cube(name, module, pieces, turn, grid) or on_grid(name, module, pieces, grid)

    replace_modules(part, pieces, find, grid.row)
    for module in part.modules():
        if isinstance(module, Attention):
            module.register_forward_pre_hook(_other_sequences(grid))


def _on_cube(name: str, module: nn.Module, pieces: Mapping[str, ShardSpec], turn: Turn, grid: Grid) -> nn.Module | None:
    """Return the module that computes this rank's part of another; None for one that is as on a grid."""
    match module:
        case Head():
            return CubeHead(module, turn, grid, pieces[f"{name}.weight"].offset[0])
        case Linear():
            return CubeLinear(module, turn.back if name.endswith(_LAST) else turn)
        case TokenEmbedding():
            return CubeTokens(module, turn, pieces[f"{name}.weight"].offset[0])
        case Alibi():
            return ShardedAlibi(module, turn.outputs)
        case _:
            return None


def _other_sequences(grid: Grid) -> Any:
    """Return a hook that gives attention what depends on its sequences: documents, and ids where dropout needs them."""

    def hook(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        x, table, sample_ids = arguments
        assert isinstance(module, Attention)
        if isinstance(table, DocumentTable):
            table = _other_documents(table, grid)
        drops = module.training and module.dropout.p > 0
        return x, table, exchange(sample_ids, grid) if drops else sample_ids

    return hook


def _other_documents(table: DocumentTable, grid: Grid) -> DocumentTable:
    angles = table.table
    if isinstance(angles, tuple):
        angles = exchange(angles[0], grid), exchange(angles[1], grid)
    return DocumentTable(angles, Documents.of(exchange(table.documents.positions, grid)))


class CubeLinear(GridLinear):
    """Linear layer between the features of two axes, (B, T, h / l) to (B, T, h' / l) of other sequences."""

    def __init__(self, full: Linear, turn: Turn) -> None:
        nn.Module.__init__(self)
        self.weight = full.weight
        self.bias = full.bias
        self.turn = turn

    def product(self, x: Tensor, *weights: Tensor) -> Tensor:
        return product_3d(x, self.turn, *weights)


class CubeHead(GridHead):
    """Output matrix and loss: this rank's ids are those of its row, its sequences those of (k, j)."""

    def __init__(self, full: Head, turn: Turn, grid: Grid, first: int) -> None:
        super().__init__(full, grid, turn.outputs, first)
        self.turn = turn

    def logits(self, x: Tensor) -> Tensor:
        return product_3d(x, self.turn, self.weight)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of sequences (k, j) in training, (k, i) in evaluation."""
        losses = super().loss(x, exchange(targets, self.grid))
        return losses if self.training else exchange(losses, self.grid)


class CubeTokens(TokenEmbedding):
    """Embedding: ranks along the row axis look up their ids for the tokens of all rows of the layer, and sum.

    The matrix is that of the output layer, so its features are gathered along the layers.
    """

    def __init__(self, full: TokenEmbedding, turn: Turn, first: int) -> None:
        nn.Module.__init__(self)
        self.weight = full.weight
        self.turn = turn
        self.first = first

    def forward(self, ids: Tensor) -> Tensor:
        axis = self.turn.outputs
        weight = Collective.apply(self.weight, self.turn.layers, gather_inputs, scatter_inputs)
        x = lookup(gather_rows(ids, axis), weight, self.first)
        return Collective.apply(x, axis, scatter_rows, gather_rows)
