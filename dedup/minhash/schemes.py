"""From the hashes of a document's shingles to its signature: three schemes, compiled.

Slot j of a signature is the least value that π_j gives to any shingle, so that two documents agree in
a slot with the probability of their shingle sets' Jaccard similarity (Broder 1997).

    affine    π_j(h) = (a_j·fmix32(h) + b_j) mod 2^32, a_j odd; datasketch 2.0's "affine32"
    mersenne  π_j(h) = ((a_j·h + b_j) mod (2^61 − 1)) mod 2^32; datasketch 1.x's, 2.0's "legacy"
    fss       fast similarity sketching (Dahlgaard, Knudsen and Thorup, "Fast Similarity Sketching", FOCS
              2017). Up to 2t rounds for t slots: in round i a hash g_i throws each shingle into one slot,
              in the last t rounds into slot i − t, where the least stays. A slot filled in an earlier
              round keeps what it has, and once none is empty the rounds end: after one for a long
              document, so that the work is not multiplied by t. Unbiased; root mean square errors at
              t = 128 and similarity 0.8, sets of 20, 100, 300 and 2,000 shingles: .024, .026, .028, .034
              (affine: .034, .036, .035, .035; one-permutation hashing with optimal densification,
              Shrivastava 2017, which is as fast: .040, .035, .031, .034).

What is compiled is kept by the age of its own file: after a change here, `touch` minhash.py.
"""

import numba as nb
import numpy as np

from dedup.minhash.xxh32 import fmix32

_U, _W = np.uint32, np.uint64
EMPTY = np.uint32(0xFFFFFFFF)  # every slot of a document without a shingle
MERSENNE = (1 << 61) - 1
_MANY = 8
_UNROLL = 8  # hashes a round, so that coefficients and minima are loaded less


@nb.njit(nogil=True, cache=True)
def update_affine(hashes: np.ndarray, a: np.ndarray, b: np.ndarray, mins: np.ndarray) -> None:
    """Take hashes (uint32, overwritten) into mins (uint32); a and b are uint32."""
    for i in range(len(hashes)):
        hashes[i] = fmix32(hashes[i])
    whole = len(hashes) // _UNROLL * _UNROLL
    for i in range(0, whole, _UNROLL):
        h = hashes[i : i + _UNROLL]
        h0, h1, h2, h3, h4, h5, h6, h7 = h[0], h[1], h[2], h[3], h[4], h[5], h[6], h[7]
        for j in range(len(mins)):
            x, y = a[j], b[j]
            first = min(_U(x * h0 + y), _U(x * h1 + y))
            second = min(_U(x * h2 + y), _U(x * h3 + y))
            third = min(_U(x * h4 + y), _U(x * h5 + y))
            fourth = min(_U(x * h6 + y), _U(x * h7 + y))
            mins[j] = min(mins[j], min(min(first, second), min(third, fourth)))
    for i in range(whole, len(hashes)):
        rest = hashes[i]
        for j in range(len(mins)):
            mins[j] = min(mins[j], _U(a[j] * rest + b[j]))


@nb.njit(nogil=True, cache=True)
def update_mersenne(hashes: np.ndarray, a: np.ndarray, b: np.ndarray, mins: np.ndarray, fresh: np.ndarray) -> None:
    """Take hashes (uint32) into mins (uint32); a and b are uint64, `fresh` is scratch like mins.

    With y = a·h + b + 1 mod 2^64, y + (y >> 61) is the value sought and 1, in its low 32 bits, unless
    these are 8 or less: then the modulus may have wrapped. That is as good as never, so it is
    looked for after the fact, and such hashes are taken again, exactly.
    """
    whole = len(hashes) // _UNROLL * _UNROLL
    for i in range(0, whole, _UNROLL):
        h = hashes[i : i + _UNROLL]
        least = _least_of_eight(h, a, b, fresh)
        if least > 8:
            for j in range(len(mins)):
                mins[j] = min(mins[j], _U(fresh[j] - _U(1)))
        else:
            _update_exactly(h, a, b, mins)
    _update_exactly(hashes[whole:], a, b, mins)


@nb.njit(nogil=True, cache=True)
def _least_of_eight(h: np.ndarray, a: np.ndarray, b: np.ndarray, fresh: np.ndarray) -> np.uint32:
    """fresh[j] = the least value, and 1, that π_j gives to eight hashes; return the least of these."""
    h0, h1, h2, h3, h4, h5, h6, h7 = _W(h[0]), _W(h[1]), _W(h[2]), _W(h[3]), _W(h[4]), _W(h[5]), _W(h[6]), _W(h[7])
    least = EMPTY
    for j in range(len(fresh)):
        x, y = a[j], b[j] + _W(1)
        first = min(_fold(x * h0 + y), _fold(x * h1 + y))
        second = min(_fold(x * h2 + y), _fold(x * h3 + y))
        third = min(_fold(x * h4 + y), _fold(x * h5 + y))
        fourth = min(_fold(x * h6 + y), _fold(x * h7 + y))
        fresh[j] = min(min(first, second), min(third, fourth))
        least = min(least, fresh[j])
    return least


@nb.njit(inline="always")
def _fold(y: np.uint64) -> np.uint32:
    return _U(y + (y >> _W(61)))


@nb.njit(nogil=True, cache=True)
def _update_exactly(hashes: np.ndarray, a: np.ndarray, b: np.ndarray, mins: np.ndarray) -> None:
    prime, one, shift = _W(MERSENNE), _W(1), _W(61)
    for i in range(len(hashes)):
        h = _W(hashes[i])
        for j in range(len(mins)):
            y = a[j] * h + b[j]
            folded = (y & prime) + (y >> shift)
            mins[j] = min(mins[j], _U(folded + ((folded + one) >> shift)))


@nb.njit(nogil=True, cache=True)
def update_fss(hashes: np.ndarray, a: np.ndarray, b: np.ndarray, mins: np.ndarray, mixed: np.ndarray) -> None:
    """Take all hashes of a document (uint32, overwritten where they are few) into mins (uint32, EMPTY).

    a and b are uint32, twice as many as slots; `mixed` is scratch.
    """
    for start in range(0, len(hashes), len(mixed)):
        _throw(hashes[start : start + len(mixed)], a[0], b[0], mins, mixed)
    filled = np.empty(len(mins), np.int32)  # in which round
    empty = 0
    for j in range(len(mins)):
        is_empty = mins[j] == EMPTY
        filled[j] = -1 if is_empty else 0
        empty += is_empty
    if empty and len(hashes) > _MANY * len(mins):  # it repeats itself
        hashes = _distinct(hashes)
    for i in range(1, len(mins)):
        if empty == 0:
            return
        empty -= _throw_again(hashes, i, a[i], b[i], mins, filled)
    for j in range(len(mins) if empty else 0):
        if filled[j] < 0:
            _fill(hashes, a[len(mins) + j], b[len(mins) + j], mins[j : j + 1])


@nb.njit(nogil=True, cache=True)
def _throw(hashes: np.ndarray, a: np.uint32, b: np.uint32, mins: np.ndarray, mixed: np.ndarray) -> None:
    """The first round: each hash into a slot, where the least stays."""
    slots = _W(len(mins))
    for i in range(len(hashes)):
        mixed[i] = fmix32(_U(a * hashes[i] + b))
    for value in mixed[: len(hashes)]:
        slot = np.uintp(_W(value) * slots >> _W(32))
        mins[slot] = min(mins[slot], value)


@nb.njit(nogil=True, cache=True)
def _throw_again(hashes: np.ndarray, i: int, a: np.uint32, b: np.uint32, mins: np.ndarray, filled: np.ndarray) -> int:
    """Round i: only what was empty at its start takes anything; return how many slots it filled."""
    slots, new = _W(len(mins)), 0
    for h in hashes:
        value = fmix32(_U(a * h + b))
        slot = np.uintp(_W(value) * slots >> _W(32))
        if filled[slot] < 0:
            mins[slot], filled[slot] = value, i
            new += 1
        elif filled[slot] == i:
            mins[slot] = min(mins[slot], value)
    return new


@nb.njit(nogil=True, cache=True)
def _fill(hashes: np.ndarray, a: np.uint32, b: np.uint32, slot: np.ndarray) -> None:
    """One of the last rounds: all hashes into one slot."""
    for h in hashes:
        slot[0] = min(slot[0], fmix32(_U(a * h + b)))


@nb.njit(nogil=True, cache=True)
def _distinct(hashes: np.ndarray) -> np.ndarray:
    """Each hash once, in place: repeats would be thrown again in every round."""
    hashes.sort()
    kept = 1
    for i in range(1, len(hashes)):
        hashes[kept] = hashes[i]
        kept += hashes[i] != hashes[i - 1]
    return hashes[:kept]
