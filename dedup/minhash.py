"""MinHash signatures of texts: matching rule, shingles, hash and running minima in one compiled pass.

A shingle is `width` characters of the matching form (pipeline.text). Slot j of a signature is the
minimum over all shingles of a permutation π_j of the shingle's hash; two documents agree in a slot
with the probability of their shingle sets' Jaccard similarity (Broder 1997). Two families:

    xxh32   XXH32, then fmix32, then (a·h + b) mod 2^32: equals datasketch 2.0's default scheme
            with hashfunc=xxhash.xxh32_intdigest
    sha1    SHA-1's first 32 bits, then ((a·h + b) mod (2^61 − 1)) mod 2^32: equals datasketch 1.x,
            SlimPajama's signatures
"""

import string
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

import numba as nb
import numpy as np
from numpy.typing import NDArray

from dedup.hashing import LANES, ONE_BLOCK, SHA1_ROWS, fmix32, sha1_32, sha1_32_lanes, xxh32, xxh32_windows
from pipeline.errors import UsageError

Hash = Literal["xxh32", "sha1"]
EMPTY = np.uint32(0xFFFFFFFF)  # every slot of a document without a shingle
MERSENNE = (1 << 61) - 1
_BLOCK = 4 * LANES  # shingles hashed at a time: their hashes stay in the first-level cache
_UNROLL = 8
_FEW = 16  # from so many on it pays to hash windows together


@dataclass(frozen=True)
class Sketch:
    """How signatures are made; only those of one sketch can be compared."""

    hash: Hash = "xxh32"
    width: int = 13
    permutations: int = 128
    seed: int = 1

    def __post_init__(self) -> None:
        if self.hash not in get_args(Hash):
            raise UsageError(f"hash {self.hash!r}: wanted {' or '.join(get_args(Hash))}")
        if self.width < 1:
            raise UsageError(f"width {self.width}: wanted shingles of 1 character or more")
        if not 1 <= self.permutations <= 4096:
            raise UsageError(f"permutations {self.permutations}: wanted 1 to 4096; 128 is usual")


def signatures(texts: Sequence[str], sketch: Sketch = Sketch()) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Signatures (documents × permutations, uint32) and the number of shingles of each document.

    A text whose matching form is shorter than a shingle has none, and a signature of EMPTY.

    >>> values, shingles = signatures(["the quick brown fox jumps", "The quick, brown fox jumps!", "short"])
    >>> bool((values[0] == values[1]).all()), shingles.tolist()
    (True, [13, 13, 0])
    """
    encoded = [(text if text.isascii() else text.lower()).encode("utf-8", "surrogatepass") for text in texts]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum([len(data) for data in encoded], dtype=np.int64)])
    data = np.frombuffer(b"".join(encoded), np.uint8)
    values = np.full((len(encoded), sketch.permutations), EMPTY, np.uint32)
    shingles = np.zeros(len(encoded), np.int64)
    a, b = _permutations(sketch)
    _sketch_all(data, offsets, sketch.width, sketch.hash == "sha1", a, b, values, shingles)
    return values, shingles


def jaccard(one: NDArray[np.uint32], other: NDArray[np.uint32]) -> float:
    """The estimated Jaccard similarity of two documents: the fraction of slots in which they agree."""
    return float(np.mean(one == other))


@cache
def _permutations(sketch: Sketch) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """The coefficients that datasketch draws for the same seed."""
    random = np.random.RandomState(sketch.seed)
    if sketch.hash == "sha1":
        pairs = [
            (random.randint(1, MERSENNE, dtype=np.uint64), random.randint(0, MERSENNE, dtype=np.uint64))
            for _ in range(sketch.permutations)
        ]
        drawn = np.array(pairs, np.uint64)
        return drawn[:, 0].copy(), drawn[:, 1].copy()
    a = random.randint(0, 1 << 31, sketch.permutations, dtype=np.uint32) * np.uint32(2) + np.uint32(1)
    b = random.randint(0, 1 << 32, sketch.permutations, dtype=np.uint32)
    return a.astype(np.uint64), b.astype(np.uint64)


_SPACE = np.array([code < 128 and chr(code).isspace() for code in range(256)], np.uint8)
_DROP = np.array([chr(code) in string.punctuation for code in range(256)], np.uint8)
_LOWER = np.array([ord(chr(code).lower()) if code < 128 else code for code in range(256)], np.uint8)
_LOWER[_SPACE == 1] = 32


@nb.njit(nogil=True, cache=True)
def _sketch_all(
    data: np.ndarray, offsets: np.ndarray, width: int, sha1: bool, a: np.ndarray, b: np.ndarray,
    values: np.ndarray, shingles: np.ndarray,
) -> None:  # fmt: skip
    longest = 0
    for i in range(len(offsets) - 1):
        longest = max(longest, offsets[i + 1] - offsets[i])
    form = np.empty(longest + 16, np.uint8)
    hashes = np.empty(_BLOCK, np.uint32)
    starts, ends = np.empty(_BLOCK, np.int64), np.empty(_BLOCK, np.int64)
    words, rows = np.empty(_BLOCK + 12, np.uint32), np.empty((SHA1_ROWS, LANES), np.uint32)
    a32, b32 = a.astype(np.uint32), b.astype(np.uint32)
    by_run = width < 16 and not sha1
    most = _FEW if by_run else _BLOCK
    for i in range(len(offsets) - 1):
        size = _matching_bytes(data[offsets[i] : offsets[i + 1]], form)
        start = end = 0
        for _ in range(width - 1):  # the first window, but for its last character
            if end < size:
                end = _next(form, end)
        while end < size:
            count = _ascii_windows(form[start : min(size, end + _BLOCK)], width) if by_run else 0
            if count >= _FEW:
                xxh32_windows(form[start : end + count], width, hashes[:count], words)
                start, end = start + count, end + count
            else:
                count, start, end = _cut_windows(form, size, start, end, starts[:most], ends)
                _hash_windows(form, starts, ends, count, sha1, hashes, rows)
            if sha1:
                _update_mersenne(hashes, count, a, b, values[i])
            else:
                _update_affine(hashes, count, a32, b32, values[i])
            shingles[i] += count


@nb.njit(inline="always")
def _next(form: np.ndarray, at: int) -> int:
    """Where the next character of UTF-8 begins."""
    lead = form[at]
    if lead < 0x80:
        return at + 1
    if lead < 0xE0:
        return at + 2
    return at + 3 if lead < 0xF0 else at + 4


@nb.njit(nogil=True, cache=True)
def _ascii_windows(form: np.ndarray, width: int) -> int:
    """How many windows of `width` bytes follow one another before the first byte beyond ASCII."""
    size, high = 0, np.uint8(0)
    while size < min(len(form), width + _FEW) and form[size] < 0x80:
        size += 1
    if size == width + _FEW:
        for byte in form:  # vectorised: where the first few are ASCII, most often all are
            high |= byte
        if high < 0x80:
            size = len(form)
        while size < len(form) and form[size] < 0x80:
            size += 1
    return max(size - width + 1, 0)


@nb.njit(nogil=True, cache=True)
def _cut_windows(
    form: np.ndarray, size: np.int64, start: int, end: int, starts: np.ndarray, ends: np.ndarray
) -> tuple[int, int, int]:
    """Where windows start and end, until `starts` is full or the text ends: (how many, new start, new end)."""
    count = 0
    while end < size and count < len(starts):
        end = _next(form, end)
        starts[count], ends[count] = start, end
        start = _next(form, start)
        count += 1
    return count, start, end


@nb.njit(nogil=True, cache=True)
def _hash_windows(
    form: np.ndarray, starts: np.ndarray, ends: np.ndarray, count: int, sha1: bool, hashes: np.ndarray, rows: np.ndarray
) -> None:
    """Hash windows of any size in bytes: SHA-1 side by side where each is one block, others one by one."""
    done = 0
    if sha1 and np.max(ends[:count] - starts[:count]) <= ONE_BLOCK:
        while count - done >= LANES // 4:  # fewer are as fast one by one
            lanes = slice(done, done + LANES)
            starts[count : done + LANES], ends[count : done + LANES] = starts[count - 1], ends[count - 1]
            sha1_32_lanes(form, starts[lanes], ends[lanes], hashes[lanes], rows)
            done += LANES
    for i in range(done, count):
        hashes[i] = sha1_32(form, starts[i], ends[i], rows[0]) if sha1 else xxh32(form, starts[i], ends[i])


@nb.njit(nogil=True, cache=True)
def _matching_bytes(text: np.ndarray, form: np.ndarray) -> np.int64:
    """Write the matching form of UTF-8 `text`, lower-cased already where not ASCII; return its size."""
    at, size, after_space = np.uintp(0), np.uintp(0), np.uintp(1)  # unsigned: numba then wraps no negative index
    while at < len(text):
        byte = text[at]
        letter, space, drop, step = _LOWER[byte], np.uintp(_SPACE[byte]), np.uintp(_DROP[byte]), np.uintp(1)
        if byte >= 0x80:
            wide = np.uintp(_wide_space(text, at))
            if wide:
                letter, space, step = np.uint8(32), np.uintp(1), wide
        form[size] = letter  # overwritten by the next one, unless it counts: no branch to mispredict
        size += np.uintp(1) - drop - (space & after_space)
        after_space = space | (drop & after_space)
        at += step
    if size and form[size - np.uintp(1)] == 32:
        size -= np.uintp(1)
    return np.int64(size)


@nb.njit(nogil=True, cache=True)
def _wide_space(text: np.ndarray, at: np.uintp) -> int:
    """Bytes of the white space that stands at `at`, 0 if none does: what str.isspace knows beyond ASCII."""
    lead = text[at]
    if lead == 0xC2:
        return 2 if text[at + 1] == 0x85 or text[at + 1] == 0xA0 else 0
    if lead != 0xE1 and lead != 0xE2 and lead != 0xE3:
        return 0
    second, third = text[at + 1], text[at + 2]
    if lead == 0xE1:
        found = second == 0x9A and third == 0x80
    elif lead == 0xE3:
        found = second == 0x80 and third == 0x80
    else:
        low = third <= 0x8A or third == 0xA8 or third == 0xA9 or third == 0xAF
        found = (second == 0x80 and low) or (second == 0x81 and third == 0x9F)
    return 3 if found else 0


@nb.njit(nogil=True, cache=True, boundscheck=False)
def _update_affine(hashes: np.ndarray, count: int, a: np.ndarray, b: np.ndarray, mins: np.ndarray) -> None:
    """mins[j] = min(mins[j], a[j]·fmix(h) + b[j]): several hashes a round, so that a, b and mins are loaded less."""
    for i in range(count):
        hashes[i] = fmix32(hashes[i])
    whole = count // _UNROLL * _UNROLL
    for i in range(0, whole, _UNROLL):
        h = hashes[i : i + _UNROLL]
        h0, h1, h2, h3, h4, h5, h6, h7 = h[0], h[1], h[2], h[3], h[4], h[5], h[6], h[7]
        for j in range(len(mins)):
            x, y = a[j], b[j]
            first = min(np.uint32(x * h0 + y), np.uint32(x * h1 + y))
            second = min(np.uint32(x * h2 + y), np.uint32(x * h3 + y))
            third = min(np.uint32(x * h4 + y), np.uint32(x * h5 + y))
            fourth = min(np.uint32(x * h6 + y), np.uint32(x * h7 + y))
            mins[j] = min(mins[j], min(min(first, second), min(third, fourth)))
    for i in range(whole, count):
        rest = hashes[i]
        for j in range(len(mins)):
            mins[j] = min(mins[j], np.uint32(a[j] * rest + b[j]))


@nb.njit(nogil=True, cache=True)
def _update_mersenne(hashes: np.ndarray, count: int, a: np.ndarray, b: np.ndarray, mins: np.ndarray) -> None:
    """mins[j] = min(mins[j], ((a[j]·h + b[j] mod 2^64) mod (2^61 − 1)) mod 2^32), the modulus without a division."""
    prime, one, shift = np.uint64(MERSENNE), np.uint64(1), np.uint64(61)
    for i in range(count):
        h = np.uint64(hashes[i])
        for j in range(len(mins)):
            y = a[j] * h + b[j]
            folded = (y & prime) + (y >> shift)
            mins[j] = min(mins[j], np.uint32(folded + ((folded + one) >> shift)))
