"""Batches: the sequences that a data-parallel rank reads in each training step, and their order."""

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from gristmill.config import Range
from gristmill.errors import UsageError, require
from training.data.mix import MixOrder
from training.data.order import EpochOrder, OrderKind
from training.data.packing import PACKING_VERSION
from training.data.sequences import Sequences
from training.distributed.layout import ParallelConfig
from training.kernels.keyed_random import key_from_name
from training.model.batch import Batch

_MOST = 2**31 - 1  # of tokens in a sequence, and of sequences in a batch


@dataclass(frozen=True)
class DataConfig:
    """The token shards to read, and the size of a step."""

    RANGES: ClassVar[dict[str, Range]] = {"seq_len": Range(1, _MOST), "batch_size": Range(1, _MOST)}

    train: Path | tuple[Path, ...]
    """Folder of token shards to train on; or several, of one tokenizer."""
    holdout: Path
    """Folder of token shards to evaluate on."""
    holdouts: dict[str, Path] = field(default_factory=dict)
    """More folders of token shards to evaluate on, each reported by its name."""
    weights: tuple[float, ...] = ()
    """With several folders to train on: weight of each, its share of the tokens; none: by their tokens. A folder that
    a weight asks more tokens of than it has is read again, every sequence once each time."""
    seq_len: int = 256
    """Tokens per sequence."""
    batch_size: int = 32
    """Sequences per step, over all data-parallel ranks and micro-batches (the global batch size)."""
    verify: Literal["checksum", "size"] = "checksum"
    """Check of the token shards. checksum: the ranks share the work of comparing SHA-256 of all files, in a thread
    beside the first steps, and the first checkpoint waits for it; size: only what is always checked: the manifest,
    sizes and headers at the start, and every id that is read."""
    order: OrderKind = "keyed"
    """Order of the sequences in an epoch. keyed: a permutation computed index by index, of no size in memory; randperm:
    torch.randperm, 8 bytes a sequence in every process, as in releases before this option. Give it to resume a run
    that one of them began."""
    mask_documents: bool = False
    """Documents in one sequence do not see each other, and positions restart with each, in training and evaluation. The
    first document of a sequence starts at position 0 even if it was cut. Where documents start is read from the .idx
    files."""
    packing: Literal["windows", "best-fit"] = "windows"
    """Training sequences. windows: consecutive tokens, so that most sequences begin and end within a document;
    best-fit: whole documents, packed with little padding, which the loss ignores; only documents longer than a
    sequence are cut (Ding et al. 2024). The plan of a packing is kept in out_dir."""

    @property
    def train_folders(self) -> tuple[Path, ...]:
        """The folders to train on."""
        return self.train if isinstance(self.train, tuple) else (self.train,)

    @property
    def is_packed(self) -> bool:
        """Training sequences are packed documents."""
        return self.packing == "best-fit"

    def of_documents(self) -> dict[str, bool | str | int]:
        """The options of documents that are not at their defaults, by name: runs from before them have none.

        With a packing its version, too: another one has other targets.
        """
        masked = {"data.mask_documents": True} if self.mask_documents else {}
        packed = {"data.packing": self.packing, "data.packing_version": PACKING_VERSION} if self.is_packed else {}
        return {**masked, **packed}

    def check(self) -> None:
        """Raise UsageError for a holdout without a name, weights that do not fit the folders, or an order of no mix."""
        folders = len(self.train_folders)
        require(
            all(name.strip() for name in self.holdouts),
            "data.holdouts has a folder with an empty name; wanted a name and a folder each; is a variable of your "
            f"shell not set? try --data.holdouts other {next(iter(self.holdouts.values()), '')}",
        )
        require(folders > 0, "data.train names no folder; wanted one of token shards, or several")
        twice = [path for path, count in Counter(path.resolve() for path in self.train_folders).items() if count > 1]
        require(
            not twice,
            f"data.train names {''.join(map(str, twice[:1]))} twice; wanted each folder once: a weight in data.weights "
            "has it read more often",
        )
        require(
            len(self.weights) in (0, folders),
            f"data.weights are {len(self.weights)}, and data.train names {folders} folders; wanted a weight for each",
        )
        require(
            all(weight > 0 and math.isfinite(weight) for weight in self.weights),
            f"data.weights are {' '.join(map(str, self.weights))}; wanted finite numbers above 0; leave folders out of "
            "data.train that shall not be read",
        )
        require(
            folders == 1 or self.order == "keyed",
            f"data.order {self.order} is of one folder, and data.train names {folders}; try --data.order keyed",
        )


@dataclass(frozen=True)
class BatchSplit:
    """Split of the global batch: `dp_size` replicas x `grad_accum_steps` micro-batches x `micro_batch_size` sequences.

    With a pipeline, the `grad_accum_steps` micro-batches are those that its schedule interleaves.
    """

    dp_size: int
    grad_accum_steps: int
    micro_batch_size: int

    @classmethod
    def of(cls, config: DataConfig, layout: ParallelConfig, runs: int = 1) -> "BatchSplit":
        """Split `data.batch_size` for a resolved layout, or for `runs` replicas that have one each.

        Raises UsageError if it does not divide evenly.
        """
        parts, rows = runs * layout.dp * layout.micro_batches, layout.batch_shards
        by_runs = f"replicas.count {runs} x " if runs > 1 else ""
        by_rows = f" x {rows} rows of the grid of parallel.tp {layout.tp}" if rows > 1 else ""
        require(
            config.batch_size % (parts * rows) == 0,
            f"data.batch_size {config.batch_size} is not divisible by {by_runs}parallel.dp {layout.dp} x "
            f"parallel.micro_batches {layout.micro_batches}{by_rows}; try --data.batch_size "
            f"{-(-config.batch_size // (parts * rows)) * parts * rows}",
        )
        return cls(runs * layout.dp, layout.micro_batches, config.batch_size // parts)

    @property
    def batch_size(self) -> int:
        """Sequences per step over all ranks."""
        return self.dp_size * self.grad_accum_steps * self.micro_batch_size


class Batches:
    """The batches of one data-parallel rank, as a pure function of (seed, step).

    Of one data set, each epoch has its own permutation. Rank r of n takes its elements r, r + n, r + 2n, …, as torch's
    DistributedSampler does, so a step's global batch is a contiguous run of the permutation and holds the same
    sequences for any n. Sequences beyond the last full batch are left out of that epoch; they differ from epoch to
    epoch. Of a mix of several, the global batches are contiguous runs of its order (see mix.py), which has no end.
    """

    def __init__(
        self,
        data: Sequences,
        split: BatchSplit,
        dp_rank: int,
        seed: int,
        order: OrderKind = "keyed",
        mix: MixOrder | None = None,
        mask_documents: bool = False,
    ) -> None:
        """`mix`: the order of several sets. Raises UsageError where one set has fewer sequences than a global batch."""
        self.data, self.split, self.dp_rank, self.seed, self.mix = data, split, dp_rank, seed, mix
        self.mask_documents = mask_documents
        self.order = EpochOrder(order, len(data), seed) if mix is None else mix
        self.steps_per_epoch = len(data) // split.batch_size
        if self.steps_per_epoch < 1 and mix is None:
            parts = split.dp_size * split.grad_accum_steps
            most = len(data) // parts * parts
            raise UsageError(
                f"{data.folder} holds {len(data)} sequences of {data.length} tokens, less than one batch of "
                f"{split.batch_size}; try {f'--data.batch_size {most}, ' if most else ''}a lower --data.seq_len or "
                "more text"
            )

    def indices(self, first: int, steps: int = 1) -> NDArray[np.int64]:
        """Indices of the sequences that this rank reads in `steps` steps from `first` on (from 0): (B,) int64."""
        return self.global_indices(first, steps, self.dp_rank, self.split.dp_size)

    def global_indices(self, first: int, steps: int, rank: int = 0, ranks: int = 1) -> NDArray[np.int64]:
        """As `indices`, of all sequences of the global batches, or every `ranks`-th one from `rank` on."""
        size, per_epoch = self.split.batch_size, self.steps_per_epoch
        if isinstance(self.order, MixOrder):
            return self.order.at(torch.arange(first * size + rank, (first + steps) * size, ranks)).numpy()
        found = []
        for epoch in range(first // per_epoch, (first + steps - 1) // per_epoch + 1):
            start, stop = max(first - epoch * per_epoch, 0), min(first + steps - epoch * per_epoch, per_epoch)
            positions = torch.arange(start * size + rank, stop * size, ranks)
            found.append(self.order.at(epoch, positions))
        return torch.cat(found).numpy()

    def target_count(self, step: int) -> int:
        """Targets of the global batch of a step (from 0) that are not IGNORE_INDEX."""
        if not self.data.is_padded:
            return self.split.batch_size * self.data.length
        return self.data.target_count(self.global_indices(step, 1))

    def own_target_count(self, step: int, replicas: int) -> int:
        """As `target_count`, of the sequences of one of `replicas` that take local steps: of this rank's."""
        if not self.data.is_padded:
            return self.split.batch_size * self.data.length // replicas
        return self.data.target_count(self.global_indices(step, 1, self.dp_rank % replicas, replicas))

    def batch(self, step: int) -> Batch:
        """Read the batch of a step (from 0), on the CPU."""
        return self.read(step, 1)[0]

    def read(self, first: int, steps: int) -> list[Batch]:
        """Read the batches of `steps` consecutive steps, starting at `first`, in one gather per shard.

        A sequence's sample id depends only on the seed, the step and its position in the global batch; the int64
        sum may wrap.
        """
        indices = self.indices(first, steps)
        tokens = self.data.batch(indices)
        ids = tokens[:, :-1].clamp(min=0) if self.data.is_padded else tokens[:, :-1]
        size = self.split.batch_size
        position = torch.arange(self.dp_rank, size, self.split.dp_size)
        key = key_from_name(f"{self.seed}/sequences")
        sample_ids = torch.arange(first, first + steps)[:, None] * size + position + key
        parts = [ids, self.data.targets(indices, tokens), sample_ids.flatten()]
        if self.mask_documents:
            parts.append(self.data.positions(indices))
        return [Batch(*part) for part in zip(*(t.chunk(steps) for t in parts), strict=True)]
