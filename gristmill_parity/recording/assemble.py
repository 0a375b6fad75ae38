"""Assemble: the pieces of a tensor put together: terms summed, copies kept apart."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gristmill_parity.recording.files import RankTensor, Recording, RecordingError
from gristmill_parity.recording.recorder import MICRO_BATCH

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Copy:
    """A box of a tensor as one rank has it, or several whose terms were summed."""

    held: tuple[RankTensor, ...]
    coordinates: tuple[tuple[str, int], ...]
    """Index along each axis of which the tensor is a copy."""

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(held.rank.rank for held in self.held))

    @property
    def rank(self) -> int:
        return self.held[0].rank.rank

    @property
    def index(self) -> list[Array]:
        """Return the global indices along each dimension."""
        return self.held[0].entry.piece.indices()

    @property
    def divisor(self) -> int:
        """Return what the sum of terms is divided by: where ranks have terms of a mean."""
        return mean_divisor(self.held)

    def values(self) -> Array:
        """Return the values of the box."""
        total = self.held[0].values()
        for held in self.held[1:]:
            total = total + held.values()
        return total / self.divisor if self.divisor > 1 else total

    def sketch(self) -> Array:
        """Return the sketch of the box."""
        total: Array = np.sum([held.entry.sketch for held in self.held], axis=0)
        return total / self.divisor


def mean_divisor(held: Sequence[RankTensor]) -> int:
    """Return the number of ranks along axes whose ranks have terms of a mean."""
    divisor = 1
    for axis, reduce in held[0].entry.piece.partial.items():
        if reduce == "mean":
            divisor *= held[0].rank.axes[axis][1]
    return divisor


def coordinate(held: RankTensor, axis: str) -> int:
    """Return the index of a tensor's rank along an axis."""
    return held.entry.call if axis == MICRO_BATCH else held.rank.axes[axis][0]


def copies_of(pieces: Sequence[RankTensor], recording: Recording) -> list[Copy]:
    """Return the copies of each box of a tensor. Raises RecordingError if terms of a sum are missing."""
    groups: dict[Any, dict[tuple[int, ...], list[RankTensor]]] = {}
    for held in pieces:
        piece = held.entry.piece
        replicated = tuple((axis, coordinate(held, axis)) for axis in piece.replicated)
        terms = groups.setdefault((piece.index, replicated), {})
        terms.setdefault(tuple(coordinate(held, axis) for axis in piece.partial), []).append(held)
    sizes = recording.axis_sizes
    copies = list[Copy]()
    for (_, replicated), terms in groups.items():
        first = next(iter(terms.values()))[0]
        partial = first.entry.piece.partial
        expected = int(np.prod([sizes[axis] for axis in partial if axis != MICRO_BATCH], dtype=np.int64))
        if len({key[: len(partial)] for key in terms}) % expected or len(terms) < expected:
            raise RecordingError(
                f"{first.entry.key} in step {first.entry.key.step} has {len(terms)} terms of a sum over "
                f"{' and '.join(partial)}; expected {expected}: some ranks did not record it, or are no terms"
            )
        # where several ranks have a term, each sum takes another one's; where one has it, all sums take that
        for number in range(max(map(len, terms.values()))):
            chosen = [same[min(number, len(same) - 1)] for same in terms.values()]
            copies.append(Copy(tuple(chosen), replicated))
    return copies


def check_cover(copies: Sequence[Copy], shape: tuple[int, ...], folder: Any) -> None:
    """Raise RecordingError unless the boxes of a tensor are all of a tensor of `shape`."""
    key = copies[0].held[0].entry.key
    own = copies[0].held[0].entry.piece.shape
    if own != shape:
        raise RecordingError(
            f"the pieces of {key} in {folder} make a tensor of {list(own)}, and the reference's has {list(shape)}; "
            "check its placement"
        )
    boxes = {copy.held[0].entry.piece.index: copy.held[0].entry.shape for copy in copies}
    covered = sum(int(np.prod(size, dtype=np.int64)) for size in boxes.values())
    total = int(np.prod(shape, dtype=np.int64))
    if covered != total:
        word = "cover" if covered < total else "overlap: they have"
        raise RecordingError(
            f"the pieces of {key} in {folder} {word} {covered:,} of {total:,} elements; check its placement"
        )


def views_of(copies: Sequence[Copy]) -> Iterator[tuple[tuple[tuple[str, int], ...], list[Copy]]]:
    """Yield the copies of all boxes by where they are along the axes of copies: each makes a whole tensor."""
    groups: dict[tuple[tuple[str, int], ...], list[Copy]] = {}
    for copy in copies:
        groups.setdefault(copy.coordinates, []).append(copy)
    yield from groups.items()


def whole(copies: Sequence[Copy], shape: tuple[int, ...], fill: Array | None = None) -> Array:
    """Return the tensor that copies of its boxes make; what is in none of them is that of `fill`."""
    assembled = np.zeros(shape) if fill is None else fill.copy()
    for copy in copies:
        put(assembled, copy.index, copy.values())
    return assembled


def put(target: Array, index: Sequence[Array], values: Array) -> None:
    """Write a box of a tensor, in place."""
    if index:
        target[np.ix_(*index)] = values
    else:
        target[...] = values


def take(source: Array, index: Sequence[Array]) -> Array:
    """Return a box of a tensor."""
    return source[np.ix_(*index)] if index else source


def subsets(axes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield every subset of some axes, the smaller ones first."""
    for count in range(len(axes) + 1):
        yield from itertools.combinations(axes, count)
