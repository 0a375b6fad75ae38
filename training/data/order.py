"""Order of the sequences in an epoch: a permutation that is computed index by index, never held in memory."""

import math

import torch
from torch import Tensor

from training.data.data_config import OrderKind
from training.kernels.keyed_random import key_from_name, splitmix64

_ROUNDS = 12  # with 8, permutations of ten or fewer sequences are not yet equally likely


class EpochOrder:
    """The order in which the epochs visit `size` sequences; a function of the seed, the epoch and the position."""

    def __init__(self, kind: OrderKind, size: int, seed: int, name: str = "") -> None:
        """`name` of the data set, of several with a `keyed` order each."""
        self.kind, self.size, self.seed, self.name = kind, size, seed, name
        self._shuffled = (-1, torch.empty(0, dtype=torch.int64))  # epoch, its whole order: of `randperm` only

    def at(self, epoch: int, positions: Tensor) -> Tensor:
        """The sequences at `positions` (int64, 0 … size - 1) of an epoch: int64 of the same shape."""
        if self.kind == "keyed":
            return permute(positions, self.size, key_from_name(f"{self.seed}/order/{self.name}{epoch}"))
        if self._shuffled[0] != epoch:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            self._shuffled = epoch, torch.randperm(self.size, generator=generator)
        return self._shuffled[1][positions]


def permute(index: Tensor, size: int, key: int) -> Tensor:
    """Where a keyed permutation of 0 … size - 1 sends each `index` (int64): int64 of the same shape.

    A Feistel network on the smallest grid of about square shape that holds `size` cells; an image beyond `size` is
    sent on until it is inside (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002: the generalised
    Feistel construction and cycle walking). Fewer than one index in sqrt(size) needs that.
    """
    rows = math.isqrt(max(size - 1, 0)) + 1
    columns = -(-size // rows)
    image = _permute_grid(index, rows, columns, key)
    while (beyond := image >= size).any():
        image[beyond] = _permute_grid(image[beyond], rows, columns, key)
    return image


def _permute_grid(index: Tensor, rows: int, columns: int, key: int) -> Tensor:
    """Permute 0 … rows * columns - 1: row and column in turns are rotated by a hash of the other."""
    row, column = index // columns, index % columns
    for turn in range(_ROUNDS):
        counter = turn << 32  # rows and columns are below 2**32
        if turn % 2:
            column = (column + splitmix64(row + counter, key) % columns) % columns
        else:
            row = (row + splitmix64(column + counter, key) % rows) % rows
    return row * columns + column
