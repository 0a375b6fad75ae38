"""MinHash schemes, compiled: from the hashes of a document's shingles to its signature; and hash families by name.

Slot j of a signature is the minimum of π_j(h) over the hashes h of the document's shingles. Two documents
agree in a slot with a probability equal to the Jaccard similarity of their shingle sets (Broder, "On the
resemblance and containment of documents", 1997; Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, 3.3).

    affine    π_j(h) = (a_j·fmix32(h) + b_j) mod 2^32, a_j odd; datasketch 2.0's "affine32"
    mersenne  π_j(h) = (((a_j·h + b_j) mod 2^64) mod (2^61 − 1)) mod 2^32; datasketch 1.x, "legacy" in 2.0
    fss       fast similarity sketching (Dahlgaard, Knudsen and Thorup, "Fast Similarity Sketching",
              FOCS 2017): up to 2t rounds for t slots. In round i < t a hash function g_i assigns each
              shingle to a slot, and the slot takes the minimum; in round t + j all shingles go to slot j.
              A slot filled in an earlier round is final, and the rounds end once no slot is empty: after
              one for a long document, so the cost is not multiplied by t. Unbiased. Root mean square
              errors at t = 128 and similarity 0.8 for sets of 20, 100, 300 and 2,000 shingles: .024, .026,
              .028, .034 (affine: .034, .036, .035, .035; one-permutation hashing with optimal
              densification, Shrivastava 2017, equally fast: .040, .035, .031, .034).

A hash family is a shingle hash and a scheme:

    name            shingle hash  scheme    equals
    xxh32           XXH32         affine    datasketch 2.0: MinHash(hashfunc=xxhash.xxh32_intdigest)
    sha1            SHA-1         mersenne  datasketch 1.x, so SlimPajama; 2.0: MinHash(scheme="legacy")
    sha1-affine32   SHA-1         affine    datasketch 2.0's defaults: MinHash()
    xxh32-mersenne  XXH32         mersenne  datasketch 1.x with hashfunc=xxhash.xxh32_intdigest
    fss             XXH32         fss       no other library; fast similarity sketching, the fastest

Of SHA-1 the first 32 bits are used, little-endian.
"""

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gristmill.kernels import kernel

_U = np.uint32
_W = np.uint64
EMPTY = np.uint32(0xFFFFFFFF)  # a slot without a shingle; all slots of a document without any
MERSENNE_PRIME = (1 << 61) - 1
_DEDUPLICATE_FROM = 8  # hashes per slot; with more it is faster to remove repeats first
_UNROLL = 8  # hashes per iteration, to load coefficients and minima less often

Hash = Literal["xxh32", "sha1", "sha1-affine32", "xxh32-mersenne", "fss"]
XXH32, SHA1 = range(2)  # shingle hashes
AFFINE, MERSENNE, FSS = range(3)  # schemes


class HashFamily(NamedTuple):
    """A shingle hash and a scheme, as the integers that compiled code branches on."""

    shingle_hash: int
    scheme: int


HASH_FAMILIES: dict[Hash, HashFamily] = {
    "xxh32": HashFamily(XXH32, AFFINE),
    "sha1": HashFamily(SHA1, MERSENNE),
    "sha1-affine32": HashFamily(SHA1, AFFINE),
    "xxh32-mersenne": HashFamily(XXH32, MERSENNE),
    "fss": HashFamily(XXH32, FSS),
}
Coefficients = NDArray[np.uint64]


def draw_coefficients(scheme: int, permutations: int, seed: int) -> tuple[Coefficients, Coefficients]:
    """Return the coefficients a and b of a scheme's hash functions, uint64, drawn from `seed` as datasketch draws them.

    One pair per permutation; for fss two, as it has up to two rounds per slot.
    """
    random = np.random.RandomState(seed)
    if scheme == MERSENNE:
        pairs = [
            (random.randint(1, MERSENNE_PRIME, dtype=np.uint64), random.randint(0, MERSENNE_PRIME, dtype=np.uint64))
            for _ in range(permutations)
        ]
        drawn = np.array(pairs, np.uint64)
        return drawn[:, 0].copy(), drawn[:, 1].copy()
    count = 2 * permutations if scheme == FSS else permutations
    a = random.randint(0, 1 << 31, count, dtype=np.uint32) * np.uint32(2) + np.uint32(1)
    b = random.randint(0, 1 << 32, count, dtype=np.uint32)
    return a.astype(np.uint64), b.astype(np.uint64)


@kernel(inline="always")
def fmix32(value: np.uint32) -> np.uint32:
    """MurmurHash3's 32-bit finaliser: a bijection in which every input bit affects every output bit."""
    value = _U(value ^ (value >> _U(16)))
    value = _U(value * _U(0x85EBCA6B))
    value = _U(value ^ (value >> _U(13)))
    value = _U(value * _U(0xC2B2AE35))
    return _U(value ^ (value >> _U(16)))


@kernel
def update_affine(hashes: np.ndarray, a: np.ndarray, b: np.ndarray, mins: np.ndarray) -> None:
    """Update the minima `mins` (slots) with π_j(h) of every hash h in `hashes` (overwritten).

    All arrays are uint32; a and b hold a coefficient per slot.
    """
    for i in range(len(hashes)):
        hashes[i] = fmix32(hashes[i])
    whole = len(hashes) // _UNROLL * _UNROLL
    for i in range(0, whole, _UNROLL):
        h = hashes[i : i + _UNROLL]
        h0 = h[0]
        h1 = h[1]
        h2 = h[2]
        h3 = h[3]
        h4 = h[4]
        h5 = h[5]
        h6 = h[6]
        h7 = h[7]
        for j in range(len(mins)):
            x = a[j]
            y = b[j]
            first = min(_U(x * h0 + y), _U(x * h1 + y))
            second = min(_U(x * h2 + y), _U(x * h3 + y))
            third = min(_U(x * h4 + y), _U(x * h5 + y))
            fourth = min(_U(x * h6 + y), _U(x * h7 + y))
            mins[j] = min(mins[j], min(min(first, second), min(third, fourth)))
    for i in range(whole, len(hashes)):
        rest = hashes[i]
        for j in range(len(mins)):
            mins[j] = min(mins[j], _U(a[j] * rest + b[j]))


@kernel
def update_mersenne(hashes: np.ndarray, a: np.ndarray, b: np.ndarray, mins: np.ndarray, scratch: np.ndarray) -> None:
    """Update the minima `mins` (slots, uint32) with π_j(h) of every hash h in `hashes` (uint32).

    a and b (uint64) hold a coefficient per slot; `scratch` is like `mins`.

    With y = (a·h + b + 1) mod 2^64, the low 32 bits of y + (y >> 61) are π_j(h) + 1, unless they are 8
    or less: then the reduction modulo 2^61 − 1 may be off by one. That is one value in 2^29, so it is
    checked once per eight hashes, which are then recomputed exactly.
    """
    whole = len(hashes) // _UNROLL * _UNROLL
    for i in range(0, whole, _UNROLL):
        h = hashes[i : i + _UNROLL]
        minimum = _minima_of_eight(h, a, b, scratch)
        if minimum > 8:
            for j in range(len(mins)):
                mins[j] = min(mins[j], _U(scratch[j] - _U(1)))
        else:
            _update_exactly(h, a, b, mins)
    _update_exactly(hashes[whole:], a, b, mins)


@kernel
def _minima_of_eight(h: np.ndarray, a: np.ndarray, b: np.ndarray, scratch: np.ndarray) -> np.uint32:
    """Set scratch[j] to the minimum of π_j(h) + 1 over eight hashes h; return the minimum over j."""
    h0 = _W(h[0])
    h1 = _W(h[1])
    h2 = _W(h[2])
    h3 = _W(h[3])
    h4 = _W(h[4])
    h5 = _W(h[5])
    h6 = _W(h[6])
    h7 = _W(h[7])
    minimum = EMPTY
    for j in range(len(scratch)):
        x = a[j]
        y = b[j] + _W(1)
        first = min(_fold(x * h0 + y), _fold(x * h1 + y))
        second = min(_fold(x * h2 + y), _fold(x * h3 + y))
        third = min(_fold(x * h4 + y), _fold(x * h5 + y))
        fourth = min(_fold(x * h6 + y), _fold(x * h7 + y))
        scratch[j] = min(min(first, second), min(third, fourth))
        minimum = min(minimum, scratch[j])
    return minimum


@kernel(inline="always")
def _fold(y: np.uint64) -> np.uint32:
    """The low 32 bits of y mod 2^61 − 1, possibly off by one in the rare case that update_mersenne checks for."""
    return _U(y + (y >> _W(61)))


@kernel
def _update_exactly(hashes: np.ndarray, a: np.ndarray, b: np.ndarray, mins: np.ndarray) -> None:
    """Update minima with the exact reduction. Subtracting 2^61 − 1 is adding 1, as only the low 32 bits are kept."""
    prime = _W(MERSENNE_PRIME)
    one = _W(1)
    shift = _W(61)
    for i in range(len(hashes)):
        h = _W(hashes[i])
        for j in range(len(mins)):
            y = a[j] * h + b[j]
            folded = (y & prime) + (y >> shift)
            mins[j] = min(mins[j], _U(folded + ((folded + one) >> shift)))


@kernel
def update_fss(hashes: np.ndarray, a: np.ndarray, b: np.ndarray, mins: np.ndarray, scratch: np.ndarray) -> None:
    """Compute the signature `mins` (slots, all EMPTY) of a document's hashes, which may be overwritten.

    All arrays are uint32. a and b hold 2 × slots coefficients, one pair per round; `scratch` may have any size.
    """
    for start in range(0, len(hashes), len(scratch)):
        _assign_first_round(hashes[start : start + len(scratch)], a[0], b[0], mins, scratch)
    filled = np.empty(len(mins), np.int32)  # the round in which each slot was filled, -1 for an empty one
    empty = 0
    for j in range(len(mins)):
        is_empty = mins[j] == EMPTY
        filled[j] = -1 if is_empty else 0
        empty += is_empty
    if empty and len(hashes) > _DEDUPLICATE_FROM * len(mins):  # most are repeats, as a slot is still empty
        hashes = _distinct(hashes)
    for i in range(1, len(mins)):
        if empty == 0:
            return
        empty -= _assign_round(hashes, i, a[i], b[i], mins, filled)
    for j in range(len(mins) if empty else 0):
        if filled[j] < 0:
            for h in hashes:  # one of the last t rounds: all go to one slot
                mins[j] = min(mins[j], fmix32(_U(a[len(mins) + j] * h + b[len(mins) + j])))


@kernel
def _assign_first_round(hashes: np.ndarray, a: np.uint32, b: np.uint32, mins: np.ndarray, scratch: np.ndarray) -> None:
    """Round 0: assign each hash to a slot, which takes the minimum."""
    slots = _W(len(mins))
    for i in range(len(hashes)):
        scratch[i] = fmix32(_U(a * hashes[i] + b))
    for value in scratch[: len(hashes)]:
        slot = np.uintp(_W(value) * slots >> _W(32))
        mins[slot] = min(mins[slot], value)


@kernel
def _assign_round(hashes: np.ndarray, i: int, a: np.uint32, b: np.uint32, mins: np.ndarray, filled: np.ndarray) -> int:
    """Round i: fill only slots that are empty at its start; return the number filled."""
    slots = _W(len(mins))
    new = 0
    for h in hashes:
        value = fmix32(_U(a * h + b))
        slot = np.uintp(_W(value) * slots >> _W(32))
        if filled[slot] < 0:
            mins[slot], filled[slot] = value, i
            new += 1
        elif filled[slot] == i:
            mins[slot] = min(mins[slot], value)
    return new


@kernel
def _distinct(hashes: np.ndarray) -> np.ndarray:
    """Sort in place and drop repeats, which would cost time in every round; return the distinct hashes."""
    hashes.sort()
    kept = 1
    for i in range(1, len(hashes)):
        hashes[kept] = hashes[i]
        kept += hashes[i] != hashes[i - 1]
    return hashes[:kept]
