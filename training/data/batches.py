"""Fixed-length sequences, packed from documents, and which of them a replica reads in which step.

Sequence i of length T is tokens [iT, iT + T] of all shards laid end to end: T inputs, and the same
shifted by one as targets. Documents were shuffled when the shards were made.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from gristmill.errors import UsageError, require
from gristmill.io.token_shards import open_shards
from training.distributed.layout import ParallelConfig
from training.kernels.keyed_random import key_of
from training.model.batch import Batch

_STEPS_AHEAD = 16
_TOKENS_AHEAD = 1 << 20  # or fewer steps: 8 MiB


@dataclass(frozen=True)
class DataConfig:
    """What is read, and how much of it in a step."""

    train: Path
    """Folder of token shards to train on."""
    holdout: Path
    """Folder of token shards to evaluate on."""
    seq_len: int = 256
    """Tokens in a sequence."""
    batch_size: int = 32
    """Sequences in a step, over all processes."""


class TokenSequences(Dataset[Tensor]):
    """The sequences of one folder of token shards, memory-mapped; `data[i]` is (T + 1,) int64."""

    def __init__(self, folder: Path, length: int) -> None:
        """Raises UsageError where there is not one whole sequence."""
        self.folder, self.length = folder, length
        self.manifest, shards = open_shards(folder)
        self.shards = [shard.tokens for shard in shards]
        self.starts = np.concatenate([[0], np.cumsum([len(s) for s in self.shards], dtype=np.int64)])
        if len(self) < 1:
            raise UsageError(
                f"{folder} holds {self.tokens} tokens, less than one sequence: data.seq_len {length} needs "
                f"{length + 1}; try a lower --data.seq_len or more text"
            )

    @property
    def tokens(self) -> int:
        return int(self.starts[-1])

    def __len__(self) -> int:
        return max(0, (self.tokens - 1) // self.length)

    def __getitem__(self, i: int) -> Tensor:
        return self.batch([i])[0]

    def batch(self, indices: Sequence[int] | NDArray[np.int64]) -> Tensor:
        """Sequences `indices` as (len(indices), T + 1) int64."""
        starts = np.asarray(indices, np.int64) * self.length
        out = np.empty((len(starts), self.length + 1), np.int64)
        shards = np.searchsorted(self.starts, starts, side="right") - 1
        inside = starts + self.length < self.starts[shards + 1]
        for shard in np.unique(shards[inside]):
            rows = inside & (shards == shard)
            offsets = starts[rows] - self.starts[shard]
            out[rows] = self.shards[shard][offsets[:, None] + np.arange(self.length + 1)]
        for row in np.flatnonzero(~inside):
            self._read(int(starts[row]), out[row])
        return torch.from_numpy(out)

    def _read(self, start: int, row: NDArray[np.int64]) -> None:
        """Fill `row` with the tokens from `start`, over the borders of shards."""
        shard, filled = int(np.searchsorted(self.starts, start, side="right")) - 1, 0
        while filled < len(row):
            offset = start + filled - int(self.starts[shard])
            piece = self.shards[shard][offset : offset + len(row) - filled]
            row[filled : filled + len(piece)] = piece
            filled, shard = filled + len(piece), shard + 1


@dataclass(frozen=True)
class BatchSplit:
    """How a step's sequences are divided: `replicas` x `rounds` micro-batches x `micro` sequences."""

    replicas: int
    rounds: int
    micro: int

    @classmethod
    def of(cls, config: DataConfig, layout: ParallelConfig) -> "BatchSplit":
        """Raises UsageError where `data.batch_size` does not divide evenly."""
        parts = layout.dp * layout.micro_batches
        require(
            config.batch_size % parts == 0,
            f"data.batch_size {config.batch_size} is not divisible by parallel.dp {layout.dp} x parallel.micro_batches "
            f"{layout.micro_batches}; try --data.batch_size {-(-config.batch_size // parts) * parts}",
        )
        return cls(layout.dp, layout.micro_batches, config.batch_size // parts)

    @property
    def batch_size(self) -> int:
        return self.replicas * self.rounds * self.micro


class Batches:
    """One replica's batches: a function of (seed, step).

    An epoch's permutation is dealt to the replicas like cards (what torch's DistributedSampler does,
    which makes a Python list of it), so that the first n of each are the first n x replicas of it. A
    step takes the next batch of it, and so the same sequences for any number of replicas. An epoch is
    as many whole batches as there are; the few sequences left over sit this epoch out, other ones in
    each.
    """

    def __init__(self, data: TokenSequences, split: BatchSplit, replica: int, seed: int) -> None:
        self.data, self.split, self.replica, self.seed = data, split, replica, seed
        self.steps_per_epoch = len(data) // split.batch_size
        self.order: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, np.int64))  # epoch, this replica's indices
        if self.steps_per_epoch < 1:
            raise UsageError(
                f"{data.folder} holds {len(data)} sequences of {data.length} tokens, less than one batch; "
                f"try --data.batch_size {len(data) // split.replicas * split.replicas or split.replicas}, "
                "a lower --data.seq_len or more text"
            )

    def indices(self, step: int) -> NDArray[np.int64]:
        """Which sequences this replica reads in a step (from 0), in order."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if self.order[0] != epoch:
            shuffled = torch.randperm(len(self.data), generator=torch.Generator().manual_seed(self.seed + epoch))
            self.order = epoch, shuffled[self.replica :: self.split.replicas].numpy()
        share = self.split.rounds * self.split.micro
        return self.order[1][position * share : (position + 1) * share]

    def step(self, step: int) -> Batch:
        """A step's batch, on the CPU. A sequence's number is the seed's, the step's and its place in the step."""
        return self.steps(step, 1)[0]

    def steps(self, first: int, count: int) -> list[Batch]:
        """The batches of `count` steps, read at once."""
        tokens = self.data.batch(np.concatenate([self.indices(step) for step in range(first, first + count)]))
        size = self.split.batch_size
        place = torch.arange(self.replica, size, self.split.replicas)
        numbers = torch.arange(first, first + count)[:, None] * size + place + key_of(f"{self.seed}/sequences")  # wraps
        return [Batch(t[:, :-1], t[:, 1:], n) for t, n in zip(tokens.chunk(count), numbers, strict=True)]


class Ahead:
    """A replica's batches, of which the next ones are read while the model computes with these.

    Some at a time: to hand work to another thread takes longer than to read a small batch does.
    """

    def __init__(self, batches: Batches, device: torch.device) -> None:
        self.batches, self.device = batches, device
        split = batches.split
        self.count = min(_STEPS_AHEAD, max(1, _TOKENS_AHEAD // (split.rounds * split.micro * batches.data.length)))
        self._reader = ThreadPoolExecutor(1, "data")
        self._here: dict[int, Batch] = {}
        self._next: tuple[int, Future[list[Batch]]] | None = None

    def step(self, step: int) -> Batch:
        """A step's batch, on the device."""
        if step not in self._here:
            asked = self._next if self._next and self._next[0] == step else self._ask(step)
            self._here = dict(enumerate(asked[1].result(), step))
            self._next = self._ask(step + self.count)
        return self._here[step].to(self.device)

    def close(self) -> None:
        self._reader.shutdown(cancel_futures=True)

    def _ask(self, first: int) -> tuple[int, Future[list[Batch]]]:
        return first, self._reader.submit(self._read, first)

    def _read(self, first: int) -> list[Batch]:
        batches = self.batches.steps(first, self.count)
        return [batch.pinned() for batch in batches] if self.device.type == "cuda" else batches
