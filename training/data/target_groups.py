"""Groups of targets: which source, and which range of document lengths, each target of a sequence belongs to."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gristmill.io.token_shards import read_sources
from training.data.sequences import DataSet, Indices
from training.data.text import TextSequences

_READ = 256  # shards whose sources are in memory at once: 2 bytes a document


class TargetGroups:
    """Groups of the targets of sequences: their document's source, times the range that its length lies in.

    Group `source * ranges + range`; `sources` are names, none if unknown; range r has the documents of at least
    bounds[r - 1] and less than bounds[r] tokens.
    """

    def __init__(self, data: DataSet | TextSequences, bounds: Sequence[int] = ()) -> None:
        """`bounds` ascend; a text has none."""
        self.data = data
        self.bounds = np.array(bounds, np.int64)
        self.sources = data.manifest.source_names
        self.ranges = len(bounds) + 1
        self._in_shard = lru_cache(_READ)(self._read_sources)
        self.count = max(1, len(self.sources)) * self.ranges

    def of(self, indices: Indices) -> Tensor:
        """Return the groups of the targets of the sequences `indices`: (len(indices), T) int64. Raises InputError.

        -1 is of no group: a target of a text that the sequence before has predicted.
        """
        if isinstance(self.data, TextSequences):
            return -self.data.is_context(indices).long()
        if self.count == 1:
            return torch.zeros(len(indices), self.data.length, dtype=torch.int64)
        length = self.data.length
        starts = [int(index) * length + 1 for index in indices]
        return torch.from_numpy(np.stack([self._between(start, start + length) for start in starts]))

    def counts(self, indices: Indices) -> NDArray[np.int64]:
        """Return how many targets of the sequences `indices`, at least one, each group has: (groups,).

        Raises InputError.
        """
        return np.bincount(np.concatenate([self._row(int(index)) for index in indices]), minlength=self.count)

    def sources_of(self, count: int) -> set[int]:
        """Return where in `sources` the sources of the targets of the first `count` sequences are."""
        spans = self._shards.documents.between(1, count * self.data.length + 1)
        return set(self.source_numbers(spans.number[spans.length > 0]).tolist())

    @property
    def _shards(self) -> DataSet:
        assert not isinstance(self.data, TextSequences), "a text is one document"
        return self.data

    def _row(self, index: int) -> NDArray[np.int64]:
        """Return the groups of the targets of a sequence: (targets,)."""
        parts = [self._between(start, stop) for start, stop in self._shards.target_spans(index)]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)  # all of its documents may be skipped

    def _between(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the groups of the tokens start … stop."""
        spans = self._shards.documents.between(start, stop)
        group = np.searchsorted(self.bounds, spans.length, side="right")
        if self.sources:
            group = group + self.source_numbers(spans.number) * self.ranges
        return np.repeat(group, spans.overlap(start, stop))

    def source_numbers(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where in `sources` those of documents are, by their numbers in the folder: int64 of the same shape."""
        sources = np.empty_like(numbers)
        documents = self._shards.documents.documents
        shards = np.searchsorted(documents, numbers, side="right") - 1
        for shard in np.unique(shards):
            rows = shards == shard
            sources[rows] = self._in_shard(int(shard))[numbers[rows] - documents[shard]]
        return sources

    def _read_sources(self, shard: int) -> NDArray[np.integer]:
        record = self.data.manifest.shards[shard]
        numbers = np.array([self.sources.index(name) for name in record.sources], np.int64)
        return numbers.astype(np.min_scalar_type(len(self.sources)))[read_sources(self._shards.local, record)]


def range_names(bounds: Sequence[int]) -> list[str]:
    """Return the names of the ranges of lengths between `bounds`.

    >>> range_names([256, 1024])
    ['0-255', '256-1023', '1024-']
    """
    lows = [0, *bounds]
    return [f"{low}-{high - 1}" for low, high in zip(lows, bounds, strict=False)] + [f"{lows[-1]}-"]
