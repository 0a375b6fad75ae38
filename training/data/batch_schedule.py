"""How many sequences each step and each micro-batch read, and where a step's begin in the order of the data."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from gristmill.errors import require
from training.data.data_config import DataConfig
from training.parallel.layout import Layout

Sizes = Sequence[tuple[int, int]]
"""Batch sizes of a run: the first step of each, from 0, and its sequences per step."""


class _Segment(NamedTuple):
    """Steps of one batch size."""

    step: int
    """The first one, from 0."""
    size: int
    """Sequences of each global batch."""
    read: int
    """Sequences read before."""
    place: int
    """Position in the order of the sequence after the last one read."""


class BatchSchedule:
    """The global batches of a run as parts of one order of sequences, whatever their sizes: no repeat and no gap.

    The order of one data set is epoch after epoch. A batch lies in one epoch: the sequences at its end that do not fill
    a batch are left out. The order of a mix has no end, and its batches follow each other.
    """

    def __init__(self, sizes: Sizes, epoch: int) -> None:
        """`sizes` by ascending first steps, from 0 on. `epoch`: sequences of an epoch; 0: the order has no end."""
        self.epoch = epoch
        self._segments: list[_Segment] = []
        for step, size in sizes:
            if not self._segments:
                self._segments.append(_Segment(step, size, 0, 0))
            elif size != self._segments[-1].size:
                self._segments.append(_Segment(step, size, self.read(step), self.end(step)))

    def beginning_at(self, step: int, place: int) -> "BatchSchedule":
        """Return these sizes with the batch of `step` at `place` of the order, or in the next epoch if it does not fit.

        Where the steps before are in this order is unknown: they have read other data.
        """
        schedule = BatchSchedule([], self.epoch)
        before = [segment for segment in self._segments if segment.step < step]
        schedule._segments = [*before, _Segment(step, self.size(step), self.read(step), place)]
        for segment in self._segments:
            if segment.step > step:
                read = self.read(segment.step)
                end = schedule.end(segment.step)
                schedule._segments.append(_Segment(segment.step, segment.size, read, end))
        return schedule

    @classmethod
    def plan(cls, before: Sizes, step: int, ramp: Sequence[tuple[int, int]], size: int, epoch: int) -> "BatchSchedule":
        """Return the sizes `before` until `step`; then those of a `ramp`, and at last `size`.

        `ramp`: sizes, each until so many sequences were read in the whole run.
        """
        sizes = list(before)
        read = cls(before, epoch).read(step) if before else 0
        for each, until in ramp:
            if (steps := -(-(until - read) // each)) > 0:
                sizes.append((step, each))
                step = step + steps
                read = read + steps * each
        return cls([*sizes, (step, size)], epoch)

    def size(self, step: int) -> int:
        """Return the sequences of the global batch of a step, from 0."""
        return self._segment(step).size

    def read(self, step: int) -> int:
        """Return the sequences that were read before a step."""
        segment = self._segment(step)
        return segment.read + (step - segment.step) * segment.size

    def place(self, step: int) -> int:
        """Return where in the order the batch of a step begins."""
        end = self.end(step)
        size = self.size(step)
        beyond = end % self.epoch + size > self.epoch if self.epoch else False
        return (end // self.epoch + 1) * self.epoch if beyond else end

    def until(self, step: int) -> list[tuple[int, int]]:
        """Return the batch sizes of the steps before `step`."""
        return [(first, size) for first, size in self._sizes() if first < step]

    def describe(self) -> str:
        """Return the sizes in words; nothing for one size.

        >>> BatchSchedule([(0, 8), (100, 16), (150, 32)], 0).describe()
        'sequences per step: 8 until step 100, 16 until step 150, then 32'
        """
        sizes = self._sizes()
        changes = [f"{size} until step {after}" for (_, size), (after, _) in pairwise(sizes)]
        return f"sequences per step: {', '.join(changes)}, then {sizes[-1][1]}" if changes else ""

    def _sizes(self) -> list[tuple[int, int]]:
        """Return the first step of each batch size, and the size."""
        sizes: list[tuple[int, int]] = []
        for segment in self._segments:
            if not sizes or segment.size != sizes[-1][1]:
                sizes.append((segment.step, segment.size))
        return sizes

    def _segment(self, step: int) -> _Segment:
        return self._segments[bisect_right(self._segments, step, key=lambda segment: segment.step) - 1]

    def end(self, step: int) -> int:
        """Return where in the order the last batch before `step` ends."""
        first, size, _, place = self._segment(step)
        steps = step - first
        fitting = (self.epoch - place % self.epoch) // size if self.epoch else steps
        if steps <= fitting or size > self.epoch:  # larger than an epoch: read from other data
            return place + steps * size
        epochs, last = divmod(steps - fitting - 1, self.epoch // size)
        return (place // self.epoch + 1 + epochs) * self.epoch + (last + 1) * size


@dataclass(frozen=True)
class BatchSplit:
    """Split of the global batch: `dp_size` replicas x `grad_accum_steps` micro-batches x `micro_batch_size` sequences.

    With a pipeline, the `grad_accum_steps` micro-batches are those that its schedule interleaves.
    """

    dp_size: int
    grad_accum_steps: int
    micro_batch_size: int

    @classmethod
    def of(cls, config: DataConfig, layout: Layout, runs: int = 1) -> "BatchSplit":
        """Split `data.batch_size` for a resolved layout, or for `runs` replicas that have one each.

        Raises UsageError if it, or a size of `data.batch_ramp`, does not divide evenly.
        """
        parts = runs * layout.dp * layout.micro_batches
        rows = layout.batch_shards
        by_runs = f"replicas.count {runs} x " if runs > 1 else ""
        by_rows = f" x {rows} rows of {' '.join(layout.describe_tensor())}" if rows > 1 else ""
        sizes = [("batch_size", config.batch_size, ""), *(("batch_ramp", *each) for each in config.ramp)]
        for option, size, until in sizes:
            require(
                size % (parts * rows) == 0,
                f"data.{option} {size} is not divisible by {by_runs}parallel.dp {layout.dp} x "
                f"parallel.micro_batches {layout.micro_batches}{by_rows}; try --data.{option} "
                f"{-(-size // (parts * rows)) * parts * rows}{until and f':{until}'}",
            )
        return cls(runs * layout.dp, layout.micro_batches, config.batch_size // parts)

    @property
    def batch_size(self) -> int:
        """Return the sequences per step over all ranks, at the end of a ramp."""
        return self.dp_size * self.grad_accum_steps * self.micro_batch_size
