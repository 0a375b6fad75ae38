"""Locality-sensitive hashing (LSH): the bands of signatures, and the edges between documents of a bucket.

Two documents are candidates if they agree in all rows of a band. With similarity s, b bands and r rows
the probability is 1 − (1 − s^r)^b (Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, 3.4): 9 bands
of 13 rows find 40 % of the pairs at 0.80 and 93 % at 0.90. A bucket holds the documents with the same digest of a band.

Bands are compared by 64-bit digests. Among a billion documents two different bands collide with
probability 3 % per band.
"""

from functools import lru_cache
from numbers import Integral
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dedup.clustering.union_find import find_root
from gristmill.errors import UsageError
from gristmill.kernels import kernel

_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
BAND_RECORD = np.dtype([("digest", "<u8"), ("document", "<u8")])
_PARTITION_SIZE = 1 << 14  # records whose hash table fits into the L2 cache
_EMPTY = np.uint32(0xFFFFFFFF)
_NODES = 512  # of quadrature: exact to rounding for any number of rows and bands


class Bands(NamedTuple):
    """Rows per band and number of bands: `--range` and `--bands` of generate_duplicate_pairs."""

    rows: int
    bands: int


def check_bands(rows: int, bands: int, permutations: int) -> None:
    """Raise UsageError unless `bands` bands of `rows` rows fit into a signature."""
    if any(not isinstance(value, Integral) or isinstance(value, bool) for value in (rows, bands)):
        raise UsageError(f"--range {rows!r} --bands {bands!r}: expected integers, such as 13 and 9")
    rows = int(rows)  # NumPy's small integers overflow
    bands = int(bands)
    if rows < 1 or bands < 1 or rows * bands > permutations:
        raise UsageError(
            f"--range {rows} × --bands {bands} = {rows * bands} rows: expected at least 1 × 1 and at most the "
            f"{permutations} permutations of the signatures, such as 13 × 9 for 128"
        )


def choose_bands(rows: int | None, bands: int | None, threshold: float, permutations: int) -> Bands:
    """Return the bands that are given or, if none are, the best for the threshold by `band_parameters`.

    Of one number that is given alone the other is SlimPajama's: 13 rows, 9 bands. UsageError as check_bands.
    """
    if rows is None and bands is None:
        return band_parameters(threshold, permutations)
    chosen = Bands(13 if rows is None else rows, 9 if bands is None else bands)
    check_bands(*chosen, permutations)
    return chosen


def describe_recall(bands: Bands, threshold: float) -> str:
    """Return the expected recall of bands in words: at the threshold, and of all pairs from there to 1, evenly spread.

    >>> describe_recall(Bands(13, 9), 0.8)
    '9 bands of 13 rows find 40 % of the pairs of similarity 0.8, and 83 % of those from 0.8 to 1'
    """
    nodes, weights = np.polynomial.legendre.leggauss(_NODES // 8)
    similarities = 1 - (1 - nodes) / 2 * (1 - threshold)
    above = float(weights @ detection(similarities, *bands)) / 2
    at_threshold = float(detection(threshold, *bands))
    return (
        f"{bands.bands} bands of {bands.rows} rows find {100 * at_threshold:.0f} % of the pairs "
        f"of similarity {threshold:g}, and {100 * above:.0f} % of those from {threshold:g} to 1"
    )


def detection(similarity: ArrayLike, rows: int | NDArray[np.int64], bands: int) -> NDArray[np.float64]:
    """Return the probability that documents of Jaccard similarity s share a band: 1 − (1 − s^rows)^bands.

    Source: Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, section 3.4.2. UsageError for a similarity
    below 0 or above 1.

    >>> detection([0.5, 0.8, 0.9], rows=13, bands=9).round(3).tolist()
    [0.001, 0.399, 0.929]
    """
    s = np.asarray(similarity, np.float64)
    if not ((s >= 0) & (s <= 1)).all():
        raise UsageError(f"similarity {similarity!r}: expected Jaccard similarities, 0 to 1")
    return 1 - (1 - s**rows) ** bands


@lru_cache(64)  # a run asks for the same some 15 times, and it takes 8 ms
def band_parameters(threshold: float, permutations: int = 128, false_positive_weight: float = 0.5) -> Bands:
    """Return the bands with the minimum weighted area of errors, the same choice as datasketch's MinHashLSH.

    False positives: the integral of `detection` from 0 to the threshold; false negatives: the integral of 1 −
    `detection` from the threshold to 1. Of equal choices the one with fewer bands. UsageError for a value out of range.

    >>> band_parameters(0.8, 128)
    Bands(rows=13, bands=9)
    """
    _check_threshold(threshold, permutations, false_positive_weight)
    nodes, weights = np.polynomial.legendre.leggauss(min(permutations // 2 + 1, _NODES))
    nodes = nodes[:, None]
    below = (nodes + 1) / 2 * threshold
    above = 1 - (1 - nodes) / 2 * (1 - threshold)
    wrong = false_positive_weight * threshold / 2 * weights
    missed = (1 - false_positive_weight) * (1 - threshold) / 2 * weights
    min_error = np.inf
    best = Bands(1, 1)
    for count in range(1, permutations + 1):
        rows = np.arange(1, permutations // count + 1)
        errors = wrong @ detection(below, rows, count) + missed @ (1 - detection(above, rows, count))
        number = int(np.argmin(errors))
        if errors[number] < min_error:
            min_error = float(errors[number])
            best = Bands(int(rows[number]), count)
    return best


def _check_threshold(threshold: float, permutations: int, weight: float) -> None:
    if not 0 <= threshold <= 1:
        raise UsageError(f"threshold {threshold}: expected a Jaccard similarity, 0 to 1")
    if not 1 <= permutations <= 4096:
        raise UsageError(f"permutations {permutations}: expected the number of slots of the signatures, 1 to 4096")
    if not 0 <= weight <= 1:
        raise UsageError(
            f"false_positive_weight {weight}: expected 0 (find all pairs) to 1 (no false pairs); 0.5 is usual"
        )


def band_digests(signatures: NDArray[np.uint32], rows: int, bands: int, salt: int = 0) -> NDArray[np.uint64]:
    """Return 64-bit digests of all bands: signatures (documents × permutations) → (bands × documents).

    Equal bands have different digests under different salts, so documents of two scopes are never candidates.
    """
    digests = np.empty((bands, len(signatures)), np.uint64)
    _digest_bands(np.ascontiguousarray(signatures), _factors(rows), np.uint64(salt), digests)
    return digests


@lru_cache
def _factors(rows: int) -> NDArray[np.uint64]:
    """Return odd factors of the digest of a band of so many rows."""
    factors = np.random.RandomState(rows).randint(0, 1 << 64, rows, np.uint64)
    return factors | np.uint64(1)


def bucket_edges(records: NDArray) -> NDArray[np.uint64]:
    """Return edges (n × 2) from every document of a bucket to its first one, ordered by digest, then document.

    `records` are the BAND_RECORDs of one band, in order of document. They are grouped by a hash table; only the
    edges are sorted.

    >>> records = np.array([(7, 0), (9, 1), (7, 3), (7, 5)], BAND_RECORD)
    >>> bucket_edges(records).tolist()
    [[3, 0], [5, 0]]
    """
    digests = records["digest"]
    documents = records["document"]
    firsts = np.empty(len(records), np.uint32)
    size = 1 << max(4, (2 * len(records) - 1).bit_length())  # a power of two: the hash table is at most half full
    _find_firsts(digests, firsts, np.empty(size, np.uint32))
    (later,) = np.nonzero(firsts != np.arange(len(records), dtype=np.uint32))
    later = later[np.lexsort((documents[later], digests[later]))]
    return np.stack([documents[later], documents[firsts[later]]], axis=1)


def union_buckets(
    digests: NDArray[np.uint64], documents: NDArray[np.unsignedinteger], parent: NDArray, first: int = 0
) -> None:
    """Unite the documents (n) that share a digest (n) of one band, in the `parent` array of a UnionFind.

    Each document is united with the first of its bucket, unless its id is below `first` (an index's). Needs
    neither sorting nor a list of edges: partitions by hash are so small that a hash table of one fits into cache.
    """
    bits = max(1, (len(digests) // _PARTITION_SIZE).bit_length())
    _unite_buckets(digests, documents, np.uint64(bits), parent, first)


@kernel
def _digest_bands(signatures: np.ndarray, factors: np.ndarray, salt: np.uint64, digests: np.ndarray) -> None:
    """digests[band, i] = mix(salt + Σ_r factors[r] · signatures[i, band, r]) mod 2^64, with random odd factors.

    A sum of products, as a CPU computes these in parallel. mix is SplitMix64's finaliser.
    """
    rows = len(factors)
    for i in range(len(signatures)):
        for band in range(len(digests)):
            values = signatures[i, band * rows : band * rows + rows]
            state = salt
            for row in range(rows):
                state += np.uint64(values[row]) * factors[row]
            state = (state ^ (state >> np.uint64(30))) * _MIX_1
            state = (state ^ (state >> np.uint64(27))) * _MIX_2
            digests[band, i] = state ^ (state >> np.uint64(31))


@kernel
def _find_firsts(digests: np.ndarray, firsts: np.ndarray, table: np.ndarray) -> None:
    """Set firsts[i] to the first position of digests[i]; `table` is scratch (uint32), its size a power of two."""
    mask = np.uint64(len(table) - 1)
    table[:] = _EMPTY
    for i in range(len(digests)):
        digest = digests[i]
        slot = digest & mask
        while table[slot] != _EMPTY and digests[table[slot]] != digest:
            slot = (slot + np.uint64(1)) & mask
        if table[slot] == _EMPTY:
            table[slot] = np.uint32(i)
        firsts[i] = table[slot]


@kernel
def _unite_buckets(digests: np.ndarray, documents: np.ndarray, bits: np.uint64, parent: np.ndarray, first: int) -> None:
    """Partition records by their highest `bits` bits (counting sort), then unite the buckets of each partition."""
    shift = np.uint64(64) - bits
    ends = np.zeros((1 << np.int64(bits)) + 1, np.int64)
    for digest in digests:
        ends[(digest >> shift) + np.uint64(1)] += 1
    largest = 0  # by the loop: numba's np.max imports scipy into every process that reads this kernel
    for partition in range(1, len(ends)):
        largest = max(largest, ends[partition])
        ends[partition] += ends[partition - 1]
    keys = np.empty_like(digests)
    owners = np.empty_like(documents)
    for i in range(len(digests)):
        position = ends[digests[i] >> shift]
        keys[position] = digests[i]
        owners[position] = documents[i]
        ends[digests[i] >> shift] = position + 1
    size = 16
    while size < 2 * largest:
        size *= 2
    table = np.empty(size, np.uint32)
    firsts = np.empty(largest, np.uint32)
    start = 0
    for partition in range(len(ends) - 1):
        stop = ends[partition]
        _find_firsts(keys[start:stop], firsts[: stop - start], table)
        for i in range(stop - start):
            if firsts[i] != i and owners[start + i] >= first:
                one = find_root(parent, owners[start + i])
                other = find_root(parent, owners[start + firsts[i]])
                parent[max(one, other)] = min(one, other)
        start = stop
