"""Exact duplicates: digests of texts or of their matching forms, and which of them are equal.

A digest is the first 128 bits of SHA-256, so no text can be made to collide with another, and
processors compute it about as fast as hashes that promise less. Among n different texts two share
one with a chance of n² / 2^129: 1.5 · 10^-19 for 10 billion.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numba as nb
import numpy as np
from numpy.typing import NDArray

from dedup.minhash.matching_form import form_size, pack, write_form
from gristmill.counts import READ, Counts
from gristmill.engine.partition import partition_of
from gristmill.text import matching_form

On = Literal["matching_form", "bytes"]
PARTS = 1024  # ranges of digests that a slice's records are divided into, whatever the memory
DIGEST = [("high", "<u8"), ("low", "<u8")]
RECORD = np.dtype([*DIGEST, ("row", "<u4"), ("size", "<u4")])  # row within its slice; size of the text in UTF-8
PLACED = np.dtype([*DIGEST, ("row", "<u8"), ("size", "<u4"), ("slice", "<u4")])
COPY = "copy"
FIRST = "first"  # of a group of copies
ALONE = "alone"
_SURE = 256  # characters that are looked at first to see whether a form is empty


def digests(texts: Sequence[str], on: On, salt: bytes = b"") -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """128-bit digests (n × 2, high and low half) and for each text whether its matching form is empty.

    Texts with another `salt` have other digests: they are never equal.

    >>> found, empty = digests(["Hello, world!", " hello WORLD", "Hello world", "!?"], "matching_form")
    >>> len(np.unique(found[~empty], axis=0)), empty.tolist()
    (1, [False, False, False, True])
    """
    start = hashlib.sha256(salt)
    found, empty = [], []
    for form, is_empty in _FORMS[on](texts):
        digest = start.copy()
        digest.update(form)
        found.append(digest.digest()[:16])
        empty.append(is_empty)
    return np.frombuffer(b"".join(found), "<u8").reshape(-1, 2), np.array(empty, bool)


def _matching_forms(texts: Sequence[str]) -> Iterator[tuple[memoryview | bytes, bool]]:
    for _, data, offsets in pack(texts):
        forms, bounds = np.empty(form_size(len(data)), np.uint8), np.zeros(len(offsets), np.int64)
        _write_forms(data, offsets, forms, bounds)
        yield from ((forms.data[start:end], start == end) for start, end in pairwise(bounds.tolist()))


def _plain(texts: Sequence[str]) -> Iterator[tuple[memoryview | bytes, bool]]:
    for text in texts:
        is_empty = not (matching_form(text[:_SURE]) or matching_form(text))
        yield text.encode("utf-8", "surrogatepass"), is_empty


_FORMS: dict[str, Callable[[Sequence[str]], Iterator[tuple[memoryview | bytes, bool]]]] = {
    "matching_form": _matching_forms,
    "bytes": _plain,
}


@nb.njit(nogil=True, cache=True)
def _write_forms(data: np.ndarray, offsets: np.ndarray, forms: np.ndarray, bounds: np.ndarray) -> None:
    """The matching form of text i in forms[bounds[i] : bounds[i + 1]]."""
    for i in range(len(offsets) - 1):
        size, _ = write_form(data[offsets[i] : offsets[i + 1]], forms[bounds[i] :])
        bounds[i + 1] = bounds[i] + size


def by_range(records: NDArray) -> tuple[NDArray, NDArray[np.int64]]:
    """RECORDs by ranges of their digests, in each in the order they came; and where each range begins (PARTS + 1)."""
    part = partition_of(records["high"], PARTS)
    order = np.argsort(part, kind="stable")
    return records[order], np.searchsorted(part[order], np.arange(PARTS + 1))


def read_range(path: Path, first: int, stop: int, size: int) -> Iterator[NDArray]:
    """A slice's RECORDs of ranges first ≤ i < stop, in key order, at most `size` at a time."""
    for starts in np.load(path.with_suffix(".npy"), mmap_mode="r"):
        start, end = int(starts[first]), int(starts[stop])
        for at in range(start, end, size):
            yield np.fromfile(path, RECORD, min(size, end - at), offset=at * RECORD.itemsize)


def find_copies(blocks: Iterable[NDArray]) -> Iterator[tuple[NDArray, NDArray, NDArray]]:
    """For sorted PLACEDs, block by block: copies, for each the first of its group, and the firsts met anew.

    >>> records = np.zeros(5, PLACED)
    >>> records["low"], records["row"] = [5, 5, 6, 7, 7], [0, 3, 8, 1, 2]
    >>> for some in find_copies([records[:2], records[2:4], records[4:]]):
    ...     [found["row"].tolist() for found in some]
    [[3], [0], [0]]
    [[], [], []]
    [[2], [1], [1]]
    """
    last = np.empty(0, PLACED)  # the first of the group that the last block ended in, and its last
    for block in blocks:
        records = np.concatenate([last, block])
        new = np.ones(len(records), bool)
        new[1:] = (records["high"][1:] != records["high"][:-1]) | (records["low"][1:] != records["low"][:-1])
        begins = np.maximum.accumulate(np.where(new, np.arange(len(records)), 0))
        second = np.arange(len(records)) == begins + 1
        copies = ~new
        copies[: len(last)] = second[: len(last)] = False
        yield records[copies], records[begins[copies]], records[begins[second]]
        last = records[sorted({begins[-1], len(records) - 1})]


class Books:
    """Documents and bytes of PLACEDs, by reason and slice."""

    def __init__(self, sources: list[str]) -> None:
        """Of slices whose sources are these."""
        self.sources = sources
        self.tallies = {reason: np.zeros((2, len(sources)), np.int64) for reason in (READ, COPY, FIRST)}

    def add(self, reason: str, placed: NDArray) -> None:
        tally, slices = self.tallies[reason], placed["slice"]
        tally[0] += np.bincount(slices, minlength=len(self.sources))
        np.add.at(tally[1], slices, placed["size"].astype(np.int64))

    def counts(self) -> Counts:
        """What was read, and whether it was a copy, the first of some, or alone."""
        counts = Counts({}, [])
        alone = self.tallies[READ] - self.tallies[COPY] - self.tallies[FIRST]
        for reason, tally in {**self.tallies, ALONE: alone}.items():
            for number in np.flatnonzero(tally[0]):
                documents, size = tally[:, number].tolist()
                counts.add(self.sources[number], reason, size, documents)
        return counts
