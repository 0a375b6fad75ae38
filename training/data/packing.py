"""Packing: sequences of whole documents, by best fit, in place of windows that cut them.

A row holds T + 1 tokens: T inputs, and the same shifted by one as targets. Documents longer than a row are cut into
pieces of T + 1 tokens first, each from the last token of the piece before, so every token is still predicted once an
epoch; the rest of each, and all other documents, are packed whole. What stays empty at a row's end is padding, which
the loss ignores.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gristmill.storage.local import atomic_write, locked
from training.data.documents import DocumentIndex, DocumentSpans
from training.data.sequences import TokenSequences
from training.kernels.cross_entropy import IGNORE_INDEX

_VERSION = 1  # of the plan
_WINDOW = 1 << 18  # documents packed with each other: some 20 MB, and few rows that are not filled


class PackingPlan(NamedTuple):
    """Pieces of documents by row, memory-mapped: row i holds the pieces rows[i] … rows[i + 1]."""

    rows: NDArray[np.int64]
    """(rows + 1,) int64."""
    starts: NDArray[np.int64]
    """First token of each piece, counted over all shards: (pieces,) int64."""
    lengths: NDArray[np.int32]
    """Tokens of each piece: (pieces,) int32."""


class PackedSequences:
    """Map-style dataset of the rows of a packing, with the interface of `TokenSequences`."""

    @property
    def sets(self) -> "Sequence[PackedSequences]":
        return [self]

    @property
    def is_padded(self) -> bool:
        return True

    def __init__(self, data: TokenSequences, folder: Path) -> None:
        """`folder` keeps the plan; the processes that find none there compute it, and others wait for it."""
        self.data, self.folder, self.length, self.manifest = data, data.folder, data.length, data.manifest
        self.plan = _open_plan(folder / f"packing-{_fingerprint(data)}", data)

    def __len__(self) -> int:
        return len(self.plan.rows) - 1

    def batch(self, indices: Sequence[int] | NDArray[np.int64]) -> Tensor:
        """Read the rows `indices`: (len(indices), T + 1) int64, with padding IGNORE_INDEX. Raises InputError."""
        out = np.full((len(indices), self.length + 1), IGNORE_INDEX, np.int64)
        for row, index in zip(out, indices, strict=True):
            filled = 0
            for start, length in self._pieces(int(index)):
                row[filled : filled + length] = self.data.read(start, start + length)
                filled += length
        return torch.from_numpy(out)

    def positions(self, indices: Sequence[int] | NDArray[np.int64]) -> Tensor:
        """Positions of the inputs of the rows `indices` in their pieces, (len(indices), T); padding is a piece."""
        out = np.empty((len(indices), self.length), np.int64)
        for row, index in zip(out, indices, strict=True):
            filled = 0
            for _, length in [*self._pieces(int(index)), (0, self.length)]:
                row[filled : filled + length] = np.arange(min(length, self.length - filled))
                filled += length
        return torch.from_numpy(out)

    @property
    def documents(self) -> DocumentIndex:
        """The documents of all shards."""
        return self.data.documents

    @property
    def targets(self) -> int:
        """Targets of all rows."""
        return int(self.plan.lengths.sum(dtype=np.int64)) - len(self)

    def target_count(self, indices: NDArray[np.int64]) -> int:
        """Targets of the rows `indices` that are not padding."""
        rows = self.plan.rows
        return sum(int(self.plan.lengths[rows[i] : rows[i + 1]].sum()) - 1 for i in indices)

    def target_spans(self, index: int) -> list[tuple[int, int]]:
        """Starts and stops of the targets of a row, piece by piece, counted over all shards concatenated."""
        (first, length), *others = self._pieces(index)
        spans = [(first + 1, first + length), *((start, start + size) for start, size in others)]
        return [(start, stop) for start, stop in spans if start < stop]

    def _pieces(self, row: int) -> list[tuple[int, int]]:
        first, last = self.plan.rows[row : row + 2]
        return list(zip(self.plan.starts[first:last].tolist(), self.plan.lengths[first:last].tolist(), strict=True))

    def notes(self) -> list[str]:
        """A line that says what the packing leaves empty and cuts."""
        rows, pieces = len(self), len(self.plan.starts)
        tokens, documents = int(self.plan.lengths.sum(dtype=np.int64)), int(self.data.documents.documents[-1])
        padding = 1 - tokens / (rows * (self.length + 1))
        return [
            f"packing: {documents:,} documents in {rows:,} rows, {padding:.2%} padding, which the loss ignores; "
            f"cuts of documents longer than {self.length + 1:,} tokens: {pieces - documents:,}"
        ]


def _fingerprint(data: TokenSequences) -> str:
    """Hash of what decides a plan: the documents' lengths and T."""
    shards = [(shard.sha256, shard.idx_sha256, shard.documents, shard.tokens) for shard in data.manifest.shards]
    return hashlib.sha256(repr((_VERSION, data.length, shards)).encode()).hexdigest()[:16]


def _open_plan(prefix: Path, data: TokenSequences) -> PackingPlan:
    """Map the plan at `prefix`, which one process of the machine computes if it is not there."""
    files = {name: prefix.with_name(f"{prefix.name}.{name}") for name in ("starts", "lengths", "rows")}
    if not files["rows"].exists():
        with locked(prefix.with_name(f"{prefix.name}.lock")):
            if not files["rows"].exists():
                _write_plan(files, data)
    dtypes = {"starts": np.int64, "lengths": np.int32, "rows": np.int64}
    return PackingPlan(
        **{name: np.memmap(files[name], dtypes[name], "r").view(np.ndarray) for name in PackingPlan._fields}
    )


def _write_plan(files: dict[str, Path], data: TokenSequences) -> None:
    """Write the plan window by window: in memory is one window. `rows` comes last, and says that all is there."""
    with ExitStack() as stack:
        partial = {name: stack.enter_context(atomic_write(path)) for name, path in reversed(files.items())}
        starts, lengths, rows = (
            stack.enter_context(partial[name].open("wb")) for name in ("starts", "lengths", "rows")
        )
        pieces = 0
        np.zeros(1, np.int64).tofile(rows)
        for window in pack_windows(data.documents, data.length + 1):
            window.starts.tofile(starts)
            window.lengths.tofile(lengths)
            (window.rows[1:] + pieces).tofile(rows)
            pieces += len(window.starts)


def pack_windows(documents: DocumentIndex, capacity: int, size: int = _WINDOW) -> Iterator[PackingPlan]:
    """Pack the documents into rows of `capacity` tokens, `size` documents or `size` x `capacity` tokens at a time."""
    from training.data.best_fit import best_fit_decreasing  # here, as it imports numba

    first, total = 0, int(documents.documents[-1])
    while first < total:
        spans = documents.numbered(first, min(first + size, total))
        few = int(np.searchsorted(np.cumsum(spans.length), size * capacity)) + 1
        starts, lengths = cut_documents(DocumentSpans(*(array[:few] for array in spans)), capacity)
        row_of = best_fit_decreasing(lengths, capacity)
        order = np.argsort(row_of, kind="stable")
        rows = np.concatenate([[0], np.cumsum(np.bincount(row_of))]).astype(np.int64)
        yield PackingPlan(rows, starts[order], lengths[order].astype(np.int32))
        first += min(few, len(spans.number))


def cut_documents(spans: DocumentSpans, capacity: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Starts and lengths, (pieces,) int64 each, of the documents' pieces of `capacity` tokens, and of their rests.

    A piece starts with the last token of the piece before, which was a target there only. Empty documents have none.
    """
    step = capacity - 1
    counts = np.where(spans.length > 0, np.maximum(1, -(-(spans.length - 1) // step)), 0)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = np.repeat(spans.start, counts) + number * step
    return begins, np.minimum(capacity, np.repeat(spans.start + spans.length, counts) - begins)
