"""Fixed-length sequences from token shards.

Sequence i of length T is tokens [iT, iT + T] of all shards concatenated: T inputs, and the same shifted by one
as targets. It may hold the end of one document and the start of the next: documents were shuffled when the shards
were written. Where documents do not see each other, the first token of one is no target: nothing before it says what
it is.
"""

import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from gristmill.errors import UsageError
from gristmill.io.shard_cache import CacheOptions, ShardCache, TokenRange, describe_cache
from gristmill.io.token_masks import TokenMasks, runs_of
from gristmill.io.token_shards import Manifest, ShardRecord, map_shard, require_known_ids, verify_checksums
from gristmill.storage.stores import store_of
from gristmill.wording import count_of
from training.data.documents import DocumentIndex
from training.kernels.cross_entropy import IGNORE_INDEX

_MAPPED = 256  # shards mapped at once: each takes a file descriptor, and many systems allow 1,024 a process


Indices = Sequence[int] | NDArray[np.int64]


class Sequences(ABC):
    """Sequences of T tokens that batches are made of: windows, packed documents, or those of several data sets."""

    folder: Path
    """Where the token shards are."""
    length: int
    """T."""
    has_ignored: bool
    """Some targets are IGNORE_INDEX: padding at the end of sequences, or first tokens of documents."""

    @property
    @abstractmethod
    def sets(self) -> "Sequence[DataSet]":
        """Return the data sets that these are the sequences of, in order: itself, or several."""

    @abstractmethod
    def __len__(self) -> int: ...

    def notes(self) -> list[str]:
        """Return the lines for a run's header, such as how much is padding."""
        return []

    @abstractmethod
    def batch(self, indices: Indices) -> Tensor:
        """Read tokens of sequences: (len(indices), T + 1) int64, with padding IGNORE_INDEX. Raises InputError."""

    @abstractmethod
    def targets(self, indices: Indices, tokens: Tensor) -> Tensor:
        """Targets of sequences, whose `tokens` `batch` has read: (len(indices), T) int64, IGNORE_INDEX for none."""

    @abstractmethod
    def positions(self, indices: Indices) -> Tensor:
        """Return the positions of the first T of them in their documents: (len(indices), T) int64."""

    @abstractmethod
    def target_count(self, indices: Indices) -> int:
        """Return how many targets they have that are not IGNORE_INDEX."""

    def by_set(self, indices: Indices) -> list[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
        """Yield for each data set: its number, its sequences' positions in `indices`, and their numbers in it."""
        return [(0, np.arange(len(indices)), np.asarray(indices, np.int64))]


class DataSet(Sequences):
    """The sequences of one folder of token shards."""

    manifest: Manifest
    local: Path
    """Folder of this machine with all files of the shards but, of those in a bucket, the tokens."""

    @property
    def sets(self) -> "Sequence[DataSet]":
        return [self]

    @property
    def is_remote(self) -> bool:
        """Return whether the shards are in a bucket."""
        return self.local != self.folder

    @property
    @abstractmethod
    def documents(self) -> DocumentIndex:
        """Return the documents of all shards."""

    @abstractmethod
    def token_spans(self, index: int) -> list[tuple[int, int]]:
        """Return starts and stops of the tokens of a sequence, in its order, counted over all shards concatenated."""

    @abstractmethod
    def target_spans(self, index: int) -> list[tuple[int, int]]:
        """Return the starts and stops of the targets of a sequence, counted over all shards concatenated."""


class TokenSequences(DataSet, Dataset[Tensor]):
    """Map-style dataset of the sequences of one folder of memory-mapped token shards; item i is (T + 1,) int64."""

    def __init__(
        self,
        folder: Path,
        length: int,
        ignores_firsts: bool = False,
        cache: CacheOptions = CacheOptions(),
        taken: int = 0,
        skipped: Sequence[str] = (),
    ) -> None:
        """Open the shards of `folder`; `length` is T; `ignores_firsts`: the first token of a document is no target.

        `skipped`: documents of which no token is a target, as SHARD@NUMBER; those of other folders have no effect.
        `cache` is for shards in a bucket; `taken` bytes of its size are other folders'. Raises UsageError for less than
        one full sequence, InputError where a shard is not the manifest's.
        """
        self.folder = folder
        self.length = length
        self.manifest = Manifest.load(folder)
        self.ignores_firsts = ignores_firsts
        self.cache: ShardCache | None = None
        self.local = folder
        if store_of(folder).needs_copies:
            self.cache = ShardCache(folder, self.manifest, cache, taken)
            self.local = self.cache.local
        self.masks = TokenMasks.load(self.local, self.manifest)
        self.skipped = self._spans_of(skipped)
        self.has_ignored = ignores_firsts or self.masks is not None or bool(self.skipped)
        self.shard = lru_cache(_MAPPED)(self._map)
        sizes = [shard.tokens for shard in self.manifest.shards]
        if self.cache is None:
            sizes = [len(self._map(number)) for number in range(len(sizes))]
        self.starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        if len(self) < 1:
            raise UsageError(
                f"{folder} holds {count_of(self.tokens, 'token')}, less than one sequence: data.seq_len {length} needs "
                f"{length + 1}; try a lower --data.seq_len or more text"
            )

    def _map(self, number: int) -> NDArray[np.integer]:
        tokens = map_shard(self.folder, self.manifest, self.manifest.shards[number])
        _advise(tokens, mmap.MADV_RANDOM, 0, len(tokens))  # or each page would bring megabytes of pages around it
        return tokens

    @property
    def cached_bytes(self) -> int:
        """Return the bytes of shards in a bucket that copies on this machine may take."""
        return self.cache.kept_bytes if self.cache is not None else 0

    def notes(self) -> list[str]:
        """Return notes on which part of shards in a bucket is kept on this machine."""
        return [describe_cache(self.cache)] if self.cache is not None else []

    @property
    def tokens(self) -> int:
        """Return the number of tokens in all shards."""
        return int(self.starts[-1])

    def __len__(self) -> int:
        return max(0, (self.tokens - 1) // self.length)

    def __getitem__(self, i: int) -> Tensor:
        return self.batch([i])[0]

    def batch(self, indices: Indices) -> Tensor:
        """Read the sequences `indices`: (len(indices), T + 1) int64.

        One gather per shard; only sequences that cross into the next shard are read one by one. Raises InputError for
        an id that is not the tokenizer's.
        """
        starts = np.asarray(indices, np.int64) * self.length
        if self.cache is not None:
            stops = (starts + self.length + 1).tolist()
            return torch.from_numpy(np.stack(self.read_all(list(zip(starts.tolist(), stops, strict=True)))))
        out = np.empty((len(starts), self.length + 1), np.int64)
        shards = np.searchsorted(self.starts, starts, side="right") - 1
        inside = starts + self.length < self.starts[shards + 1]
        for shard in np.unique(shards[inside]):
            rows = inside & (shards == shard)
            tokens = self.shard(int(shard))
            first = starts[rows] - self.starts[shard]
            for start in first.tolist():
                _advise(tokens, mmap.MADV_WILLNEED, start, start + self.length + 1)  # all are read at the same time
            out[rows] = self.require_known(int(shard), tokens[first[:, None] + np.arange(self.length + 1)])
        for row in np.flatnonzero(~inside):
            out[row] = self.read(int(starts[row]), int(starts[row]) + self.length + 1)
        return torch.from_numpy(out)

    def targets(self, indices: Indices, tokens: Tensor) -> Tensor:
        """Return all tokens but the first of each; a view, unless some are no targets."""
        if not self.has_ignored:
            return tokens[:, 1:]
        targets = tokens[:, 1:].clone()
        for row, index in enumerate(indices):
            first = int(index) * self.length + 1
            targets[row, torch.from_numpy(~self.is_target(first, first + self.length))] = IGNORE_INDEX
        return targets

    def is_target(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Return which of the tokens start … stop of all shards concatenated are targets: (stop - start,) bool."""
        is_target = np.ones(stop - start, bool) if self.masks is None else self.masks.between(start, stop)
        for first, end in self.skipped:
            is_target[max(0, first - start) : max(0, end - start)] = False
        if self.ignores_firsts:
            is_target[self.documents.starts_between(start, stop) - start] = False
        return is_target

    def _spans_of(self, documents: Sequence[str]) -> list[tuple[int, int]]:
        """Return where documents of this folder begin and end. Raises UsageError for a number beyond its shard."""
        spans = []
        shards = {shard.name: number for number, shard in enumerate(self.manifest.shards)}
        for document in documents:
            name, _, number = document.rpartition("@")
            if name not in shards:
                continue
            shard = shards[name]
            count = self.manifest.shards[shard].documents
            if int(number) >= count:
                raise UsageError(
                    f"data.skip_documents has {document}, and {name} has {count_of(count, 'document')}; expected a "
                    f"number from 0 to {count - 1}"
                )
            first = int(self.documents.documents[shard]) + int(number)
            table = self.documents.numbered(first, first + 1)
            spans.append((int(table.start[0]), int(table.start[0] + table.length[0])))
        return sorted(spans)

    @cached_property
    def documents(self) -> DocumentIndex:
        return DocumentIndex(self.local, self.manifest)

    def verify(self, record: ShardRecord) -> None:
        """Read one shard and raise InputError where the SHA-256 of one of its files is not the recorded one."""
        if self.masks is not None:
            self.masks.verify(record)
        if self.cache is None:
            verify_checksums(self.folder, record)
        else:  # its small files were compared as they were copied
            self.cache.verify(record)

    def positions(self, indices: Indices) -> Tensor:
        """Return a document that started before the sequence counts from the sequence's start."""
        return self.documents.positions(np.asarray(indices, np.int64) * self.length, self.length)

    def target_count(self, indices: Indices) -> int:
        if not self.has_ignored:
            return len(indices) * self.length
        firsts = [int(index) * self.length + 1 for index in indices]
        return sum(int(self.is_target(first, first + self.length).sum()) for first in firsts)

    def token_spans(self, index: int) -> list[tuple[int, int]]:
        first = index * self.length
        return [(first, first + self.length + 1)]

    def target_spans(self, index: int) -> list[tuple[int, int]]:
        first = index * self.length + 1  # a target is the token after its input
        last = first + self.length
        return runs_of(self.is_target(first, last), first) if self.has_ignored else [(first, last)]

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Read tokens start … stop of all shards concatenated: (stop - start,) int64. Raises InputError as `batch`."""
        if self.cache is not None:
            return self.read_all([(start, stop)])[0]
        out = np.empty(stop - start, np.int64)
        filled = 0
        shard = int(np.searchsorted(self.starts, start, side="right")) - 1
        while filled < len(out):
            offset = start + filled - int(self.starts[shard])
            whole = self.shard(shard)
            tokens = whole[offset : offset + len(out) - filled]
            _advise(whole, mmap.MADV_WILLNEED, offset, offset + len(tokens))
            out[filled : filled + len(tokens)] = self.require_known(shard, tokens)
            filled = filled + len(tokens)
            shard = shard + 1
        return out

    def read_all(self, spans: Sequence[tuple[int, int]]) -> list[NDArray[np.int64]]:
        """Read spans of tokens as `read` does; of shards in a bucket, several are fetched at a time."""
        if self.cache is None:
            return [self.read(start, stop) for start, stop in spans]
        ranges: list[TokenRange] = []
        counts = []
        for start, stop in spans:
            own = list(self._ranges(start, stop))
            ranges += own
            counts.append(len(own))
        parts = zip(ranges, self.cache.read(ranges), strict=True)
        known = iter([self.require_known(part.shard, tokens) for part, tokens in parts])
        return [np.concatenate([next(known) for _ in range(count)]).astype(np.int64) for count in counts]

    def _ranges(self, start: int, stop: int) -> Iterator[TokenRange]:
        """Yield the parts of shards that tokens start … stop of all shards are."""
        shard = int(np.searchsorted(self.starts, start, side="right")) - 1
        while start < stop:
            begin = int(self.starts[shard])
            end = min(stop, int(self.starts[shard + 1]))
            if start < end:
                yield TokenRange(shard, start - begin, end - begin)
            start = max(start, end)
            shard += 1

    def require_known(self, shard: int, tokens: NDArray[np.integer]) -> NDArray[np.integer]:
        """Return `tokens`, read from a shard. Raises InputError if one is not the tokenizer's."""
        require_known_ids(tokens, self.manifest, self.folder / self.manifest.shards[shard].name)
        return tokens


def _advise(tokens: NDArray[np.integer], advice: int, start: int, stop: int) -> None:
    """Tell the kernel how tokens start … stop of a mapped shard are going to be read."""
    if isinstance(tokens.base, mmap.mmap) and stop > start:  # an empty shard is not mapped
        first = start * tokens.itemsize // mmap.PAGESIZE * mmap.PAGESIZE
        tokens.base.madvise(advice, first, stop * tokens.itemsize - first)


def require_same_tokenizer(train: TokenSequences, holdout: TokenSequences) -> None:
    """Raise UsageError where the two folders were tokenized with different tokenizers.

    The tokenizer of imported shards may not be known: then its vocabulary is compared alone.
    """
    ours = train.manifest.tokenizer
    theirs = holdout.manifest.tokenizer
    is_known = bool(ours.sha256 and theirs.sha256)
    if not is_known and ours.vocab_size != theirs.vocab_size:
        raise UsageError(
            f"{train.folder} has ids of a vocabulary of {ours.vocab_size:,}, and {holdout.folder} of "
            f"{theirs.vocab_size:,}; expected tokens of one tokenizer; try importing both with it"
        )
    if is_known and ours.sha256 != theirs.sha256:
        raise UsageError(
            f"{train.folder} was made with tokenizer {ours.path} (sha256 {ours.sha256[:12]}) and {holdout.folder} with "
            f"{theirs.path} ({theirs.sha256[:12]}); run tokenize_corpus on both with the same tokenizer"
        )
