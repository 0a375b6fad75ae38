"""Digests of texts, equal where the texts or their matching forms are.

A digest is the first 128 bits of SHA-256, so no text can be crafted to collide with another, and CPUs with SHA
instructions compute it about as fast as weaker hashes. The collision probability among n different texts is
n² / 2^129: 1.5 · 10^-19 for 10 billion.
"""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dedup.minhash.matching_form import Unit, form_size, pack, write_form
from dedup.minhash.shingles import shingle_sets
from gristmill.kernels import kernel

MatchOn = Literal["matching_form", "bytes"]


def digest_texts(texts: Sequence[str], on: MatchOn = "matching_form", salt: bytes = b"") -> NDArray[np.uint64]:
    """128-bit digests (n × 2: high and low half) of the matching forms, or of the texts' bytes.

    A text whose matching form is empty is digested by its bytes. Equal texts have different digests under different
    salts.

    >>> found = digest_texts(["Hello, world!", " hello WORLD", "!?", "?!"])
    >>> len(np.unique(found[:2], axis=0)), len(np.unique(found[2:], axis=0))
    (1, 2)
    """
    salted, found = hashlib.sha256(salt), []
    for data in _matching_forms(texts) if on == "matching_form" else _utf8(texts):
        digest = salted.copy()
        digest.update(data)
        found.append(digest.digest()[:16])
    return np.frombuffer(b"".join(found), "<u8").reshape(-1, 2)


def compared_sets(texts: Sequence[str], width: int = 13, unit: Unit = "character") -> list[NDArray[np.uint64]]:
    """Sets to compare texts by: shingle_sets, and where there is no shingle the digest of the whole matching form.

    A text shorter than a shingle is therefore similar to its copies alone.
    """
    sets = shingle_sets(texts, width, unit)
    short = [number for number, one in enumerate(sets) if not len(one)]
    for number, (high, _) in zip(short, digest_texts([texts[number] for number in short]), strict=True):
        sets[number] = np.array([high])
    return sets


def _matching_forms(texts: Sequence[str]) -> Iterator[memoryview]:
    for _, data, offsets in pack(texts):
        forms, bounds = np.empty(form_size(len(data)), np.uint8), np.zeros(len(offsets), np.int64)
        _write_forms(data, offsets, forms, bounds)
        for (start, end), (first, last) in zip(pairwise(bounds.tolist()), pairwise(offsets.tolist()), strict=True):
            yield forms.data[start:end] if start < end else data.data[first:last]


def _utf8(texts: Sequence[str]) -> Iterator[bytes]:
    return (text.encode("utf-8", "surrogatepass") for text in texts)


@kernel
def _write_forms(data: np.ndarray, offsets: np.ndarray, forms: np.ndarray, bounds: np.ndarray) -> None:
    """Write the matching form of packed text i to forms[bounds[i] : bounds[i + 1]]."""
    for i in range(len(offsets) - 1):
        size, _ = write_form(data[offsets[i] : offsets[i + 1]], forms[bounds[i] :])
        bounds[i + 1] = bounds[i] + size
