"""Fixed-length sequences, packed from documents, and which of them a rank reads in which step.

Sequence i of length T is tokens [iT, iT + T] of all shards laid end to end: T inputs, and the same
shifted by one as targets. Documents were shuffled when the shards were made.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

from pipeline.errors import UsageError
from pipeline.tokens import open_shards
from training.config import DataConfig


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
        out = np.empty((len(indices), self.length + 1), np.int64)
        for row, i in zip(out, indices, strict=True):
            self._read(int(i) * self.length, row)
        return torch.from_numpy(out)

    def _read(self, start: int, row: NDArray[np.int64]) -> None:
        """Fill `row` with the tokens from `start`, over the border of a shard where need be."""
        shard, filled = int(np.searchsorted(self.starts, start, side="right")) - 1, 0
        while filled < len(row):
            offset = start + filled - int(self.starts[shard])
            piece = self.shards[shard][offset : offset + len(row) - filled]
            row[filled : filled + len(piece)] = piece
            filled, shard = filled + len(piece), shard + 1


@dataclass(frozen=True)
class BatchSplit:
    """How a step's sequences are divided: `ranks` ranks x `rounds` forward passes x `micro` sequences."""

    ranks: int
    rounds: int
    micro: int

    @classmethod
    def of(cls, config: DataConfig, ranks: int) -> "BatchSplit":
        """Raises UsageError where `data.batch_size` does not divide evenly."""
        share = config.batch_size // ranks
        micro = config.micro_batch or share
        if config.batch_size % ranks or share % micro:
            unit = ranks * (config.micro_batch or 1)
            raise UsageError(
                f"data.batch_size {config.batch_size} is not divisible by {ranks} processes x data.micro_batch "
                f"{config.micro_batch or 'any'}; try --data.batch_size {-(-config.batch_size // unit) * unit}"
            )
        return cls(ranks, share // micro, micro)

    @property
    def batch_size(self) -> int:
        return self.ranks * self.rounds * self.micro


class Batches:
    """This rank's batches: a function of (seed, step).

    `DistributedSampler` deals an epoch's permutation to the ranks like cards, so that the first n of
    every rank are the first n x ranks of the permutation. A step takes the next batch of it, and so the
    same sequences for any number of ranks. An epoch is as many whole batches as there are; the few
    sequences left over sit this epoch out, other ones in each.
    """

    def __init__(self, data: TokenSequences, split: BatchSplit, rank: int, seed: int) -> None:
        self.data, self.split = data, split
        self.sampler: DistributedSampler[Tensor] = DistributedSampler(
            data, num_replicas=split.ranks, rank=rank, shuffle=True, seed=seed, drop_last=True
        )
        self.steps_per_epoch = len(data) // split.batch_size
        self.order: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, np.int64))  # epoch, this rank's indices
        if self.steps_per_epoch < 1:
            raise UsageError(
                f"{data.folder} holds {len(data)} sequences of {data.length} tokens, less than one batch; "
                f"try --data.batch_size {len(data) // split.ranks * split.ranks or split.ranks}, "
                "a lower --data.seq_len or more text"
            )

    def indices(self, step: int) -> NDArray[np.int64]:
        """Which sequences this rank reads in a step (from 0), in order."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if self.order[0] != epoch:
            self.sampler.set_epoch(epoch)
            self.order = epoch, np.fromiter(self.sampler, np.int64, len(self.sampler))
        share = self.split.rounds * self.split.micro
        return self.order[1][position * share : (position + 1) * share]

    def step(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """A step's micro-batches: inputs and targets, each (micro, T) int64 on the CPU."""
        rounds = self.indices(step).reshape(self.split.rounds, self.split.micro)
        return [(tokens[:, :-1], tokens[:, 1:]) for tokens in map(self.data.batch, rounds)]
