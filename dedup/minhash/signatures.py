"""MinHash signatures of texts: matching form, shingles, hashes and minima, in one compiled call per chunk of texts.

matching_form.py writes the matching forms and finds their shingles; message_words.py lays shingles
out side by side for xxh32.py or sha1.py to hash; schemes.py turns hashes into a signature, and names
the combinations.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Integral
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from dedup.minhash.matching_form import PADDING, PackedForms, Unit, check_texts, find_shingles, pack_forms
from dedup.minhash.message_words import MAX_BYTES, WORDS, gather_fixed, gather_varying
from dedup.minhash.schemes import (
    EMPTY,
    FSS,
    HASH_FAMILIES,
    MERSENNE,
    SHA1,
    Coefficients,
    Hash,
    draw_coefficients,
    update_affine,
    update_fss,
    update_mersenne,
)
from dedup.minhash.sha1 import ONE_BLOCK_BYTES, sha1_32, sha1_32_varying
from dedup.minhash.xxh32 import STRIPE, xxh32, xxh32_fixed, xxh32_varying
from gristmill import kernels
from gristmill.errors import UsageError
from gristmill.kernels import kernel

_BLOCK = 512  # shingles hashed side by side: their words stay in the L1 cache
_CHUNK = 1 << 15  # shingles hashed before the signature is updated; fss needs all of a text at once
_VARYING_BLOCK = 128  # shingles hashed side by side where their lengths vary
_MEMORY_AN_ASCII_CHARACTER = 4  # bytes of memory, as it is read
_MEMORY_A_CHARACTER = 14  # bytes of memory for a character that is not ASCII: text, UTF-8, form and place


@dataclass(frozen=True)
class Sketch:
    """Parameters of signatures; only signatures of equal parameters can be compared.

    A shingle is `width` units long, characters or words; a signature has `permutations` slots. With words, a text that
    has no spaces between them (more than 16 characters a word, on average) has shingles of 13 characters.
    Raises UsageError for a value out of range.
    """

    hash: Hash = "xxh32"
    width: int = 13
    permutations: int = 128
    seed: int = 1
    unit: Unit = "character"

    def __post_init__(self) -> None:
        if self.hash not in HASH_FAMILIES:
            raise UsageError(f"hash {self.hash!r}: expected {' or '.join(HASH_FAMILIES)}")
        if self.unit not in get_args(Unit):
            raise UsageError(f"unit {self.unit!r}: expected {' or '.join(get_args(Unit))}")
        for name in ("width", "permutations", "seed"):
            if not isinstance(value := getattr(self, name), Integral) or isinstance(value, bool):
                raise UsageError(f"{name} {value!r}: expected an integer")
        if not 1 <= self.width <= 65_535:
            raise UsageError(f"width {self.width}: expected shingles of 1 to 65,535 {self.unit}s; 13 is usual")
        if not 1 <= self.permutations <= 4096:
            raise UsageError(f"permutations {self.permutations}: expected 1 to 4096; 128 is usual")
        if not 0 <= self.seed < 1 << 32:
            raise UsageError(f"seed {self.seed}: expected 0 to {(1 << 32) - 1}")


def check_sketch(sketch: object) -> None:
    """Raise UsageError unless it is a Sketch."""
    if not isinstance(sketch, Sketch):
        raise UsageError(f"sketch {sketch!r}: expected a Sketch, such as Sketch(hash='xxh32')")


DATATROVE = Sketch(unit="word", width=5, permutations=112)
"""Parameters of datatrove's preset: 5-word shingles, and slots for 14 bands of 8 rows."""


def signatures(texts: Sequence[str], sketch: Sketch = Sketch()) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Return the signatures (texts × permutations, uint32) and the number of shingles of each text (int64).

    A text whose matching form is shorter than a shingle has 0 shingles and a signature full of EMPTY.
    Besides its results it needs about six times the memory of the longest text (fss: ten times). Releases the GIL.

    >>> values, shingles = signatures(["the quick brown fox jumps", "The quick, brown fox jumps!", "short"])
    >>> bool((values[0] == values[1]).all()), shingles.tolist()
    (True, [13, 13, 0])
    """
    check_sketch(sketch)
    check_texts(texts)
    signer = Signer(sketch, len(texts))
    for packed in pack_forms(texts):
        signer.sign(packed)
    return signer.values, signer.shingles


class Signer:
    """Signs texts, chunk by chunk: `values` are their signatures, `shingles` how many each has, as of signatures."""

    def __init__(self, sketch: Sketch, count: int) -> None:
        """Prepare for `count` texts."""
        self.values = np.full((count, sketch.permutations), EMPTY, np.uint32)
        self.shingles = np.zeros(count, np.int64)
        self._sketch = sketch
        self._starts = np.empty(0, np.int32)
        self._hashes = np.empty(1 if _is_fss(sketch) else _CHUNK, np.uint32)

    def sign(self, packed: PackedForms) -> None:
        """Sign a chunk of texts."""
        longest = int(np.max(np.diff(packed.bounds)))
        is_fixed = _has_fixed_shingles(self._sketch) and bool(packed.are_ascii.all())
        if not is_fixed and len(self._starts) <= longest:
            self._starts = np.empty(longest + PADDING, np.int32)
        if _is_fss(self._sketch) and len(self._hashes) < longest:
            self._hashes = np.empty(longest, np.uint32)
        _sign_forms(
            packed.forms, packed.bounds, packed.are_ascii, *_parameters(self._sketch), self._starts, self._hashes,
            self.values[packed.texts], self.shingles[packed.texts],
        )  # fmt: skip


def note_compilation(sketch: Sketch, quiet: bool = False) -> None:
    """Print a note on standard error if the kernels for this sketch have to be compiled."""
    packed = next(pack_forms(["a"]))
    scratch = (np.empty(PADDING, np.int32), np.empty(PADDING, np.uint32))
    results = (np.zeros((1, 1), np.uint32), np.zeros(1, np.int64))
    arguments = (packed.forms, packed.bounds, packed.are_ascii, *_parameters(sketch), *scratch, *results)
    kernels.note_compilation(_sign_forms, *arguments, seconds=10, quiet=quiet)


def _has_fixed_shingles(sketch: Sketch) -> bool:
    """Return whether a shingle of an ASCII form begins at each byte, and has a length that the kernels hash at once."""
    longest = ONE_BLOCK_BYTES if HASH_FAMILIES[sketch.hash].shingle_hash == SHA1 else MAX_BYTES
    return sketch.unit == "character" and sketch.width <= longest


def _is_fss(sketch: Sketch) -> bool:
    """Return whether all hashes of a text are needed at once."""
    return HASH_FAMILIES[sketch.hash].scheme == FSS


def _parameters(sketch: Sketch) -> tuple[int, bool, bool | None, bool | None, bool | None, Coefficients, Coefficients]:
    """`width`, `by_word`, `sha1`, `mersenne`, `fss`, `a` and `b` of _sign_forms."""
    family, (a, b) = HASH_FAMILIES[sketch.hash], _coefficients(sketch)
    sha1 = family.shingle_hash == SHA1
    mersenne = family.scheme == MERSENNE
    fss = family.scheme == FSS
    return sketch.width, sketch.unit == "word", sha1 or None, mersenne or None, fss or None, a, b


def jaccard(one: NDArray[np.uint32], other: NDArray[np.uint32]) -> float:
    """Return estimated Jaccard similarity of two documents: the fraction of slots in which their signatures (n) agree.

    UsageError unless both have equally many slots, and one at least.
    """
    if np.ndim(one) != 1 or np.shape(one) != np.shape(other) or not len(one):
        raise UsageError(f"signatures of shapes {np.shape(one)} and {np.shape(other)}: expected two of as many slots")
    return float(np.mean(one == other))


@cache
def _coefficients(sketch: Sketch) -> tuple[Coefficients, Coefficients]:
    return draw_coefficients(HASH_FAMILIES[sketch.hash].scheme, sketch.permutations, sketch.seed)


@kernel
def _sign_forms(
    forms: np.ndarray, bounds: np.ndarray, are_ascii: np.ndarray, width: int, by_word: bool, sha1: bool | None,
    mersenne: bool | None, fss: bool | None, a: np.ndarray, b: np.ndarray, starts: np.ndarray, hashes: np.ndarray,
    values: np.ndarray, shingles: np.ndarray,
) -> None:  # fmt: skip
    """Write the signatures `values` (texts × slots) and the shingle counts of matching forms, as of PackedForms.

    `sha1`, `mersenne` and `fss` are True or None rather than a bool: numba leaves out the branches of a None, so
    that only the hash family that is used is compiled. Without them: XXH32, affine.
    Scratch: `starts` (int32) for the longest form that is not ASCII, `hashes` (uint32) for a chunk.
    """
    words = np.empty((WORDS, _BLOCK + MAX_BYTES), np.uint32)
    scratch = np.empty((5, _BLOCK + MAX_BYTES), np.uint32)  # 4 rows of XXH32 accumulators; shingle lengths
    a32 = a.astype(np.uint32)
    b32 = b.astype(np.uint32)
    for i in range(len(are_ascii)):
        form = forms[bounds[i] :]
        size = bounds[i + 1] - bounds[i]
        is_fixed = are_ascii[i] and not by_word and width <= (MAX_BYTES if sha1 is None else ONE_BLOCK_BYTES)
        count = max(size - width + 1, 0)
        units = width
        are_words = by_word
        if not is_fixed:
            count, units, are_words = find_shingles(form, size, width, by_word, starts)
        shingles[i] = count
        for first in range(0, count, len(hashes)):
            chunk = hashes[: min(len(hashes), count - first)]
            if is_fixed:
                _hash_fixed(form[first:], width, sha1, chunk, words, scratch)
            else:
                _hash_varying(form, starts[first:], units, are_words, sha1, chunk, words, scratch)
            if mersenne is not None:
                update_mersenne(chunk, a, b, values[i], words.reshape(-1)[: len(a)])
            elif fss is not None:
                update_fss(chunk, a32, b32, values[i], words[0])
            else:
                update_affine(chunk, a32, b32, values[i])


@kernel
def _hash_fixed(
    form: np.ndarray, width: int, sha1: bool | None, hashes: np.ndarray, words: np.ndarray, scratch: np.ndarray
) -> None:
    """Hash the shingles of an ASCII form: a shingle of `width` bytes begins at each byte."""
    for first in range(0, len(hashes), _BLOCK):
        values = hashes[first : first + _BLOCK]
        gather_fixed(form[first:], width, len(values), words, scratch[0])
        lengths = scratch[4, : len(values)]
        lengths[:] = np.uint32(width)
        if sha1 is not None:
            sha1_32_varying(words, lengths, width, values)
        elif width < STRIPE:
            xxh32_fixed(words, width, values)
        else:
            xxh32_varying(words, lengths, width, values, scratch)


@kernel
def _hash_varying(
    form: np.ndarray, starts: np.ndarray, width: int, by_word: bool, sha1: bool | None,
    hashes: np.ndarray, words: np.ndarray, scratch: np.ndarray,
) -> None:  # fmt: skip
    """Hash shingles whose lengths in bytes vary: words, or characters that are not all ASCII.

    `starts` are the byte offsets of units; a block that is all ASCII is hashed by _hash_fixed.
    """
    max_bytes = MAX_BYTES if sha1 is None else ONE_BLOCK_BYTES
    first = 0
    while first < len(hashes):
        values = hashes[first : first + _BLOCK]
        bounds = starts[first : first + len(values) + width]
        if not by_word and width <= max_bytes and bounds[-1] - bounds[0] == len(bounds) - 1:
            _hash_fixed(form[bounds[0] :], width, sha1, values, words, scratch)
            first += len(values)
            continue
        values = values[:_VARYING_BLOCK]
        bounds = bounds[: _VARYING_BLOCK + width]
        begins = bounds[: len(values)]
        lengths = scratch[4, : len(values)]
        max_length = _measure_lengths(bounds, width, by_word, lengths)
        if max_length > max_bytes:
            begins, max_length = _hash_long(form, begins, lengths, max_bytes, sha1, values, words)
        count = len(begins)
        gather_varying(form, begins, lengths[:count], max_length, words)
        if sha1 is not None:
            sha1_32_varying(words, lengths[:count], max_length, values[:count])
        else:
            xxh32_varying(words, lengths[:count], max_length, values[:count], scratch)
        first += len(values)


@kernel
def _measure_lengths(bounds: np.ndarray, width: int, by_word: bool, lengths: np.ndarray) -> int:
    """Write the lengths in bytes of the shingles that begin at `bounds`; return the largest."""
    ends = bounds[width:]
    space = np.int32(by_word)
    max_length = np.uint32(0)
    for i in range(len(lengths)):
        lengths[i] = np.uint32(ends[i] - bounds[i] - space)
        max_length = max(max_length, lengths[i])
    return int(np.int64(max_length))


@kernel
def _hash_long(
    form: np.ndarray, begins: np.ndarray, lengths: np.ndarray, max_bytes: int, sha1: bool | None,
    values: np.ndarray, words: np.ndarray,
) -> tuple[np.ndarray, int]:  # fmt: skip
    """Hash shingles longer than `max_bytes` one by one, into the end of `values`, as minima need no order.

    Return the offsets of the other shingles and the largest length among them; their lengths move to
    the front of `lengths`.
    """
    short = np.empty(len(begins), np.int32)
    max_length = np.uint32(0)
    back = len(values)
    count = 0
    for i in range(len(begins)):
        start = begins[i]
        length = lengths[i]
        if length <= max_bytes:
            short[count], lengths[count] = start, length
            count = count + 1
            max_length = max(max_length, length)
        else:
            back -= 1
            end = start + np.int64(length)
            values[back] = xxh32(form, start, end) if sha1 is None else sha1_32(form, start, end, words[0])
    return short[:count], int(np.int64(max_length))


def memory_to_sign(texts: Sequence[str]) -> int:
    """Return the bytes that the longest text takes while it is signed; others, packed together, take little."""
    longest = max(texts, key=len, default="")
    return len(longest) * (_MEMORY_AN_ASCII_CHARACTER if longest.isascii() else _MEMORY_A_CHARACTER)
