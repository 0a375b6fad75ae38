"""Packing: sequences of whole documents, by best fit, in place of windows that cut them.

A row holds T + 1 tokens: T inputs, and the same shifted by one as targets. Documents longer than a row are cut into
pieces of T + 1 tokens first, each from the last token of the piece before, so every token is still predicted once an
epoch; the rest of each, and all other documents, are packed whole. A rest's first token is an input only: it was a
target of the piece before, and what precedes it in its row is another document. What stays empty at a row's end is
padding. The loss ignores both; and the first token of every piece, where documents do not see each other.
"""

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gristmill.errors import InputError
from gristmill.io.token_masks import TokenMasks, runs_of
from gristmill.storage.local import atomic_write, locked, sha256_file
from gristmill.wording import count_of
from training.data.data_config import PACKING_VERSION
from training.data.documents import DocumentIndex, DocumentSpans
from training.data.sequences import DataSet, Indices, TokenSequences
from training.kernels.cross_entropy import IGNORE_INDEX

_WINDOW = 1 << 18  # documents packed with each other: some 20 MB, and few rows that are not filled


class PackingPlan(NamedTuple):
    """Pieces of documents by row, memory-mapped: row i holds the pieces rows[i] … rows[i + 1]."""

    rows: NDArray[np.int64]
    """(rows + 1,) int64."""
    starts: NDArray[np.int64]
    """First token of each piece, counted over all shards: (pieces,) int64."""
    lengths: NDArray[np.int32]
    """Tokens of each piece: (pieces,) int32."""
    is_cut: NDArray[np.bool_]
    """The piece begins within its document, with the last token of the piece before: (pieces,) bool."""


class PackedSequences(DataSet):
    """The rows of a packing."""

    has_ignored = True

    def __init__(self, data: TokenSequences, folder: Path) -> None:
        """`folder` keeps the plan; the processes that find none there compute it, and others wait for it."""
        self.data = data
        self.folder = data.folder
        self.local = data.local
        self.length = data.length
        self.manifest = data.manifest
        self.plan = _open_plan(folder / f"packing-{_fingerprint(data)}", data)
        self.masks = data.masks
        self.is_ignored: NDArray[np.bool_] = self.plan.is_cut  # of each piece, whether its first token is no target
        if data.ignores_firsts:
            self.is_ignored = np.broadcast_to(np.True_, self.plan.is_cut.shape)

    def __len__(self) -> int:
        return len(self.plan.rows) - 1

    def batch(self, indices: Indices) -> Tensor:
        out = np.full((len(indices), self.length + 1), IGNORE_INDEX, np.int64)
        pieces = [self._pieces(int(index)) for index in indices]
        spans = [(start, start + length) for of_row in pieces for start, length in of_row]
        tokens = iter(self.data.read_all(spans))
        for row, of_row in zip(out, pieces, strict=True):
            filled = 0
            for _, length in of_row:
                row[filled : filled + length] = next(tokens)
                filled += length
        return torch.from_numpy(out)

    def targets(self, indices: Indices, tokens: Tensor) -> Tensor:
        """IGNORE_INDEX for padding, and for the first token of a piece that begins within its document, or of any."""
        targets = tokens[:, 1:].clone()
        if self.masks is not None:
            for row, index in enumerate(indices):
                targets[row, torch.from_numpy(~self._is_target(int(index)))] = IGNORE_INDEX
            return targets
        for row, index in enumerate(indices):
            first, last = self.plan.rows[index : index + 2]
            begins = np.cumsum(self.plan.lengths[first : last - 1])  # in the row, of all pieces but the first
            targets[row, torch.from_numpy(begins[self.is_ignored[first + 1 : last]] - 1)] = IGNORE_INDEX
        return targets

    def positions(self, indices: Indices) -> Tensor:
        """Return the positions in pieces; padding is a piece."""
        out = np.empty((len(indices), self.length), np.int64)
        for row, index in zip(out, indices, strict=True):
            filled = 0
            for _, length in [*self._pieces(int(index)), (0, self.length)]:
                row[filled : filled + length] = np.arange(min(length, self.length - filled))
                filled += length
        return torch.from_numpy(out)

    @property
    def documents(self) -> DocumentIndex:
        return self.data.documents

    @property
    def all_targets(self) -> int:
        """Return the targets of all rows."""
        if self.masks is not None:
            return self.masks.targets
        plan = self.plan
        is_ignored = self.is_ignored
        ignored = len(self) + int(is_ignored.sum()) - int(is_ignored[plan.rows[:-1]].sum())
        return int(plan.lengths.sum(dtype=np.int64)) - ignored

    def target_count(self, indices: Indices) -> int:
        if self.masks is not None:
            return sum(int(self._is_target(int(index)).sum()) for index in indices)
        plan = self.plan
        count = 0
        indices = np.asarray(indices)
        for first, last in zip(plan.rows[indices].tolist(), plan.rows[indices + 1].tolist(), strict=True):
            count += int(plan.lengths[first:last].sum()) - 1 - int(self.is_ignored[first + 1 : last].sum())
        return count

    def token_spans(self, index: int) -> list[tuple[int, int]]:
        return [(start, start + length) for start, length in self._pieces(index)]

    def target_spans(self, index: int) -> list[tuple[int, int]]:
        if self.masks is not None:
            return self._masked_spans(index)
        ignored = self.is_ignored[slice(*self.plan.rows[index : index + 2])].astype(np.int64)
        ignored[0] = 1  # nothing precedes it
        pieces = zip(self._pieces(index), ignored.tolist(), strict=True)
        spans = [(start + first, start + length) for (start, length), first in pieces]
        return [(start, stop) for start, stop in spans if start < stop]

    def _is_target(self, row: int) -> NDArray[np.bool_]:
        """Return which of a row's tokens but its first are targets, where there are masks: (T,) bool."""
        is_target_token = np.zeros(self.length + 1, bool)
        filled = 0
        for _, is_target in self._masks_of(row):
            is_target_token[filled : filled + len(is_target)] = is_target
            filled += len(is_target)
        return is_target_token[1:]

    def _masked_spans(self, row: int) -> list[tuple[int, int]]:
        spans: list[tuple[int, int]] = []
        for begin, is_target in self._masks_of(row):
            spans += runs_of(is_target, begin)
        return spans

    def _masks_of(self, row: int) -> Iterator[tuple[int, NDArray[np.bool_]]]:
        """Yield for each piece of a row where it begins, and which of its tokens are targets."""
        assert self.masks is not None
        ignored = self.is_ignored[slice(*self.plan.rows[row : row + 2])]
        for number, (start, length) in enumerate(self._pieces(row)):
            is_target = self.masks.between(start, start + length)
            if number == 0 or ignored[number]:
                is_target[0] = False
            yield start, is_target

    def _pieces(self, row: int) -> list[tuple[int, int]]:
        first, last = self.plan.rows[row : row + 2]
        return list(zip(self.plan.starts[first:last].tolist(), self.plan.lengths[first:last].tolist(), strict=True))

    def notes(self) -> list[str]:
        """Return a line that says what the packing leaves empty and cuts."""
        rows = len(self)
        pieces = len(self.plan.starts)
        tokens = int(self.plan.lengths.sum(dtype=np.int64))
        documents = int(self.data.documents.documents[-1])
        padding = 1 - tokens / (rows * (self.length + 1))
        return [
            f"packing: {count_of(documents, 'document')} in {count_of(rows, 'row')}, {padding:.2%} padding, "
            "which the loss "
            f"ignores; {count_of(pieces - documents, 'cut')} in documents longer than {self.length + 1:,} tokens"
        ]


def _fingerprint(data: TokenSequences) -> str:
    """Hash of what decides a plan: the documents' lengths and T."""
    shards = [(shard.sha256, shard.idx_sha256, shard.documents, shard.tokens) for shard in data.manifest.shards]
    masks = () if data.masks is None else (data.masks.fingerprint,)
    return hashlib.sha256(repr((PACKING_VERSION, data.length, shards, *masks)).encode()).hexdigest()[:16]


def _open_plan(prefix: Path, data: TokenSequences) -> PackingPlan:
    """Map the plan at `prefix`, which one process of the machine computes if it is not there.

    Raises InputError where a file is not the one that its checksum was of.
    """
    dtypes = {"starts": np.int64, "lengths": np.int32, "is_cut": np.bool_, "rows": np.int64}
    files = {name: prefix.with_name(f"{prefix.name}.{name}") for name in dtypes}
    checksums = prefix.with_name(f"{prefix.name}.sha256")
    if not checksums.exists():
        with locked(prefix.with_name(f"{prefix.name}.lock")):
            if not checksums.exists():
                _write_plan(files, data)
                with atomic_write(checksums) as partial:
                    partial.write_bytes(b"".join(_checksum(path) for path in files.values()))
    expected = checksums.read_bytes().splitlines(keepends=True)
    for path in files.values():
        if not path.exists() or _checksum(path) not in expected:
            raise InputError(
                f"{path}, of the packing's plan, is missing or damaged: its SHA-256 is not in {checksums.name}. "
                f"Remove {checksums}, and the plan is computed again"
            )
    return PackingPlan(**{name: np.memmap(path, dtypes[name], "r").view(np.ndarray) for name, path in files.items()})


def _checksum(path: Path) -> bytes:
    """Return a file's line as the program sha256sum writes and reads it."""
    return f"{sha256_file(path)}  {path.name}\n".encode()


def _write_plan(files: dict[str, Path], data: TokenSequences) -> None:
    """Write the plan window by window: in memory is one window."""
    with ExitStack() as stack:
        partial = {name: stack.enter_context(atomic_write(path)) for name, path in files.items()}
        opened = {name: stack.enter_context(path.open("wb")) for name, path in partial.items()}
        pieces = 0
        np.zeros(1, np.int64).tofile(opened["rows"])
        for window in pack_windows(data.documents, data.length + 1, masks=data.masks):
            for name, values in window._replace(rows=window.rows[1:] + pieces)._asdict().items():
                values.tofile(opened[name])
            pieces += len(window.starts)


def pack_windows(
    documents: DocumentIndex, capacity: int, size: int = _WINDOW, masks: TokenMasks | None = None
) -> Iterator[PackingPlan]:
    """Pack the documents into rows of `capacity` tokens, `size` documents or `size` x `capacity` tokens at a time.

    A row of one token, which has no target, is left out; with masks every piece without a target.
    """
    from training.data.best_fit import best_fit_decreasing  # here, as it imports numba

    first = 0
    total = int(documents.documents[-1])
    while first < total:
        spans = documents.numbered(first, min(first + size, total))
        few = int(np.searchsorted(np.cumsum(spans.length), size * capacity)) + 1
        starts, lengths, is_cut = cut_documents(DocumentSpans(*(array[:few] for array in spans)), capacity)
        if masks is not None:
            pairs = zip(starts.tolist(), lengths.tolist(), strict=True)
            has_target = np.array([masks.between(start + 1, start + length).any() for start, length in pairs], bool)
            starts = starts[has_target]
            lengths = lengths[has_target]
            is_cut = is_cut[has_target]
        row_of = best_fit_decreasing(lengths, capacity)
        order = np.argsort(row_of, kind="stable")
        order = order[np.bincount(row_of, lengths)[row_of[order]] > 1]
        counts = np.bincount(row_of[order])
        rows = np.concatenate([[0], np.cumsum(counts[counts > 0])]).astype(np.int64)
        yield PackingPlan(rows, starts[order], lengths[order].astype(np.int32), is_cut[order])
        first += min(few, len(spans.number))


def cut_documents(
    spans: DocumentSpans, capacity: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Return starts and lengths, (pieces,) int64, of the documents' pieces of `capacity` tokens, and of their rests.

    A piece starts with the last token of the piece before, which was a target there only; the third array, (pieces,)
    bool, says which have one before. Empty documents have none.
    """
    step = capacity - 1
    counts = np.where(spans.length > 0, np.maximum(1, -(-(spans.length - 1) // step)), 0)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = np.repeat(spans.start, counts) + number * step
    return begins, np.minimum(capacity, np.repeat(spans.start + spans.length, counts) - begins), number > 0
