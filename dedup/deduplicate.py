"""Near-duplicates of texts in memory: the stages of this folder as one call."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dedup.components import connected
from dedup.lsh import RECORD, band_digests, check_bands, star_edges
from dedup.minhash import Sketch, signatures


@dataclass(frozen=True, eq=False)
class Deduplicated:
    """Which of n texts to keep. All indices are int64 and ascending.

    `duplicate_of` (n) is for each text the one kept in its place, its own index where it is kept;
    `kept` are those; each of `clusters` holds two texts or more, the first of them kept.
    """

    duplicate_of: NDArray[np.int64]

    @property
    def kept(self) -> NDArray[np.int64]:
        return np.flatnonzero(self.duplicate_of == np.arange(len(self.duplicate_of)))

    @property
    def clusters(self) -> list[NDArray[np.int64]]:
        order = np.argsort(self.duplicate_of, kind="stable")
        starts = np.flatnonzero(np.diff(self.duplicate_of[order]))
        return [cluster for cluster in np.split(order, starts + 1) if len(cluster) > 1]


def deduplicate(texts: Sequence[str], sketch: Sketch = Sketch(), range: int = 13, bands: int = 9) -> Deduplicated:
    """Find near-duplicates: texts that share a band of `range` slots, and all that chains of them join.

    The first text of a cluster is kept. A text whose matching form is shorter than a shingle is
    nobody's duplicate. UsageError unless `bands` bands fit into the sketch's permutations.

    >>> from dedup import deduplicate
    >>> texts = ["The mill grinds the grain.", "Bread is baked from flour.", "the mill grinds the grain"]
    >>> found = deduplicate(texts)
    >>> found.kept.tolist(), found.duplicate_of.tolist()
    ([0, 1], [0, 1, 0])
    """
    check_bands(range, bands, sketch.permutations)
    values, shingles = signatures(texts, sketch)
    signed = np.flatnonzero(shingles)
    edges = [_edges(digests, signed) for digests in band_digests(values[signed], range, bands)]
    return Deduplicated(connected(np.concatenate(edges), len(texts)))


def _edges(digests: NDArray[np.uint64], documents: NDArray[np.int64]) -> NDArray[np.int64]:
    records = np.empty(len(digests), RECORD)
    records["digest"], records["document"] = digests, documents
    return star_edges(records).astype(np.int64)
