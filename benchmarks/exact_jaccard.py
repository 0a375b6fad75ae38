"""Exact Jaccard similarity of all document pairs, by an inverted index of shingles."""

from collections.abc import Sequence
from typing import NamedTuple

import numba as nb
import numpy as np
from numpy.typing import NDArray

from gristmill.errors import UsageError

MAX_DOCUMENTS = 20_000
MAX_SHINGLES = 200_000_000  # in all documents together, 8 bytes each
MAX_STEPS = 200_000_000_000  # increments while counting: some minutes
_PART = 4 << 20  # shingles sorted at a time
Sets = Sequence[NDArray[np.uint64]]  # per document: shingle hashes, sorted, each once


class Index(NamedTuple):
    """Shingles that occur in several documents: ids per document, and the inverse, both in CSR form."""

    starts: NDArray[np.int64]  # documents + 1
    shingles: NDArray[np.int32]
    first: NDArray[np.int64]  # shingles + 1
    documents: NDArray[np.int32]

    @property
    def steps(self) -> int:
        """Approximate number of increments needed to count the shared shingles of all pairs."""
        return int(np.sum(np.diff(self.first) ** 2)) // 2


def similar_pairs(sets: Sets, least: float) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Pairs (n × 2, the later document first) with a Jaccard similarity of at least `least`, and the similarities (n).

    Memory: the shingles and one count per document. Raises UsageError if it would take more than some minutes,
    or if `least` is 0, which would list all pairs.
    """
    if not 0 < least <= 1:
        raise UsageError(f"least similarity {least}: give one above 0 and at most 1, such as 0.5")
    index = build_index(sets)
    sizes = np.array([len(one) for one in sets], np.int64)
    counts, pairs, similarities = np.zeros(len(sets), np.int32), [np.empty((0, 2), np.int64)], [np.empty(0)]
    for i in range(len(sets)):
        _count_shared(i, index.starts, index.shingles, index.first, index.documents, counts)
        earlier = np.flatnonzero(counts[:i])
        shared = counts[earlier]
        similar = shared / (sizes[i] + sizes[earlier] - shared)
        chosen = similar >= least
        pairs.append(np.stack([np.full(np.count_nonzero(chosen), i), earlier[chosen]], axis=1))
        similarities.append(similar[chosen])
        counts[:i] = 0
    return np.concatenate(pairs), np.concatenate(similarities)


def jaccard_of(sets: Sets, pairs: NDArray[np.int64]) -> NDArray[np.float64]:
    """Jaccard similarity of each pair (n × 2)."""
    found = np.zeros(len(pairs))
    for k, (i, j) in enumerate(pairs.tolist()):
        shared = _intersection(sets[i], sets[j])
        found[k] = shared / max(1, len(sets[i]) + len(sets[j]) - shared)
    return found


def build_index(sets: Sets) -> Index:
    """Build the index, one range of hashes at a time, so that sorting needs little memory."""
    total = sum(map(len, sets))
    if len(sets) > MAX_DOCUMENTS or total > MAX_SHINGLES:
        raise UsageError(
            f"{len(sets):,} documents with {total:,} different shingles are too many to compare all pairs: at most "
            f"{MAX_DOCUMENTS:,} and {MAX_SHINGLES:,}. Give fewer files, or a sample: --documents 5000"
        )
    owners, numbers, known = [np.empty(0, np.int32)], [np.empty(0, np.int32)], 0
    parts = max(1, total // _PART)
    edges = np.array([(part << 64) // parts for part in range(1, parts)], np.uint64)
    cuts = np.array([[0, *np.searchsorted(one, edges), len(one)] for one in sets], np.int64).reshape(
        len(sets), parts + 1
    )
    for start, end in zip(cuts.T[:-1], cuts.T[1:], strict=True):
        hashes = np.concatenate(
            [np.empty(0, np.uint64), *(one[i:j] for one, i, j in zip(sets, start, end, strict=True))]
        )
        owner = np.repeat(np.arange(len(sets), dtype=np.int32), end - start)
        _, number, many = np.unique(hashes, return_inverse=True, return_counts=True)
        shared = many > 1
        is_shared = shared[number]
        owners.append(owner[is_shared])
        numbers.append((np.cumsum(shared) - 1)[number[is_shared]].astype(np.int32) + np.int32(known))
        known += int(np.count_nonzero(shared))
    index = _invert(np.concatenate(owners), np.concatenate(numbers), len(sets), known)
    if index.steps > MAX_STEPS:
        raise UsageError(
            f"{index.steps:,} steps to compare all pairs are too many, at most {MAX_STEPS:,}: some shingles are "
            "in nearly every document. Give a larger --width, or a sample: --documents 5000"
        )
    return index


def _invert(owners: NDArray[np.int32], numbers: NDArray[np.int32], documents: int, shingles: int) -> Index:
    by_document, by_shingle = np.argsort(owners, kind="stable"), np.lexsort((owners, numbers))
    starts, first = (
        np.concatenate([[0], np.cumsum(np.bincount(of, minlength=many))]).astype(np.int64)
        for of, many in ((owners, documents), (numbers, shingles))
    )
    return Index(starts, numbers[by_document], first, owners[by_shingle])


@nb.njit(nogil=True, cache=True)
def _count_shared(
    i: int, starts: np.ndarray, shingles: np.ndarray, first: np.ndarray, documents: np.ndarray, counts: np.ndarray
) -> None:
    """counts[j] += 1 for every shingle that document i shares with an earlier document j."""
    for shingle in shingles[starts[i] : starts[i + 1]]:
        for k in range(first[shingle], first[shingle + 1]):
            if documents[k] >= i:  # ascending
                break
            counts[documents[k]] += 1


@nb.njit(nogil=True, cache=True)
def _intersection(one: np.ndarray, other: np.ndarray) -> int:
    i = j = shared = 0
    while i < len(one) and j < len(other):
        if one[i] == other[j]:
            shared += 1
            i += 1
            j += 1
        elif one[i] < other[j]:
            i += 1
        else:
            j += 1
    return shared
