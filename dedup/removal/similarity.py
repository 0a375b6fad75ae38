"""Similarity of a document to those kept before it in its cluster: exact on shingle sets, estimated on signatures.

For shingle sets A (the later document) and B (kept before it):

    jaccard      |A ∩ B| / |A ∪ B|
    containment  |A ∩ B| / |A|, the share of the later document's shingles that the kept one has

A document without shingles is never similar to another. Documents of an index have no texts: their Jaccard
similarity is estimated as the share of equal slots of two signatures.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from dedup.minhash.matching_form import Unit
from dedup.minhash.shingles import shingle_sets
from dedup.minhash.signature_shards import OpenShard, list_shards, open_shard, reject_mixed_sketches, shards_named
from dedup.minhash.signatures import Sketch
from dedup.removal.kept_sets import KeptSets, Shingles
from gristmill.engine.executors.staging import local_copies
from gristmill.errors import InputError, UsageError
from gristmill.io.documents import DocKey
from gristmill.kernels import kernel
from gristmill.urls import is_remote

Measure = Literal["jaccard", "containment"]
Signature = NDArray[np.uint32]  # permutations
Similarities = NDArray[np.float32]  # members × members


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
            raise UsageError(f"verify {self.measure!r}: wanted {' or '.join(get_args(Measure))}")
        if not isinstance(self.threshold, Real) or not 0 < self.threshold <= 1:
            raise UsageError(f"--threshold {self.threshold}: wanted a similarity above 0 and up to 1, such as 0.8")
        if not 1 <= self.width <= 65_535:
            raise UsageError(f"--width {self.width}: wanted shingles of 1 to 65,535 {self.unit}s")
        if self.sketch and (self.sketch.width, self.sketch.unit) != (self.width, self.unit):
            raise UsageError(
                f"--width {self.width} --unit {self.unit}: the signatures of --index are of {self.sketch.width}-"
                f"{self.sketch.unit} shingles, so wanted --width {self.sketch.width} --unit {self.sketch.unit}"
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
        self.of_indexes = _KeptSignatures(check.threshold, check.sketch.permutations if check.sketch else 1, half)
        self.of_corpus = KeptSets(check.measure == "containment", check.threshold, half)

    def clear(self) -> None:
        self.of_indexes.clear()
        self.of_corpus.clear()

    def first_match(self, features: Features) -> tuple[int, float]:
        """The number of the first kept document that is similar enough, and the similarity; (-1, 0.0) if none is."""
        number, similarity = -1, 0.0
        if features.shingles is not None:
            if features.signature is not None:
                number, similarity = self.of_indexes.first_match(features.signature)
            if number < 0 and not self.of_indexes.is_full:
                number, similarity = self.of_corpus.first_match(features.shingles)
                number += self.of_indexes.count if number >= 0 else 0
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
        self.count, self.is_full = 0, False

    def first_match(self, signature: Signature) -> tuple[int, float]:
        similarity = np.mean(self.values[: self.count] == signature, axis=1)
        (matches,) = np.nonzero(similarity >= self.threshold)
        return (int(matches[0]), float(similarity[matches[0]])) if len(matches) else (-1, 0.0)

    def add(self, signature: Signature) -> bool:
        self.is_full |= self.count == self.capacity
        if self.is_full:
            return False
        if self.count == len(self.values):
            self.values = np.concatenate([self.values, np.empty_like(self.values)])[: self.capacity]
        self.values[self.count] = signature
        self.count += 1
        return True


def pairwise_jaccard(texts: Sequence[str | None], width: int, unit: Unit) -> Similarities:
    """Exact Jaccard similarities of texts (n × n); NaN where a text is None or shorter than a shingle."""
    sets = [shingle_sets([text or ""], width, unit)[0] for text in texts]
    starts = np.cumsum([0, *map(len, sets)])
    distinct, members = np.unique(np.concatenate(sets), return_inverse=True)
    found = np.full((len(sets), len(sets)), np.nan, np.float32)
    _compare_all(members.astype(np.uint32), starts, np.zeros(len(distinct), np.uint8), found)
    return found


def pairwise_estimates(minhash: Path, keys: Sequence[DocKey]) -> tuple[Similarities, str]:
    """Jaccard similarities estimated from a folder of signatures (n × n), and the sketch in words.

    NaN where a document has no signature; InputError if none has one.
    """
    places: dict[str, dict[int, int]] = defaultdict(dict)
    for place, key in enumerate(keys):
        places[key.file][key.row] = place
    paths = shards_named(minhash, places) if is_remote(minhash) else list_shards(minhash)
    with local_copies(paths) as copies:
        shards = list(map(open_shard, copies))
        reject_mixed_sketches({shard.path: shard.header for shard in shards})
        signed = {place: values for shard in shards for place, values in _signed_in(shard, places)}
    if not signed:
        raise InputError(f"{minhash} has a signature of no document of the cluster: it was made from another corpus")
    found = np.full((len(keys), len(keys)), np.nan, np.float32)
    for one, values in signed.items():
        for other, others in signed.items():
            found[one, other] = np.mean(values == others)
    return found, shards[0].header.describe()


def _signed_in(shard: OpenShard, places: Mapping[str, Mapping[int, int]]) -> Iterator[tuple[int, Signature]]:
    """The place and the signature of each document of a shard that has a place, by file and row."""
    if of_file := places.get(shard.header.file):
        values = np.concatenate(list(shard.signatures()))
        yield from ((of_file[row], values[i].copy()) for i, row in enumerate(shard.rows().tolist()) if row in of_file)


@kernel
def _compare_all(members: np.ndarray, starts: np.ndarray, marks: np.ndarray, found: np.ndarray) -> None:
    """Fill `found` (n × n) with the Jaccard similarities of the sets members[starts[i] : starts[i + 1]].

    Members are indices of `marks` (scratch, all 0): those of one set are marked, and counted in each other set.
    """
    for one in range(len(found)):
        a = members[starts[one] : starts[one + 1]]
        for member in a:
            marks[member] = 1
        for other in range(one, len(found)):
            b = members[starts[other] : starts[other + 1]]
            shared = np.int64(0)
            for member in b:
                shared += marks[member]
            if len(a) and len(b):
                found[one, other] = found[other, one] = shared / (len(a) + len(b) - shared)
        for member in a:
            marks[member] = 0
