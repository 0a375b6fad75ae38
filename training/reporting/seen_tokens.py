"""Tokens seen: what a run has read of each data set and of each source, and what its mix asks for."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gristmill.errors import UsageError
from training.data.batches import Batches
from training.data.mix import MixOrder, TokenMix
from training.data.target_groups import TargetGroups

_ROWS = 1 << 12  # sequences counted at once


class SeenTokens:
    """Counts the targets of the steps of a run; exact, and a function of the seed and the step.

    Of one of several runs that share the batches: the targets of its parts of them.

    Of data sets in windows it costs nothing. Of packed ones it reads the plan of every sequence, and of sources where
    its documents start, once.
    """

    def __init__(self, batches: Batches, mix: TokenMix, by_source: bool) -> None:
        """Raises UsageError for `by_source` where a data set does not know the sources of its documents."""
        self.batches = batches
        self.mix = mix
        self.sets = batches.data.sets
        self.runs = batches.runs
        self.groups = [TargetGroups(part) for part in self.sets] if by_source else []
        names = set[str]()
        for groups in self.groups:
            if not groups.sources:
                raise UsageError(
                    f"metrics.sources is true, but {groups.data.folder} does not say which source each document is "
                    "from; run tokenize_corpus again, or try --metrics.sources false"
                )
            names.update(groups.sources)
        self.names = sorted(names)
        self.since = 0
        """The steps up to this one are not counted: a branch whose source read other data has not read them."""
        self._counted = 0
        self._counts = self._no_counts()

    def after(self, step: int) -> dict[str, Any]:
        """Return what was read until `step`: `sets` if there are several, `sources` if they are known.

        Of each `tokens`, its `share` of them and the share `requested`; of sets also `epochs`. `after_step` is `since`,
        where that is not 0.
        """
        if step <= self.since:
            return {}
        of_kinds = {"sets": self._of_sets(step), "sources": self._of_sources(step)}
        seen = dict[str, Any]()
        for kind, values in of_kinds.items():
            if values:
                seen[kind] = values
        if seen and self.since:
            return {"after_step": self.since, **seen}
        return seen

    def _of_sets(self, step: int) -> dict[str, Any]:
        if self.batches.mix is None:
            return {}
        read = self._sequences(self.batches.mix, step)
        if self.batches.data.has_ignored:
            tokens = self._count_until(step)[: len(self.sets)].tolist()
        else:
            tokens = [sequences * part.length for sequences, part in zip(read, self.sets, strict=True)]
        return {
            str(part.folder): {
                "tokens": count,
                "share": count / sum(tokens),
                "requested": share,
                "epochs": sequences / len(part),
            }
            for part, share, count, sequences in zip(self.sets, self.mix.shares, tokens, read, strict=True)
        }

    def _sequences(self, mix: MixOrder, step: int) -> list[int]:
        """Return the sequences of each set."""
        if self.runs > 1:
            sequences: list[int] = self._count_until(step)[-len(self.sets) :].tolist()
            return sequences
        first = self.batches.schedule.read(self.since)
        last = self.batches.schedule.read(step)
        return mix.counts_between(first, last)

    def _of_sources(self, step: int) -> dict[str, Any]:
        if not self.names:
            return {}
        tokens = self._count_until(step)[len(self.sets) : -len(self.sets)]
        total = max(1, int(tokens.sum()))
        return {
            name: {"tokens": int(count), "share": int(count) / total, "requested": self._requested(name)}
            for name, count in zip(self.names, tokens, strict=True)
        }

    def _requested(self, name: str) -> float:
        """Return the share of a source in the sets, each by its share of the mix."""
        requested = 0.0
        for share, part in zip(self.mix.shares, self.mix.parts, strict=True):
            record = part.manifest.sources.get(name)
            if record:
                requested += share * record.tokens / part.tokens
        return requested

    def _count_until(self, step: int) -> NDArray[np.int64]:
        """Count targets of each set, of each source, and sequences of each set, from `since` until `step`: (n,)."""
        if step < self._counted or self._counted < self.since:
            self._counted = self.since
            self._counts = self._no_counts()
        run = self.batches.dp_rank % self.runs
        steps = max(1, _ROWS // self.batches.split.batch_size)
        for first in range(self._counted, step, steps):
            count = min(steps, step - first)
            self._counts += self._count(self.batches.global_indices(first, count, run, self.runs))
        self._counted = step
        return self._counts

    def _no_counts(self) -> NDArray[np.int64]:
        return np.zeros(2 * len(self.sets) + len(self.names), np.int64)

    def _count(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Count the targets and sequences of `indices` for `_count_until`."""
        counts = self._no_counts()
        for number, _, rows in self.batches.data.by_set(indices):
            counts[number] += self.sets[number].target_count(rows)
            counts[number - len(self.sets)] += len(rows)
            if self.groups and self.groups[number].sources:
                positions = [len(self.sets) + self.names.index(name) for name in self.groups[number].sources]
                counts[positions] += self.groups[number].counts(rows)
        return counts
