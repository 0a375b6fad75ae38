"""Order: which sequence comes next at any point of a run, of one data set or of a mix of several by weights."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gristmill.config import INT64
from gristmill.wording import count_of
from training.data.data_config import OrderKind
from training.data.packing import PackedSequences
from training.data.sequences import DataSet, Indices, Sequences, TokenSequences
from training.kernels.keyed_random import key_from_name, splitmix64

_ROUNDS = 12  # with 8, permutations of ten or fewer sequences are not yet equally likely


class EpochOrder:
    """The order in which the epochs visit `size` sequences; a function of the seed, the epoch and the position."""

    def __init__(self, kind: OrderKind, size: int, seed: int, name: str = "") -> None:
        """`name` of the data set, of several with a `keyed` order each."""
        self.kind = kind
        self.size = size
        self.seed = seed
        self.name = name
        self._shuffled = (-1, torch.empty(0, dtype=torch.int64))  # epoch, its whole order: of `randperm` only

    def at(self, epoch: int, positions: Tensor) -> Tensor:
        """Return the sequences at `positions` (int64, 0 … size - 1) of an epoch: int64 of the same shape."""
        if self.kind == "keyed":
            return permute(positions, self.size, key_from_name(f"{self.seed}/order/{self.name}{epoch}"))
        if self._shuffled[0] != epoch:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            self._shuffled = epoch, torch.randperm(self.size, generator=generator)
        return self._shuffled[1][positions]

    def place(self, before: int, read: int) -> "SetPlace":
        """Return the record of this order, of which so many sequences were read before the run's mix, and until now."""
        return SetPlace(self.name, before, read, self.seed, self.kind)

    def resume(self, place: "SetPlace") -> None:
        """Become the order in which a set was read so far."""
        self.name = place.order
        self.kind = place.kind
        if place.seed is not None:
            self.seed = place.seed


def permute(index: Tensor, size: int, key: int) -> Tensor:
    """Return where a keyed permutation of 0 … size - 1 sends each `index` (int64): int64 of the same shape.

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
    row = index // columns
    column = index % columns
    for turn in range(_ROUNDS):
        counter = turn << 32  # rows and columns are below 2**32
        if turn % 2:
            column = (column + splitmix64(row + counter, key) % columns) % columns
        else:
            row = (row + splitmix64(column + counter, key) % rows) % rows
    return row * columns + column


_MOST_PARTS = 1 << 30  # of the whole, in which a share is counted: products with it fit 64 bits


@dataclass(frozen=True)
class TokenMix:
    """Data sets of one tokenizer and one T, by `weights` in any unit: their shares of the tokens that a run reads."""

    parts: tuple[TokenSequences, ...]
    weights: tuple[float, ...]

    @classmethod
    def of(cls, parts: Sequence[TokenSequences], weights: Sequence[float]) -> "TokenMix":
        """Mix by `weights`, one each; none: by the sets' tokens."""
        return cls(tuple(parts), tuple(weights or [part.tokens for part in parts]))

    @property
    def shares(self) -> list[float]:
        """Return the shares of the tokens, which add up to 1."""
        total = sum(self.weights)
        return [weight / total for weight in self.weights]

    @property
    def first(self) -> TokenSequences:
        """Return the first data set, whose tokenizer is that of all."""
        return self.parts[0]

    @property
    def tokens(self) -> int:
        """Return the tokens of all data sets."""
        return sum(part.tokens for part in self.parts)

    def sequences(self, seed: int, packed_in: Path | None = None) -> "tuple[Sequences, MixOrder | None]":
        """Return a run's sequences and the order of several sets; each is packed if `packed_in` keeps the plans."""
        if packed_in is None:
            if len(self.parts) == 1:
                return self.first, None
            sizes = [len(part) for part in self.parts]
            return MixedSequences(self.parts), MixOrder(sizes, self.weights, seed)
        packed = [PackedSequences(part, packed_in) for part in self.parts]
        if len(packed) == 1:
            return packed[0], None
        # weights are of tokens, of which rows with more padding have fewer
        weights = []
        for weight, part in zip(self.weights, packed, strict=True):
            weights.append(weight * len(part) / part.all_targets)
        return MixedSequences(packed), MixOrder([len(part) for part in packed], weights, seed)

    def describe(self, steps_per_epoch: int) -> str:
        """Return the tokens, and how often they are read, in a few words."""
        tokens = count_of(self.tokens, "token")
        if len(self.parts) > 1:
            return f"{tokens} in {len(self.parts)} data sets"
        return f"{tokens}, {count_of(steps_per_epoch, 'step')} per epoch"

    def lines(self, read: Sequences, order: "MixOrder | None", first: int, last: int) -> list[str]:
        """Return a line for each of several sets: its share, and how often sequences `first` … `last` read it.

        `read` and `order` are those of `sequences`; what `read` says of itself follows.
        """
        if order is None:
            return read.notes()
        counts = order.counts_between(first, last)
        lines = []
        for part, rows, share, count in zip(self.parts, read.sets, self.shares, counts, strict=True):
            repeats = ", so some are repeated" if count > len(rows) else ""
            lines.append(
                f"    {share:.2%} of {part.folder}: {count * part.length:,} of its {part.tokens:,} tokens, "
                f"{count / len(rows):.2f} epochs{repeats}"
            )
        return [*lines, *read.notes()]


class MixedSequences(Sequences):
    """The sequences of several data sets as those of one: first all of the first set, then of the next."""

    def __init__(self, sets: Sequence[DataSet]) -> None:
        self._sets = sets
        self.folder = sets[0].folder
        self.length = sets[0].length
        self.has_ignored = any(part.has_ignored for part in sets)
        self.starts = np.cumsum([0] + [len(part) for part in sets], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def sets(self) -> Sequence[DataSet]:
        return self._sets

    def notes(self) -> list[str]:
        return [f"{part.folder}: {line}" for part in self.sets for line in part.notes()]

    def batch(self, indices: Indices) -> Tensor:
        return self._gather(indices, self.length + 1, lambda part, rows: part.batch(rows))

    def targets(self, indices: Indices, tokens: Tensor) -> Tensor:
        out = torch.empty(len(indices), self.length, dtype=torch.int64)
        for number, places, rows in self.by_set(indices):
            at = torch.from_numpy(places)
            out[at] = self.sets[number].targets(rows, tokens[at])
        return out

    def positions(self, indices: Indices) -> Tensor:
        return self._gather(indices, self.length, lambda part, rows: part.positions(rows))

    def target_count(self, indices: Indices) -> int:
        return sum(self.sets[number].target_count(rows) for number, _, rows in self.by_set(indices))

    def set_of(self, indices: Indices) -> NDArray[np.int64]:
        """Return the number of the set of each of the sequences `indices`: (len(indices),)."""
        return np.searchsorted(self.starts, indices, side="right") - 1

    def by_set(self, indices: Indices) -> list[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
        """Return, for each set that has some of the sequences, its number, their places and their numbers in it."""
        indices = np.asarray(indices, np.int64)
        set_numbers = self.set_of(indices)
        by_set = []
        for number in np.unique(set_numbers).tolist():
            places = np.flatnonzero(set_numbers == number)
            by_set.append((number, places, indices[places] - self.starts[number]))
        return by_set

    def _gather(self, indices: Indices, width: int, read: Callable[[DataSet, NDArray[np.int64]], Tensor]) -> Tensor:
        """Call `read` for each set with its sequences among `indices`, and gather: (len(indices), width) int64."""
        out = torch.empty(len(indices), width, dtype=torch.int64)
        for number, places, rows in self.by_set(indices):
            out[torch.from_numpy(places)] = read(self.sets[number], rows)
        return out


Count = Annotated[int, msgspec.Meta(ge=0, le=INT64)]


class SetPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far a run has read a data set: the name of its order, and its sequences before this mix and until now.

    `seed` and `kind` of the order: those that the set was first read with. Earlier releases have no seed here.
    """

    order: str
    before: Count
    read: Count
    seed: int | None = None
    kind: OrderKind = "keyed"


class MixPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far a run, and those that it is a branch of, have read data sets, by fingerprint of their manifests.

    The run's own set or mix began at `step`, a mix at place `start` of its order. Earlier releases name the sets by
    their folders, in the order of data.train, and have no `step`.
    """

    start: Count = 0
    sets: dict[str, SetPlace] = {}
    step: Count = 0

    def of_run(self, reads: Mapping[str, Any]) -> "MixPlace":
        """Name the sets of an earlier release by their fingerprints, which `reads`, options of its run, has."""
        if all(place.seed is not None for place in self.sets.values()):
            return self
        trained_on = reads["data.train"]
        names = [trained_on] if isinstance(trained_on, str) else trained_on
        seed = reads["seed"]
        kind = reads["data.order"]
        places = [msgspec.structs.replace(place, seed=seed, kind=kind) for place in self.sets.values()]
        return msgspec.structs.replace(self, sets=dict(zip(names, places, strict=False)))


class SetPositions(NamedTuple):
    """Where in the data sets each of n places of a run lies, (n,) int64 each."""

    part: Tensor
    """The data set."""
    number: Tensor
    """How many sequences of that set came before, over all its epochs."""


class MixOrder:
    """The order in which a run visits the sequences of several data sets: a function of the seed and the place.

    After p sequences, about p times its share are of each set, off by less than one for each set before it: the first
    set takes its share of the places, evenly spread, the second its share of what remains, and so on. Each set is
    visited epoch by epoch, every sequence once in each, in the order of `EpochOrder`. A mix that takes over from
    another one begins at place `start`, after `before` sequences of each set.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int) -> None:
        """`sizes`: sequences of each set; `weights`: their shares of the run, in any unit."""
        self.sizes = sizes
        self.starts = np.cumsum([0, *sizes], dtype=np.int64)
        self.start = 0
        self.before = [0] * len(sizes)
        self.orders = [EpochOrder("keyed", size, seed, f"{number}/") for number, size in enumerate(sizes)]
        exact = [Fraction(repr(weight)) for weight in weights]
        self._of_rest = []  # a set's share of what the sets before it leave, as numerator and denominator
        for number, weight in enumerate(exact):
            share = weight / sum(exact[number:])
            self._of_rest.append(share.limit_denominator(_MOST_PARTS).as_integer_ratio())

    def progress(self, place: int) -> list[SetPlace]:
        """Return how far a run has read each of the sets at a place."""
        read = self.counts(torch.tensor([place]))[:, 0].tolist()
        places = []
        for order, before, until_now in zip(self.orders, self.before, read, strict=True):
            places.append(order.place(before, until_now))
        return places

    def resume(self, names: Sequence[str], progress: MixPlace, place: int | None = None) -> None:
        """Go on with the mix of a checkpoint, or take over from it at `place`: sets that it read go on as they are.

        `names`: the fingerprints of the sets.
        """
        self.start = progress.start if place is None else place
        for number, name in enumerate(names):
            known = progress.sets.get(name)
            if known is not None:
                self.before[number] = known.before if place is None else known.read
                self.orders[number].resume(known)

    def counts(self, places: Tensor) -> Tensor:
        """Return how many sequences of each set a run has read at `places` (n,) int64: (sets, n) int64."""
        counts = []
        rest = places - self.start
        for part, whole in self._of_rest:
            turns = rest // whole
            over = rest % whole
            count = turns * part + (2 * over * part + whole) // (2 * whole)  # rounded
            counts.append(count)
            rest = rest - count
        return torch.stack(counts) + torch.tensor(self.before)[:, None]

    def counts_between(self, first: int, last: int) -> list[int]:
        """Return how many of the sequences `first` … `last` of the run are of each set."""
        return self.counts(torch.tensor([first, last])).diff()[:, 0].tolist()

    def place(self, places: Tensor) -> SetPositions:
        """Return the data set, and the number in it, of the sequences at `places` (n,) int64 of the run, from 0."""
        before = self.counts(places)
        part = (self.counts(places + 1) - before).argmax(0)
        return SetPositions(part, before.gather(0, part[None])[0])

    def at(self, places: Tensor) -> Tensor:
        """Return the sequences at `places` (n,) int64 of the run, as `MixedSequences` counts them: (n,) int64."""
        positions = self.place(places)
        sequences = torch.empty_like(places)
        for number, (size, order) in enumerate(zip(self.sizes, self.orders, strict=True)):
            is_of_set = positions.part == number
            epochs = positions.number // size
            for epoch in epochs[is_of_set].unique().tolist():
                rows = is_of_set & (epochs == epoch)
                sequences[rows] = order.at(epoch, positions.number[rows] % size) + int(self.starts[number])
        return sequences
