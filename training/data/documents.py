"""Documents of token shards: where each starts, read from the shards' .idx files; nothing searches for an end token."""

import mmap
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gristmill.errors import InputError
from gristmill.io.token_shards import IDX_HEADER, REMEDY, Manifest, with_suffix

_MAPPED = 256  # indexes mapped at once: each takes a file descriptor


class DocumentSpans(NamedTuple):
    """Consecutive documents, each array (documents,) int64; tokens are counted over all shards concatenated."""

    number: NDArray[np.int64]
    """Number of the document in the folder, from 0."""
    start: NDArray[np.int64]
    """Position of its first token."""
    length: NDArray[np.int64]
    """Its tokens, end-of-document included."""

    def overlap(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return how many of the tokens start … stop each document holds: (documents,) int64."""
        return np.minimum(self.start + self.length, stop) - np.maximum(self.start, start)


class DocumentIndex:
    """The documents of one folder of token shards, by the positions of their tokens; of an .idx only pages are read."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """`folder` holds the shards of `manifest`, whose sizes and headers have been checked (see `map_shard`)."""
        self.folder = folder
        self.shards = manifest.shards
        self.itemsize = np.dtype(manifest.dtype).itemsize
        self.tokens = np.cumsum([0] + [shard.tokens for shard in self.shards], dtype=np.int64)
        self.documents = np.cumsum([0] + [shard.documents for shard in self.shards], dtype=np.int64)
        self._offsets = lru_cache(_MAPPED)(self._map)

    def between(self, start: int, stop: int) -> DocumentSpans:
        """Return the documents that hold the tokens start … stop, at least one; the first may start before.

        Raises InputError where a shard's .idx has no document for one of them.
        """
        return _collect(self.tokens, start, stop, self._in_shard)

    def numbered(self, first: int, last: int) -> DocumentSpans:
        """Return the documents of these numbers, first … last, at least one; some may be empty."""
        return _collect(self.documents, first, last, self._of_shard)

    def starts_between(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return which of the tokens start … stop, at least one, are the first of a document: (n,) int64, ascending."""
        spans = self.between(start, stop)
        return spans.start[(spans.start >= start) & (spans.length > 0)]

    def positions(self, starts: Sequence[int] | NDArray[np.int64], length: int) -> Tensor:
        """Return the positions in their document of the tokens of windows: (len(starts), length) int64.

        Window i is tokens starts[i] … starts[i] + length. The first document of a window counts from the window's
        start, though it may have started before: what it cannot see takes no positions.
        """
        rows = []
        for start in map(int, starts):
            lengths = self.between(start, start + length).overlap(start, start + length)
            rows.append(np.arange(length) - np.repeat(np.cumsum(lengths) - lengths, lengths))
        return torch.from_numpy(np.stack(rows))

    def _in_shard(self, shard: int, start: int, stop: int) -> DocumentSpans:
        """Return the documents that hold tokens start … stop of a shard, counted from its first."""
        offsets = self._offsets(shard)
        first = bisect_right(offsets, start * self.itemsize) - 1
        last = bisect_left(offsets, stop * self.itemsize)
        spans = self._of_shard(shard, max(first, 0), last)
        begin = int(self.tokens[shard])
        if spans.overlap(begin + start, begin + stop).sum() != stop - start:
            raise self._damaged(shard, f"it has no documents for tokens {start:,} to {stop:,}")
        return spans

    def _of_shard(self, shard: int, first: int, last: int) -> DocumentSpans:
        """Return the documents first … last of a shard, counted from its first."""
        offsets = self._offsets(shard)
        end = np.array([self.shards[shard].tokens] * (last == len(offsets)), np.int64)
        begins = np.concatenate([offsets[first : last + 1] // self.itemsize, end])
        lengths = np.diff(begins)
        if (lengths < 0).any():
            raise self._damaged(shard, f"its documents {first:,} to {last:,} are not in order")
        number = np.arange(first, last) + self.documents[shard]
        return DocumentSpans(number, begins[:-1] + self.tokens[shard], lengths)

    def _damaged(self, shard: int, fault: str) -> InputError:
        path = with_suffix(self.folder / self.shards[shard].name, ".idx")
        return InputError(f"{path} is damaged: {fault}. {REMEDY}")

    def _map(self, shard: int) -> NDArray[np.int64]:
        """Return where the documents of a shard start in its .bin, in bytes: (documents,) int64."""
        record = self.shards[shard]
        path = with_suffix(self.folder / record.name, ".idx")
        offset = IDX_HEADER.size + 4 * record.documents
        try:
            mapped = np.memmap(path, np.int64, "r", offset, (record.documents,))
        except (OSError, ValueError) as error:
            raise InputError(f"{path} is not readable ({error}). {REMEDY}") from error
        if isinstance(mapped.base, mmap.mmap):
            mapped.base.madvise(mmap.MADV_RANDOM)
        return mapped.view(np.ndarray)


def _collect(
    starts: NDArray[np.int64], first: int, last: int, read: Callable[[int, int, int], DocumentSpans]
) -> DocumentSpans:
    """Call `read` for each shard with its part of first … last, counted from its start; `starts` are the shards'."""
    begin, end = (int(np.searchsorted(starts, at, side="right")) for at in (first, last - 1))
    parts = []
    for shard in range(begin - 1, end):
        offset = int(starts[shard])
        after = int(starts[shard + 1])
        if max(first, offset) < min(last, after):
            parts.append(read(shard, max(first, offset) - offset, min(last, after) - offset))
    return DocumentSpans(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
