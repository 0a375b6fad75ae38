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
from training.experimental.grids.grid_modules import GridLinear, on_grid
from training.experimental.grids.summa import Grid
from training.experimental.grids.tokens import exchange
from training.kernels.cross_entropy import logits_cross_entropy, logits_losses
from training.kernels.dispatch import embedding
from training.model.attention import Attention
from training.model.decoder import Decoder
from training.model.documents import Documents
from training.model.embedding import Head, TokenEmbedding
from training.model.layers import Linear
from training.model.positions import Alibi, DocumentTable
from training.parallel.tensor.tensor_parallel import ShardedAlibi, ShardedDropout, cut_parameters
from training.sharding.axis import Axis
from training.sharding.shard_spec import ShardSpec

_LAST = ("attention.o", "mlp.down")  # products back to the residual stream


def apply_cube(part: Decoder, pieces: Mapping[str, ShardSpec], grid: Grid, layers: Axis) -> None:
    """Replace the modules of a decoder, or a pipeline stage of one, that is on the meta device; in place.

    `pieces`: those of the placement table, by the names of the part's parameters.
    """
    cut_parameters(part, pieces)
    turn = Turn(grid.column, grid.row, layers)
    for name, module in list(part.named_modules()):
        if not name.endswith(("q_norm", "k_norm")):
            other = _on_cube(name, module, pieces, turn, grid) or on_grid(name, module, pieces, grid)
            if other is not None:
                part.set_submodule(name, other)
    for block in part.blocks.children():
        attention = block.attention
        assert isinstance(attention, Attention)
        attention.dropout = ShardedDropout(attention.dropout, grid.row)
        attention.register_forward_pre_hook(_other_sequences(grid))


def _on_cube(name: str, module: nn.Module, pieces: Mapping[str, ShardSpec], turn: Turn, grid: Grid) -> nn.Module | None:
    """The module that computes this rank's part of another; None for one that is as on a grid."""
    match module:
        case Head():
            return CubeHead(module, turn, grid, pieces[f"{name}.weight"].offset[0])
        case Linear():
            return CubeLinear(module, turn.back if name.endswith(_LAST) else turn)
        case TokenEmbedding():
            return CubeTokens(module, turn, pieces[f"{name}.weight"])
        case Alibi():
            return ShardedAlibi(module, turn.outputs)
        case _:
            return None


def _other_sequences(grid: Grid) -> Any:
    """A hook that gives attention what depends on its sequences: documents, and ids where dropout needs them."""

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
    return DocumentTable(angles, Documents.of(exchange(table.documents.positions.contiguous(), grid)))


class CubeLinear(GridLinear):
    """Linear layer between the features of two axes, (B, T, h / l) to (B, T, h' / l) of other sequences."""

    def __init__(self, full: Linear, turn: Turn) -> None:
        nn.Module.__init__(self)
        self.weight, self.bias, self.turn = full.weight, full.bias, turn

    def product(self, x: Tensor, *weights: Tensor) -> Tensor:
        return product_3d(x, self.turn, *weights)


class CubeHead(Head):
    """Output matrix and loss: this rank's ids are those of its row, its sequences those of (k, j)."""

    def __init__(self, full: Head, turn: Turn, grid: Grid, first: int) -> None:
        nn.Module.__init__(self)
        self.weight, self.turn, self.grid, self.first = full.weight, turn, grid, first
        self.register_parameter("bias", None)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """In training of the sequences of (k, j), in evaluation of those of (k, i)."""
        logits, group = product_3d(x, self.turn, self.weight), self.turn.outputs.group
        targets = exchange(targets.contiguous(), self.grid)
        if not self.training:
            return exchange(logits_losses(logits, targets, self.first, group), self.grid)
        return logits_cross_entropy(logits, targets, self.first, group, self.z_loss)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """The loss; without targets this rank's logits, (B, T, V / l)."""
        return product_3d(x, self.turn, self.weight) if targets is None else self.loss(x, targets)


class CubeTokens(TokenEmbedding):
    """Embedding: ranks along the row axis look up their ids for the tokens of all rows of the layer, and sum.

    The matrix is that of the output layer, so its features are gathered along the layers.
    """

    def __init__(self, full: TokenEmbedding, turn: Turn, piece: ShardSpec) -> None:
        nn.Module.__init__(self)
        self.weight, self.turn = full.weight, turn
        self.first, self.count = piece.offset[0], piece.size[0]

    def forward(self, ids: Tensor) -> Tensor:
        axis = self.turn.outputs
        local = gather_rows(ids, axis) - self.first
        mine = (local >= 0) & (local < self.count)
        weight = Collective.apply(self.weight, self.turn.layers, gather_inputs, scatter_inputs)
        x = embedding(local.clamp(0, self.count - 1), weight) * mine[..., None]
        return Collective.apply(x, axis, scatter_rows, gather_rows)
