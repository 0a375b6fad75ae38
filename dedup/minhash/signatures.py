"""MinHash signatures of texts: matching rule, shingles, hashes and least values in one compiled call a chunk.

The parts: matching.py makes the matching form and finds its characters or words, hashing.py and
sha1.py hash shingles, schemes.py makes the signature of the hashes, families.py names what goes together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import get_args

import numba as nb
import numpy as np
from numpy.typing import NDArray

from dedup.minhash.hash_families import AFFINE, FAMILIES, FSS, MERSENNE61, SHA1, Coefficients, Hash, draw_coefficients
from dedup.minhash.matching_form import Unit, find_units, form_size, pack, write_form
from dedup.minhash.schemes import EMPTY, update_affine, update_fss, update_mersenne
from dedup.minhash.sha1 import ONE_BLOCK, sha1_32, sha1_rows
from dedup.minhash.xxh32 import LONGEST, ROWS, STRIPE, gather_even, gather_uneven, xxh32, xxh32_even, xxh32_uneven
from gristmill.errors import UsageError

_BLOCK = 512  # shingles hashed side by side: what they need stays in the first-level cache
_SPAN = 1 << 15  # shingles hashed before they are taken into the signature; fss must see all of a text
_LESS = 128  # so many where they are not all ASCII


@dataclass(frozen=True)
class Sketch:
    """How signatures are made; only those of one sketch can be compared. `width` counts units."""

    hash: Hash = "xxh32"
    width: int = 13
    permutations: int = 128
    seed: int = 1
    unit: Unit = "character"

    def __post_init__(self) -> None:
        if self.hash not in FAMILIES:
            raise UsageError(f"hash {self.hash!r}: wanted {' or '.join(FAMILIES)}")
        if self.unit not in get_args(Unit):
            raise UsageError(f"unit {self.unit!r}: wanted {' or '.join(get_args(Unit))}")
        if self.width < 1:
            raise UsageError(f"width {self.width}: wanted shingles of 1 {self.unit} or more")
        if not 1 <= self.permutations <= 4096:
            raise UsageError(f"permutations {self.permutations}: wanted 1 to 4096; 128 is usual")
        if not 0 <= self.seed < 1 << 32:
            raise UsageError(f"seed {self.seed}: wanted 0 to {(1 << 32) - 1}")


DATATROVE = Sketch(unit="word", width=5, permutations=112)
"""Features and slots of datatrove's preset: 5-word shingles, for 14 bands of 8 rows."""


def signatures(texts: Sequence[str], sketch: Sketch = Sketch()) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Signatures (documents × permutations, uint32) and the number of shingles of each document.

    A text whose matching form is shorter than a shingle has none, and a signature of EMPTY. Beyond
    what it returns it takes memory of some six times the longest text (fss: ten). Other threads run meanwhile.

    >>> values, shingles = signatures(["the quick brown fox jumps", "The quick, brown fox jumps!", "short"])
    >>> bool((values[0] == values[1]).all()), shingles.tolist()
    (True, [13, 13, 0])
    """
    values = np.full((len(texts), sketch.permutations), EMPTY, np.uint32)
    shingles = np.zeros(len(texts), np.int64)
    family, (a, b) = FAMILIES[sketch.hash], _coefficients(sketch)
    form = np.empty(0, np.uint8)
    for some, data, offsets in pack(texts):
        needed = form_size(int(np.max(np.diff(offsets))))
        if needed > len(form):
            form, starts = np.empty(needed, np.uint8), np.empty(needed, np.int32)
            hashes = np.empty(needed if family.scheme == FSS else _SPAN, np.uint32)
        _sketch_all(
            data, offsets, sketch.width, sketch.unit == "word", *family, a, b,
            form, starts, hashes, values[some], shingles[some],
        )  # fmt: skip
    return values, shingles


def jaccard(one: NDArray[np.uint32], other: NDArray[np.uint32]) -> float:
    """The estimated Jaccard similarity of two documents: the fraction of slots in which they agree."""
    return float(np.mean(one == other))


@cache
def _coefficients(sketch: Sketch) -> tuple[Coefficients, Coefficients]:
    return draw_coefficients(FAMILIES[sketch.hash].scheme, sketch.permutations, sketch.seed)


@nb.njit(nogil=True, cache=True)
def _sketch_all(
    data: np.ndarray, offsets: np.ndarray, width: int, by_word: bool, base: int, scheme: int,
    a: np.ndarray, b: np.ndarray, form: np.ndarray, starts: np.ndarray, hashes: np.ndarray, values: np.ndarray,
    shingles: np.ndarray,
) -> None:  # fmt: skip
    """Sign packed texts; form and starts are scratch for the longest, hashes for as many as are taken together."""
    rows = np.empty((ROWS, _BLOCK + LONGEST), np.uint32)
    lanes = np.empty((5, _BLOCK + LONGEST), np.uint32)
    a32, b32 = a.astype(np.uint32), b.astype(np.uint32)
    for i in range(len(offsets) - 1):
        size, is_ascii = write_form(data[offsets[i] : offsets[i + 1]], form)
        is_even = is_ascii and not by_word and width <= (ONE_BLOCK if base == SHA1 else LONGEST)
        count = max((size if is_even else find_units(form, size, by_word, starts)) - width + 1, 0)
        shingles[i] = count
        for first in range(0, count, len(hashes)):
            some = hashes[: min(len(hashes), count - first)]
            if is_even:
                _hash_even(form[first:], width, base, some, rows, lanes)
            else:
                _hash_uneven(form, starts[first:], width, by_word, base, some, rows, lanes)
            if scheme == AFFINE:
                update_affine(some, a32, b32, values[i])
            elif scheme == MERSENNE61:
                update_mersenne(some, a, b, values[i], rows.reshape(-1)[: len(a)])
            else:
                update_fss(some, a32, b32, values[i], rows[0])


@nb.njit(nogil=True, cache=True)
def _hash_even(
    form: np.ndarray, width: int, base: int, hashes: np.ndarray, rows: np.ndarray, lanes: np.ndarray
) -> None:
    """Hash the shingles of `width` bytes that begin at every byte of a form."""
    for first in range(0, len(hashes), _BLOCK):
        values = hashes[first : first + _BLOCK]
        gather_even(form[first:], width, len(values), rows, lanes[0])
        lengths = lanes[4, : len(values)]
        lengths[:] = np.uint32(width)
        if base == SHA1:
            sha1_rows(rows, lengths, width, values)
        elif width < STRIPE:
            xxh32_even(rows, width, values)
        else:
            xxh32_uneven(rows, lengths, width, values, lanes)


@nb.njit(nogil=True, cache=True)
def _hash_uneven(
    form: np.ndarray, starts: np.ndarray, width: int, by_word: bool, base: int,
    hashes: np.ndarray, rows: np.ndarray, lanes: np.ndarray,
) -> None:  # fmt: skip
    """Hash the shingles of a form, whatever their sizes in bytes, block by block."""
    longest = LONGEST if base != SHA1 else ONE_BLOCK
    first = 0
    while first < len(hashes):
        values = hashes[first : first + _BLOCK]
        bounds = starts[first : first + len(values) + width]
        if not by_word and width <= longest and bounds[-1] - bounds[0] == len(bounds) - 1:
            _hash_even(form[bounds[0] :], width, base, values, rows, lanes)
            first += len(values)
            continue
        values, bounds = values[:_LESS], bounds[: _LESS + width]
        begins, lengths = bounds[: len(values)], lanes[4, : len(values)]
        most = _measure(bounds, width, by_word, lengths)
        if most > longest:
            begins, most = _hash_long(form, begins, lengths, longest, base, values, rows)
        count = len(begins)
        gather_uneven(form, begins, lengths[:count], most, rows)
        if base == SHA1:
            sha1_rows(rows, lengths[:count], most, values[:count])
        else:
            xxh32_uneven(rows, lengths[:count], most, values[:count], lanes)
        first += len(values)


@nb.njit(nogil=True, cache=True)
def _measure(bounds: np.ndarray, width: int, by_word: bool, lengths: np.ndarray) -> int:
    """Sizes in bytes of the shingles between bounds; return the largest."""
    ends, space, most = bounds[width:], np.int32(by_word), np.uint32(0)
    for i in range(len(lengths)):
        lengths[i] = np.uint32(ends[i] - bounds[i] - space)
        most = max(most, lengths[i])
    return int(np.int64(most))


@nb.njit(nogil=True, cache=True)
def _hash_long(
    form: np.ndarray, begins: np.ndarray, lengths: np.ndarray, longest: int, base: int, values: np.ndarray,
    rows: np.ndarray,
) -> tuple[np.ndarray, int]:  # fmt: skip
    """Hash what is over `longest` bytes one by one, into the last of `values`: of all, only the least are sought.

    Return where the others begin, and the largest size among them; their sizes are the first of `lengths`.
    """
    short, most, back = np.empty(len(begins), np.int32), np.uint32(0), len(values)
    count = 0
    for i in range(len(begins)):
        start, length = begins[i], lengths[i]
        if length <= longest:
            short[count], lengths[count] = start, length
            count, most = count + 1, max(most, length)
        else:
            back -= 1
            end = start + np.int64(length)
            values[back] = sha1_32(form, start, end, rows[0]) if base == SHA1 else xxh32(form, start, end)
    return short[:count], int(np.int64(most))
