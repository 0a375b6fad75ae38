"""Similarity of a document to those kept before it in its cluster: exact on shingle sets, estimated on signatures.

For shingle sets A (the later document) and B (kept before it):

    jaccard      |A ∩ B| / |A ∪ B|
    containment  |A ∩ B| / |A|, the share of the later document's shingles that the kept one has

A document shorter than a shingle is compared as a whole: it is similar to its copies alone. Documents of an index have
no texts: their Jaccard similarity is estimated as the share of equal slots of two signatures.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from numbers import Real
from typing import Literal, NamedTuple, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from dedup.minhash.matching_form import Unit
from dedup.minhash.signatures import Sketch
from gristmill.errors import UsageError
from gristmill.kernels import kernel

Measure = Literal["jaccard", "containment"]
Signature = NDArray[np.uint32]  # permutations
Shingles = NDArray[np.uint64]  # hashes, ascending, each once
PARITY_WORDS = 128  # of 64 bits: enough for documents of some ten thousand shingles
_SHIFT = np.uint64(64 - 13)  # 2^13 bits
_BLOCK = 16  # words compared before a look at how many bits differ
_OVERHEAD = 256 + 8 * PARITY_WORDS  # bytes that a kept set takes besides its shingles
Item = TypeVar("Item")


@dataclass(frozen=True)
class SimilarityCheck:
    """The options of --verify. UsageError if they contradict each other.

    A document is removed if its similarity by `measure` to an earlier kept one reaches `threshold`.
    `sketch` is given where documents of an index, made with it, are in clusters too.
    """

    measure: Measure
    threshold: float
    width: int
    unit: Unit
    sketch: Sketch | None = None

    def __post_init__(self) -> None:
        if self.measure not in get_args(Measure):
            raise UsageError(f"verify {self.measure!r}: expected {' or '.join(get_args(Measure))}")
        if not isinstance(self.threshold, Real) or not 0 < self.threshold <= 1:
            raise UsageError(f"--threshold {self.threshold}: expected a similarity above 0 and up to 1, such as 0.8")
        if not 1 <= self.width <= 65_535:
            raise UsageError(f"--width {self.width}: expected shingles of 1 to 65,535 {self.unit}s")
        if self.sketch and (self.sketch.width, self.sketch.unit) != (self.width, self.unit):
            raise UsageError(
                f"--width {self.width} --unit {self.unit}: the signatures of --index have "
                f"{self.sketch.width}-{self.sketch.unit} shingles; expected --width {self.sketch.width} --unit "
                f"{self.sketch.unit}"
            )
        if self.sketch and self.measure != "jaccard":
            raise UsageError(
                f"--verify {self.measure}: signatures of an index only estimate Jaccard: give --verify jaccard"
            )


class Features(NamedTuple):
    """The features of a document that similarity is computed from."""

    shingles: Shingles | None  # None for a document of an index
    signature: Signature | None = None  # None unless the cluster has documents of an index


class KeptDocuments:
    """The features of documents kept in one cluster so far, in keep order, within `memory` bytes; None: no limit.

    Documents of an index come first, by their signatures; then those of the corpus, by their shingles.
    """

    def __init__(self, check: SimilarityCheck, memory: int | None = None) -> None:
        half = np.iinfo(np.int64).max if memory is None else memory // 2
        permutations = check.sketch.permutations if check.sketch else 1
        self.of_indexes = _KeptSignatures(check.threshold, permutations, half)
        self.of_corpus = KeptSets(check.measure == "containment", check.threshold, half)

    def clear(self) -> None:
        self.of_indexes.clear()
        self.of_corpus.clear()

    def first_match(self, features: Features) -> tuple[int, float]:
        """Return the number of the first kept document that is similar enough, and the similarity; else (-1, 0.0)."""
        if features.shingles is None:
            return -1, 0.0
        if features.signature is not None:
            number, similarity = self.of_indexes.first_match(features.signature)
            if number >= 0:
                return number, similarity
        if self.of_indexes.is_full:
            return -1, 0.0
        number, similarity = self.of_corpus.first_match(features.shingles)
        if number >= 0:
            number += self.of_indexes.count
        return number, similarity

    def add(self, features: Features) -> bool:
        """Add a kept document. False if there is no room; then there is none until `clear`, even for a smaller one."""
        if features.shingles is None:
            assert features.signature is not None
            return self.of_indexes.add(features.signature)
        return not self.of_indexes.is_full and self.of_corpus.add(features.shingles)


class _KeptSignatures:
    """Signatures as an array (kept × permutations) that grows up to `memory` bytes; the first always fits."""

    def __init__(self, threshold: float, permutations: int, memory: int) -> None:
        self.threshold = threshold
        self.capacity = max(1, memory // (4 * permutations))
        self.values = np.empty((1, permutations), np.uint32)
        self.count = 0
        self.is_full = False

    def clear(self) -> None:
        self.count = 0
        self.is_full = False

    def first_match(self, signature: Signature) -> tuple[int, float]:
        similarity = np.mean(self.values[: self.count] == signature, axis=1)
        (matches,) = np.nonzero(similarity >= self.threshold)
        if not len(matches):
            return -1, 0.0
        return int(matches[0]), float(similarity[matches[0]])

    def add(self, signature: Signature) -> bool:
        self.is_full |= self.count == self.capacity
        if self.is_full:
            return False
        if self.count == len(self.values):
            self.values = np.concatenate([self.values, np.empty_like(self.values)])[: self.capacity]
        self.values[self.count] = signature
        self.count += 1
        return True


class KeptSets:
    """Shingle sets, one after another in a flat array that grows up to `memory` bytes; the first always fits.

    Each has a row of parity bits, too: one for all shingles that begin with the same 13 bits, 1 if their number is odd.
    Two sets differ in at least as many shingles as their rows do in bits, so most that are not alike need not be
    compared. (The bitmap filter of Sandes, Teodoro and Melo, 2020, for exact set similarity joins.)
    """

    def __init__(self, is_containment: bool, threshold: float, memory: int) -> None:
        self.is_containment = is_containment
        self.threshold = threshold
        self.capacity = memory // 8
        self.flat = np.empty(0, np.uint64)
        self.starts = np.zeros(16, np.int64)
        self.parities = np.zeros((16, PARITY_WORDS), np.uint64)
        self.count = 0
        self.is_full = False

    def clear(self) -> None:
        self.count = 0
        self.is_full = False

    def first_match(self, shingles: Shingles) -> tuple[int, float]:
        """Return the number of the first set that is similar enough, and the similarity; (-1, 0.0) if none is."""
        return _first_match(
            shingles,
            parity_of(shingles),
            self.flat,
            self.starts,
            self.parities,
            self.count,
            self.is_containment,
            self.threshold,
        )

    def add(self, shingles: Shingles) -> bool:
        """Add a set. False if there is no room; then there is none until `clear`, even for a smaller one."""
        start = int(self.starts[self.count])
        end = start + len(shingles)
        self.is_full |= self.count > 0 and end + (self.count + 1) * (_OVERHEAD // 8) > self.capacity
        if self.is_full:
            return False
        if end > len(self.flat):
            room = max(end, min(2 * end, self.capacity))
            self.flat = np.concatenate([self.flat[:start], np.empty(room - start, np.uint64)])
        if self.count + 2 > len(self.starts):
            self.starts = np.concatenate([self.starts, np.zeros_like(self.starts)])
        if self.count == len(self.parities):
            more = np.empty((max(16, self.count // 4), PARITY_WORDS), np.uint64)  # twice as many might not fit
            self.parities = np.concatenate([self.parities, more])
        self.flat[start:end] = shingles
        self.parities[self.count] = parity_of(shingles)
        self.count += 1
        self.starts[self.count] = end
        return True


def decide_cluster(
    members: Iterable[tuple[Item, Features]], kept: KeptDocuments
) -> Iterator[tuple[Item, Item | None, float]]:
    """Yield for each document of a cluster, in keep order: the document, its kept document, their similarity.

    The kept document is the first one kept before it that is similar enough. If there is none, the document is
    kept: it is yielded as its own kept document, with similarity 1.0.

    If `kept` is full, a document that is similar to none in it is undecided: its kept document is None. The caller
    then clears `kept` and passes the undecided documents again. This gives the same result as unlimited memory:
    they have been compared with all documents kept so far, and those precede all that later rounds keep.
    """
    documents: list[Item] = []
    for item, features in members:
        number, similarity = kept.first_match(features)
        if number >= 0:
            yield item, documents[number], similarity
        elif kept.add(features):
            documents.append(item)
            yield item, item, 1.0
        else:
            yield item, None, 0.0


@kernel
def parity_of(shingles: np.ndarray) -> np.ndarray:
    """Return the parity bits of a set, PARITY_WORDS words (uint64)."""
    parity = np.zeros(PARITY_WORDS, np.uint64)
    for shingle in shingles:
        bit = shingle >> _SHIFT
        parity[np.uintp(bit >> np.uint64(6))] ^= np.uint64(1) << (bit & np.uint64(63))
    return parity


@kernel
def _first_match(
    one: np.ndarray, parity: np.ndarray, flat: np.ndarray, starts: np.ndarray, parities: np.ndarray, count: int,
    is_containment: bool, threshold: float,
) -> tuple[int, float]:  # fmt: skip
    """Return number and similarity of the first of `count` sets, flat[starts[i] : starts[i + 1]], similar to `one`."""
    for number in range(count):
        other = flat[starts[number] : starts[number + 1]]
        needed = fewest_shared(len(one), len(other), is_containment, threshold)
        if needed <= min(len(one), len(other)):  # otherwise their sizes differ too much
            max_differing = len(one) + len(other) - 2 * needed  # shingles in one of them alone
            if _differ_more(parity, parities[number], max_differing):
                continue
            shared = count_shared(one, other, needed)
            if shared >= needed:
                return number, shared / (len(one) if is_containment else len(one) + len(other) - shared)
    return -1, 0.0


@kernel
def fewest_shared(one: int, other: int, is_containment: bool, threshold: float) -> int:
    """Return the minimum number of shared shingles with which two sets of these sizes reach the threshold, in float64.

    It exceeds the smaller size if they cannot reach it.
    """
    min_shared = threshold * one if is_containment else threshold * (one + other) / (1 + threshold)
    needed = max(1, int(min_shared) - 1)  # rounding errors of `min_shared` are below 1; the loop finds the exact number
    max_shared = min(one, other)
    while needed <= max_shared and needed / (one if is_containment else one + other - needed) < threshold:
        needed += 1
    return needed


@kernel
def count_shared(one: np.ndarray, other: np.ndarray, needed: int) -> int:
    """Return the number of values that two ascending arrays share, or -1 as soon as `needed` are out of reach."""
    i = np.uintp(0)
    j = np.uintp(0)
    shared = np.uintp(0)
    spare_one = np.uintp(len(one) - needed)
    spare_other = np.uintp(len(other) - needed)
    while i < len(one) and j < len(other):
        a = one[i]
        b = other[j]
        shared += np.uintp(a == b)  # additions in place of branches, which would be mispredicted
        i += np.uintp(a <= b)
        j += np.uintp(b <= a)
        if i - shared > spare_one or j - shared > spare_other:
            return -1
    return int(shared)


@kernel
def _differ_more(one: np.ndarray, other: np.ndarray, max_differing: int) -> bool:
    """Return whether more than `max_differing` parity bits differ, and so more shingles of the sets."""
    differing = np.uint64(0)
    for start in range(0, PARITY_WORDS, _BLOCK):
        for i in range(start, start + _BLOCK):
            bits = one[i] ^ other[i]  # how many are 1, by adding neighbours (Warren, Hacker's Delight, 5-1)
            bits -= (bits >> np.uint64(1)) & np.uint64(0x5555555555555555)
            bits = (bits & np.uint64(0x3333333333333333)) + ((bits >> np.uint64(2)) & np.uint64(0x3333333333333333))
            bits = (bits + (bits >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
            differing += (bits * np.uint64(0x0101010101010101)) >> np.uint64(56)
        if differing > np.uint64(max_differing):
            return True
    return False
