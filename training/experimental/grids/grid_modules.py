"""The decoder's modules on a grid of ranks: what apply_grid puts in the place of those for one device.

Everywhere between two modules rank (i, j) has the sequences of grid row i and the features of grid column j: of the
residual stream (B / q, T, D / q), of attention the heads of grid column j, of the logits their part of the vocabulary.
So attention, activations and residuals need no communication; products (summa.py), norms (norms.py), the embedding
(tokens.py) and the loss do. In 2.5D each of d layers of the grid has its own sequences, (B / (d q), T, D / q), and the
same weights.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from training.experimental.grids.norms import GridLayerNorm, GridRMSNorm
from training.experimental.grids.summa import Grid, summa
from training.experimental.grids.tokens import GridTokens
from training.kernels.cross_entropy import logits_cross_entropy, logits_losses
from training.model.attention import Attention
from training.model.decoder import Decoder
from training.model.dropout import Dropout
from training.model.embedding import Head, TokenEmbedding
from training.model.layers import LayerNorm, Linear, RMSNorm
from training.model.positions import Alibi
from training.parallel.tensor.tensor_parallel import ShardedAlibi, ShardedDropout, cut_parameters
from training.sharding.axis import Axis
from training.sharding.shard_spec import ShardSpec


def apply_grid(part: Decoder, pieces: Mapping[str, ShardSpec], grid: Grid) -> None:
    """Replace the modules of a decoder, or a pipeline stage of one, that is on the meta device; in place.

    `pieces`: those of the placement table, by the names of the part's parameters.
    """
    replace_modules(part, pieces, lambda name, module: on_grid(name, module, pieces, grid), grid.column)


def replace_modules(
    part: Decoder, pieces: Mapping[str, ShardSpec], find: Callable[[str, nn.Module], nn.Module | None], heads: Axis
) -> None:
    """Cut the parameters of a part into `pieces`, and put what `find` finds in place of its modules; in place.

    `heads`: the axis that divides them.
    """
    cut_parameters(part, pieces)
    for name, module in list(part.named_modules()):
        if not name.endswith(("q_norm", "k_norm")):  # of each head, which is not divided
            other = find(name, module)
            if other is not None:
                part.set_submodule(name, other)
    for module in part.modules():
        if isinstance(module, Attention):
            module.dropout = ShardedDropout(module.dropout, heads)


def on_grid(name: str, module: nn.Module, pieces: Mapping[str, ShardSpec], grid: Grid) -> nn.Module | None:
    """Return the module that computes this rank's part of another; None for one that stays as it is."""
    match module:
        case Head():
            return GridHead(module, grid, grid.column, pieces[f"{name}.weight"].offset[0])
        case Linear():
            return GridLinear(module, grid)
        case TokenEmbedding():
            return GridTokens(module, grid, pieces[f"{name}.weight"].offset[0])
        case RMSNorm():
            return GridRMSNorm(module, grid.column)
        case LayerNorm():
            return GridLayerNorm(module, grid.column)
        case Dropout() if not name.endswith("attention.dropout"):
            return GridDropout(module, grid.column)
        case Alibi():
            return ShardedAlibi(module, grid.column)
        case _:
            return None


class GridLinear(Linear):
    """Linear layer from the features of this rank's grid column to its outputs, (..., h / q) to (..., h' / q)."""

    def __init__(self, full: Linear, grid: Grid) -> None:
        nn.Module.__init__(self)
        self.weight = full.weight
        self.bias = full.bias
        self.grid = grid

    def product(self, x: Tensor, *weights: Tensor) -> Tensor:
        """X W^T of the blocks of all ranks, for matrices that are one below the other."""
        return summa(x, self.grid, *weights)

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x, self.weight)
        return y if self.bias is None else y + self.bias

    def fused_with(self, x: Tensor, *others: nn.Linear) -> Sequence[Tensor]:
        """Return one product for all of them, which sends `x` once."""
        layers = (self, *others)
        outputs = self.product(x, *(layer.weight for layer in layers))
        parts = outputs.split([len(layer.weight) for layer in layers], -1)
        return [y if layer.bias is None else y + layer.bias for y, layer in zip(parts, layers, strict=True)]


class GridHead(Head):
    """Output matrix: the logits of this rank's sequences and part of the vocabulary, and the loss of its sequences.

    Unlike one device's it has all of them in memory at once: in chunks of tokens the matrix were broadcast for each.
    """

    def __init__(self, full: Head, grid: Grid, axis: Axis, first: int) -> None:
        """`axis` divides the vocabulary; `first`: this rank's first id."""
        nn.Module.__init__(self)
        self.weight = full.weight
        self.grid = grid
        self.axis = axis
        self.first = first
        self.register_parameter("bias", None)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of this rank's part of the vocabulary, (B, T, V / q)."""
        return summa(x, self.grid, self.weight)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the loss, the same on each rank along `axis`: it sums over the vocabulary."""
        logits = self.logits(x)
        group = self.axis.group
        if not self.training:
            return logits_losses(logits, targets, self.first, group)
        return logits_cross_entropy(logits, targets, self.first, group, self.z_loss)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        return self.logits(x) if targets is None else self.loss(x, targets)


class GridDropout(Dropout):
    """Dropout of this rank's features (B, T, D / q): what one process drops of them."""

    def __init__(self, full: Dropout, axis: Axis) -> None:
        nn.Module.__init__(self)
        self.p = full.p
        self.key = full.key
        self.axis = axis

    def index(self, x: Tensor) -> Tensor:
        _, tokens, features = x.shape
        mine = torch.arange(features, device=x.device) + self.axis.rank * features
        return torch.arange(tokens, device=x.device)[:, None] * features * self.axis.size + mine
