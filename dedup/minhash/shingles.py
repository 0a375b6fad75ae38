"""Sets of shingles, for exact Jaccard similarities; digests of texts, equal where these or their matching forms are.

A set has the 64-bit hashes of the shingles, sorted. A digest is the first 128 bits of SHA-256, so no text can be
crafted to collide with another, and CPUs with SHA instructions compute it about as fast as weaker hashes. The collision
probability among n different texts is n² / 2^129: 1.5 · 10^-19 for 10 billion.
"""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from numbers import Integral
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from dedup.minhash.matching_form import (
    PackedForms,
    Unit,
    check_texts,
    find_shingles,
    form_size,
    pack,
    pack_forms,
    write_form,
)
from dedup.minhash.message_words import MAX_BYTES, WORDS, gather_fixed
from dedup.minhash.xxh64 import STRIPE, xxh64, xxh64_fixed
from gristmill.errors import UsageError
from gristmill.kernels import kernel

HASHING_FACTOR = 40  # memory per byte of a text while its shingles are hashed and compared
_BLOCK = 512  # shingles hashed side by side
MatchOn = Literal["matching_form", "bytes"]


def shingle_sets(texts: Sequence[str], width: int = 13, unit: Unit = "character") -> list[NDArray[np.uint64]]:
    """For each text the XXH64 hashes of the shingles of its matching form: sorted, distinct, uint64.

    A text shorter than a shingle has an empty set. Two different shingles share a hash with probability
    2^-64; two sets of a million shingles each share such a hash with probability 5 · 10^-8. Raises UsageError for
    a width below 1 or an unknown unit.

    >>> one, other = shingle_sets(["The quick brown fox", "the quick brown cat!"], width=4)
    >>> len(one), len(other), len(np.intersect1d(one, other))
    (16, 16, 13)
    """
    check_texts(texts)
    if not isinstance(width, Integral) or width < 1 or unit not in get_args(Unit):
        raise UsageError(f"shingles of {width} {unit}: expected 1 or more of {' or '.join(get_args(Unit))}")
    sets: list[NDArray[np.uint64]] = []
    for _, data, offsets in pack(texts):
        hashes = np.empty(len(data), np.uint64)
        counts = np.empty(len(offsets) - 1, np.int64)
        form = np.empty(form_size(int(np.max(np.diff(offsets)))), np.uint8)
        _hash_texts(data, offsets, width, unit == "word", form, hashes, counts)
        ends = np.cumsum(counts)
        for end, count in zip(ends, counts, strict=True):
            sets.append(hashes[end - count : end].copy())
    return sets


@kernel
def _hash_texts(
    data: np.ndarray, offsets: np.ndarray, width: int, by_word: bool, form: np.ndarray, hashes: np.ndarray,
    counts: np.ndarray,
) -> None:  # fmt: skip
    """Write the sets of packed texts to `hashes`, one after another, counts[i] hashes each; `form` is scratch."""
    starts = np.empty(len(form), np.int32)
    unsorted = np.empty(len(form), np.uint64)
    words = np.empty((WORDS, _BLOCK), np.uint32)
    scratch = np.empty(_BLOCK + MAX_BYTES, np.uint32)
    at = 0
    for i in range(len(counts)):
        size, is_ascii = write_form(data[offsets[i] : offsets[i + 1]], form)
        if is_ascii and not by_word and width < STRIPE:
            count = max(size - width + 1, 0)
            for first in range(0, count, _BLOCK):
                values = unsorted[first : min(first + _BLOCK, count)]
                gather_fixed(form[first:], width, len(values), words, scratch)
                xxh64_fixed(words, width, values)
        else:
            count, units, are_words = find_shingles(form, size, width, by_word, starts)
            for k in range(count):
                unsorted[k] = xxh64(form, starts[k], starts[k + units] - are_words)
        counts[i] = _sort_unique(unsorted[:count], hashes[at:])
        at += counts[i]


@kernel
def _sort_unique(unsorted: np.ndarray, out: np.ndarray) -> int:
    """Write the distinct values of `unsorted` to `out`, ascending; return their number.

    A bucket sort by the highest bits, with about as many buckets as values, almost sorts them, as hashes are
    uniform; an insertion sort does the rest.
    """
    bits = 1
    while (1 << bits) < len(unsorted):
        bits += 1
    shift = np.uint64(64 - bits)
    one = np.uintp(1)
    ends = np.zeros((1 << bits) + 1, np.int32)
    for value in unsorted:
        ends[np.uintp(value >> shift) + one] += 1
    for i in range(1, len(ends)):
        ends[i] += ends[i - 1]
    for value in unsorted:
        bucket = np.uintp(value >> shift)
        out[ends[bucket]] = value
        ends[bucket] += 1
    return _insertion_sort_unique(out[: len(unsorted)])


@kernel
def _insertion_sort_unique(out: np.ndarray) -> int:
    """Sort almost sorted values in place by insertion and drop repeats; return the number left."""
    kept = 0
    for i in range(len(out)):
        value = out[i]
        k = kept
        while k > 0 and out[k - 1] > value:
            k -= 1
        if k > 0 and out[k - 1] == value:
            continue
        for move in range(kept, k, -1):
            out[move] = out[move - 1]
        out[k] = value
        kept += 1
    return kept


def digest_texts(texts: Sequence[str], on: MatchOn = "matching_form", salt: bytes = b"") -> NDArray[np.uint64]:
    """Return the 128-bit digests (n × 2: high and low half) of the matching forms, or of the texts' bytes.

    A text whose matching form is empty is digested by its bytes. Equal texts have different digests under different
    salts.

    >>> found = digest_texts(["Hello, world!", " hello WORLD", "!?", "?!"])
    >>> len(np.unique(found[:2], axis=0)), len(np.unique(found[2:], axis=0))
    (1, 2)
    """
    salted = hashlib.sha256(salt)
    digests = []
    as_bytes = (text.encode("utf-8", "surrogatepass") for text in texts)
    as_forms = (form for packed in pack_forms(texts) for form in _forms_or_bytes(packed))
    for data in as_forms if on == "matching_form" else as_bytes:
        digest = salted.copy()
        digest.update(data)
        digests.append(digest.digest()[:16])
    return np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)


def compared_sets(texts: Sequence[str], width: int = 13, unit: Unit = "character") -> list[NDArray[np.uint64]]:
    """Sets to compare texts by: shingle_sets, and where there is no shingle the digest of the whole matching form.

    A text shorter than a shingle is therefore similar to its copies alone.
    """
    sets = shingle_sets(texts, width, unit)
    short = [number for number, one in enumerate(sets) if not len(one)]
    for number, (high, _) in zip(short, digest_texts([texts[number] for number in short]), strict=True):
        sets[number] = np.array([high])
    return sets


def digest_forms(packed: PackedForms) -> NDArray[np.uint64]:
    """Return the digests (n × 2) that digest_texts gives of some texts."""
    digests = b"".join(hashlib.sha256(form).digest()[:16] for form in _forms_or_bytes(packed))
    return np.frombuffer(digests, "<u8").reshape(-1, 2)


def count_characters(packed: PackedForms) -> NDArray[np.int64]:
    """Return the characters (n) of the matching forms of some texts."""
    characters = np.empty(len(packed.are_ascii), np.int64)
    _count_characters(packed.forms, packed.bounds, characters)
    return characters


@kernel
def _count_characters(forms: np.ndarray, bounds: np.ndarray, characters: np.ndarray) -> None:
    """Write how many characters each form has: bytes of UTF-8 that continue none."""
    for i in range(len(characters)):
        count = 0
        for byte in forms[bounds[i] : bounds[i + 1]]:
            count += (byte & 0xC0) != 0x80
        characters[i] = count


def _forms_or_bytes(packed: PackedForms) -> Iterator[memoryview]:
    """Yield the matching form of each text, or its bytes where that is empty."""
    of_forms = pairwise(packed.bounds.tolist())
    of_texts = pairwise(packed.offsets.tolist())
    for (start, end), (first, last) in zip(of_forms, of_texts, strict=True):
        yield packed.forms.data[start:end] if start < end else packed.data.data[first:last]
