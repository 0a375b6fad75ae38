"""Batches: the sequences that a data-parallel rank reads in each training step, and their order."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gristmill.errors import UsageError
from gristmill.wording import count_of
from training.data.batch_schedule import BatchSchedule, BatchSplit, Sizes
from training.data.data_config import DataConfig, OrderKind
from training.data.mix import EpochOrder, MixedSequences, MixOrder, MixPlace, SetPlace
from training.data.sequences import Sequences
from training.kernels.cross_entropy import IGNORE_INDEX
from training.kernels.keyed_random import key_from_name
from training.model.batch import TokenBatch


class _Began(NamedTuple):
    """Where a run began to read its data sets."""

    step: int
    place: int
    """In the order of its only set: what runs before have read of it."""


class TargetCounts(NamedTuple):
    """Targets of a step: those over which gradients are averaged, and those that the ranks of this run read.

    Gradients are averaged over the global batch, or over the part of a replica that takes local steps.
    """

    averaged: int
    read: int


class Batches:
    """The batches of one data-parallel rank, as a pure function of the seed, the step and the `schedule` of sizes.

    Of one data set, each epoch has its own permutation. Rank r of n takes its elements r, r + n, r + 2n, …, as torch's
    DistributedSampler does, so a step's global batch is a contiguous run of the permutation and holds the same
    sequences for any n. Sequences beyond the last full batch are left out of that epoch; they differ from epoch to
    epoch. Of a mix of several, the global batches are contiguous runs of its order (see mix.py), which has no end.
    """

    schedule: BatchSchedule
    """The sizes of all steps: by default those of the split."""

    def __init__(
        self,
        data: Sequences,
        split: BatchSplit,
        dp_rank: int,
        seed: int,
        order: OrderKind = "keyed",
        mix: MixOrder | None = None,
        mask_documents: bool = False,
        runs: int = 1,
        replicas: int = 1,
    ) -> None:
        """`mix`: the order of several sets. Raises UsageError where one set has fewer sequences than a global batch.

        `runs` read the parts of each global batch, this one those of rank `dp_rank` mod runs on; `replicas` in all of
        them have gradients of their own: 1, unless they take local steps.
        """
        self.runs = runs
        self.replicas = replicas
        self.data = data
        self.split = split
        self.dp_rank = dp_rank
        self.seed = seed
        self.mix = mix
        self.mask_documents = mask_documents
        self.order = EpochOrder(order, len(data), seed) if mix is None else mix
        self._names = [part.manifest.fingerprint for part in data.sets]
        self._began = _Began(0, 0)
        self.skipped: list[tuple[int, int]] = []  # since the run began with these sets: see `resume`
        self._earlier: dict[str, SetPlace] = {}  # of the checkpoint that this run continues
        self.steps_per_epoch = len(data) // split.batch_size
        self.schedule = BatchSchedule([(0, split.batch_size)], 0 if mix else len(data))
        if self.steps_per_epoch < 1 and mix is None:
            parts = split.dp_size * split.grad_accum_steps
            max_size = len(data) // parts * parts
            smaller_batch = f"--data.batch_size {max_size}, " if max_size else ""
            raise UsageError(
                f"{data.folder} holds {count_of(len(data), 'sequence')} of {data.length} tokens, less than one batch "
                f"of {split.batch_size}; try {smaller_batch}a lower --data.seq_len or more text"
            )

    def plan_sizes(self, config: DataConfig, before: Sizes = (), step: int = 0) -> None:
        """Read as `config` says from `step` on, after steps of the sizes `before`."""
        ramp = [(size, -(-tokens // config.seq_len)) for size, tokens in config.ramp]
        self.schedule = BatchSchedule.plan(before, step, ramp, self.split.batch_size, self.schedule.epoch)

    @property
    def first_step(self) -> int:
        """Return the first step, from 0, whose batch follows from these data sets: those before it read other data."""
        return self._began.step

    def progress(self, step: int) -> MixPlace:
        """Return how far the data sets of this run, and of those that it is a branch of, were read before a step."""
        if isinstance(self.order, MixOrder):
            start = self.order.start
            places = self.order.progress(self.schedule.place(step))
        else:
            start = 0
            places = [self.order.place(self._began.place, self.schedule.end(step))]
        own = dict(zip(self._names, places, strict=True))
        return MixPlace(start, self._earlier | own, self._began.step)

    def resume(self, progress: MixPlace, step: int, anew: bool, skipped: Sequence[tuple[int, int]] = ()) -> None:
        """Go on with the sets of a checkpoint; `anew`: in another mix of sets, which begins at `step`.

        A set that was read before goes on where it stopped, and in the order that it had, also with another seed.
        `skipped`: steps, from 0, and how many sequences are left out before each.
        """
        self._go_on(progress, step, anew)
        self.skipped = [(at, count) for at, count in skipped if at >= self._began.step]
        for at, count in self.skipped:
            self.schedule = self.schedule.beginning_at(at, self.schedule.end(at) + count)

    def _go_on(self, progress: MixPlace, step: int, anew: bool) -> None:
        self._earlier = progress.sets
        began = step if anew else progress.step
        known = progress.sets.get(self._names[0])
        if isinstance(self.order, MixOrder):
            self._began = _Began(began, 0)
            self.order.resume(self._names, progress, self.schedule.place(step) if anew else None)
            return
        if known is None:
            self._began = _Began(began, 0)
        else:
            self._began = _Began(began, known.read if anew else known.before)
            self.order.resume(known)
        if self._began.step:
            self.schedule = self.schedule.beginning_at(*self._began)

    def indices(self, first: int, steps: int = 1) -> NDArray[np.int64]:
        """Return indices of the sequences that this rank reads in `steps` steps from `first` (from 0): (B,) int64."""
        return self.global_indices(first, steps, self.dp_rank, self.split.dp_size)

    def global_indices(self, first: int, steps: int, rank: int = 0, ranks: int = 1) -> NDArray[np.int64]:
        """Return the indices of global batches, or every `ranks`-th one from `rank` on: see `indices`."""
        places = self._each(self.schedule.place, first, steps, rank, ranks)
        if isinstance(self.order, MixOrder):
            return self.order.at(places).numpy()
        epochs = places // len(self.data)
        positions = places % len(self.data)
        sequences = []
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            sequences.append(self.order.at(epoch, positions[epochs == epoch]))
        return torch.cat(sequences).numpy()

    def _each(self, begin: Callable[[int], int], first: int, steps: int, rank: int, ranks: int) -> Tensor:
        """Return the numbers of every `ranks`-th sequence of steps, which `begin` at a number in each step."""
        numbers = []
        for step in range(first, first + steps):
            numbers.append(torch.arange(rank, self.schedule.size(step), ranks) + begin(step))
        return torch.cat(numbers)

    def target_count(self, step: int) -> int:
        """Count the targets of a step (from 0) over which gradients are averaged: all, or those of a replica."""
        return self._count(step, self.replicas)

    def target_counts(self, step: int) -> TargetCounts:
        """Count the targets of a step (from 0)."""
        averaged = self.target_count(step)
        read = averaged if self.runs == self.replicas else self._count(step, self.runs)
        return TargetCounts(averaged, read)

    def _count(self, step: int, parts: int) -> int:
        """Count the targets of a step in this rank's one of `parts`."""
        if not self.data.has_ignored:
            return self.schedule.size(step) * self.data.length // parts
        indices = self.global_indices(step, 1, self.dp_rank % parts, parts)
        return max(1, self.data.target_count(indices))

    def batch(self, step: int) -> TokenBatch:
        """Read the batch of a step (from 0), on the CPU."""
        return self.read(step, 1)[0]

    def read(self, first: int, steps: int) -> list[TokenBatch]:
        """Read the batches of `steps` consecutive steps, starting at `first`, in one gather per shard.

        A sequence's sample id depends only on the seed and the number of sequences read before it; the int64 sum may
        wrap.
        """
        indices = self.indices(first, steps)
        tokens = self.data.batch(indices)
        ids = tokens[:, :-1]
        if self.data.has_ignored:
            ids = ids.clamp(min=0)
        number = self._each(self.schedule.read, first, steps, self.dp_rank, self.split.dp_size)
        sample_ids = number + key_from_name(f"{self.seed}/sequences")
        padding = tokens[:, :-1] == IGNORE_INDEX
        parts = {"ids": ids, "targets": self.data.targets(indices, tokens), "sample_ids": sample_ids}
        if self.mask_documents:
            parts["positions"] = self.data.positions(indices)
        if padding.any():
            parts["padding"] = padding
        if isinstance(self.data, MixedSequences):
            parts["sources"] = torch.from_numpy(self.data.set_of(indices))
        rows = [self.schedule.size(step) // self.split.dp_size for step in range(first, first + steps)]
        split = {name: values.split(rows) for name, values in parts.items()}
        return [TokenBatch(**{name: values[step] for name, values in split.items()}) for step in range(steps)]


_MAX_READ_STEPS = 16  # per read
_MAX_READ_TOKENS = 1 << 20  # per read: 8 MiB of int64
_READS_AHEAD = 4  # of shards in a bucket, where one may take long


class PrefetchLoader:
    """Loads a data-parallel rank's batches; the next ones are read while the model computes with the current ones.

    One read covers `steps_per_read` steps, because handing work to a thread costs more than reading a small batch.
    """

    def __init__(self, batches: Batches, device: torch.device) -> None:
        self.batches = batches
        self.device = device
        split = batches.split
        tokens = split.grad_accum_steps * split.micro_batch_size * batches.data.length  # of this rank, per step
        self.steps_per_read = min(_MAX_READ_STEPS, max(1, _MAX_READ_TOKENS // tokens))
        self._thread = ThreadPoolExecutor(1, "data")
        self._loaded: dict[int, TokenBatch] = {}  # by step
        self._reads_ahead = _READS_AHEAD if any(part.is_remote for part in batches.data.sets) else 1
        self._next: dict[int, Future[list[TokenBatch]]] = {}  # reads in progress, by their first steps

    def batch(self, step: int) -> TokenBatch:
        """Return the batch of a step (from 0) on the device; in any order, but only the next ones are prefetched."""
        if step not in self._loaded:
            if step not in self._next:  # the run continues at another step
                for read in self._next.values():
                    read.cancel()
                self._next = {step: self._thread.submit(self._read, step)}
            self._loaded = dict(enumerate(self._next.pop(step).result(), step))
            for number in range(self._reads_ahead):
                first = step + (number + 1) * self.steps_per_read
                if first not in self._next:
                    self._next[first] = self._thread.submit(self._read, first)
        return self._loaded[step].to(self.device)

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _read(self, first: int) -> list[TokenBatch]:
        batches = self.batches.read(first, self.steps_per_read)
        if self.device.type != "cuda":
            return batches
        return [batch.pin_memory() for batch in batches]
