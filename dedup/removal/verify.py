"""Verified removal: within a cluster, a document goes for the first kept one that it really resembles.

The similarity of two documents with shingle sets A (the later one) and B (kept before it):

    jaccard      |A ∩ B| / |A ∪ B|
    containment  |A ∩ B| / |A|, the share of the later document's shingles that the kept one has

A document without a shingle resembles none.
"""

from collections.abc import Iterable, Iterator
from typing import Literal, Protocol, TypeVar, get_args

import numba as nb
import numpy as np
from numpy.typing import NDArray

from gristmill.errors import UsageError

Measure = Literal["jaccard", "containment"]
Shingles = NDArray[np.uint64]  # sorted, each once
Signature = NDArray[np.uint32]
_OVERHEAD = 32  # 64-bit words that a kept set takes beside its shingles
Item = TypeVar("Item")
Evidence = TypeVar("Evidence", contravariant=True)


def check_measure(measure: str, threshold: float) -> None:
    """UsageError unless there is such a measure and the threshold is a similarity."""
    if measure not in get_args(Measure):
        raise UsageError(f"verify {measure!r}: wanted {' or '.join(get_args(Measure))}")
    if not 0 < threshold <= 1:
        raise UsageError(f"--threshold {threshold}: wanted a similarity above 0, and 1 at most, such as 0.8")


class Kept(Protocol[Evidence]):
    """What is known of the documents kept in one cluster, in keep order."""

    def clear(self) -> None: ...

    def first_match(self, evidence: Evidence) -> tuple[int, float]:
        """The number of the first kept one that is similar enough, and how similar; (-1, 0.0) if none is."""

    def add(self, evidence: Evidence) -> bool:
        """Take one more; False if there is no room for it, and then for none until `clear`, small as it may be."""


class KeptSets:
    """The shingle sets of documents kept in one cluster, in keep order, within `room` bytes."""

    def __init__(self, measure: Measure, threshold: float, room: int | None = None) -> None:
        self.is_containment, self.threshold = measure == "containment", threshold
        self.room = np.iinfo(np.int64).max if room is None else room // 8
        self.flat = np.empty(0, np.uint64)
        self.starts = np.zeros(16, np.int64)
        self.count = 0
        self.is_full = False

    def clear(self) -> None:
        self.count, self.is_full = 0, False

    def first_match(self, shingles: Shingles) -> tuple[int, float]:
        return _first_match(shingles, self.flat, self.starts, self.count, self.is_containment, self.threshold)

    def add(self, shingles: Shingles) -> bool:
        end = int(self.starts[self.count])
        size = end + len(shingles)
        self.is_full |= self.count > 0 and size + (self.count + 1) * _OVERHEAD > self.room
        if self.is_full:
            return False
        if size > len(self.flat):
            self.flat = np.concatenate(
                [self.flat[:end], np.empty(max(size, min(2 * size, self.room)) - end, np.uint64)]
            )
        if self.count + 2 > len(self.starts):
            self.starts = np.concatenate([self.starts, np.zeros_like(self.starts)])
        self.flat[end:size] = shingles
        self.count += 1
        self.starts[self.count] = size
        return True


class KeptSignatures:
    """The signatures of documents kept in one cluster, within `room` bytes: similarity is the share of equal slots."""

    def __init__(self, threshold: float, permutations: int, room: int) -> None:
        self.threshold = threshold
        self.most = max(1, room // (4 * permutations))
        self.values = np.empty((1, permutations), np.uint32)
        self.count = 0
        self.is_full = False

    def clear(self) -> None:
        self.count, self.is_full = 0, False

    def first_match(self, signature: Signature) -> tuple[int, float]:
        similar = np.mean(self.values[: self.count] == signature, axis=1)
        (matches,) = np.nonzero(similar >= self.threshold)
        return (int(matches[0]), float(similar[matches[0]])) if len(matches) else (-1, 0.0)

    def add(self, signature: Signature) -> bool:
        self.is_full |= self.count == self.most
        if self.is_full:
            return False
        if self.count == len(self.values):
            self.values = np.concatenate([self.values, np.empty_like(self.values)])[: self.most]
        self.values[self.count] = signature
        self.count += 1
        return True


def judge(members: Iterable[tuple[Item, Evidence]], kept: Kept[Evidence]) -> Iterator[tuple[Item, Item | None, float]]:
    """For each document of a cluster, given in keep order: itself, the one kept in its place, and their similarity.

    That is the first document before it that was kept and reaches the threshold; itself, with 1.0, where
    there is none. So what only a chain of others joins stays. None stands for undecided: it matches none
    of those in `kept`, which has no room for it. Judging the undecided again, in the same order, against
    cleared sets gives what one round with room for all would give: a document is undecided only after
    all that stand in `kept` were tried, and those all come before any kept in a later round.
    """
    standing: list[Item] = []
    for item, evidence in members:
        number, similarity = kept.first_match(evidence)
        if number >= 0:
            yield item, standing[number], similarity
        elif kept.add(evidence):
            standing.append(item)
            yield item, item, 1.0
        else:
            yield item, None, 0.0


@nb.njit(nogil=True, cache=True)
def _first_match(
    one: np.ndarray, flat: np.ndarray, starts: np.ndarray, count: int, is_containment: bool, threshold: float
) -> tuple[int, float]:
    for number in range(count):
        other = flat[starts[number] : starts[number + 1]]
        wanted = _wanted(len(one), len(other), is_containment, threshold)
        if wanted <= min(len(one), len(other)):  # else they differ too much in size
            shared = _shared(one, other, wanted)
            if shared >= wanted:
                return number, shared / (len(one) if is_containment else len(one) + len(other) - shared)
    return -1, 0.0


@nb.njit(nogil=True, cache=True)
def _wanted(one: int, other: int, is_containment: bool, threshold: float) -> int:
    """The fewest shared shingles whose similarity, as floats are divided, reaches the threshold."""
    least = threshold * one if is_containment else threshold * (one + other) / (1 + threshold)
    wanted = max(1, int(least) - 1)
    most = min(one, other)
    while wanted <= most and wanted / (one if is_containment else one + other - wanted) < threshold:
        wanted += 1
    return wanted


@nb.njit(nogil=True, cache=True)
def _shared(one: np.ndarray, other: np.ndarray, wanted: int) -> int:
    """How many values two ascending arrays share; -1 as soon as that is sure to be fewer than `wanted`."""
    i, j, shared = np.uintp(0), np.uintp(0), np.uintp(0)
    spare_one, spare_other = np.uintp(len(one) - wanted), np.uintp(len(other) - wanted)
    while i < len(one) and j < len(other):
        a, b = one[i], other[j]
        shared += np.uintp(a == b)  # no branch to mispredict
        i += np.uintp(a <= b)
        j += np.uintp(b <= a)
        if i - shared > spare_one or j - shared > spare_other:
            return -1
    return int(shared)
