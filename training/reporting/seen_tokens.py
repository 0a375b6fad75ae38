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
        if unknown := [str(groups.data.folder) for groups in self.groups if not groups.sources]:
            raise UsageError(
                f"metrics.sources is true, but {unknown[0]} does not say which source each document is from; run "
                "tokenize_corpus again, or try --metrics.sources false"
            )
        self.names = sorted({name for groups in self.groups for name in groups.sources})
        self.since = 0
        """The steps up to this one are not counted: a branch whose source read other data has not read them."""
        self._counted, self._found = 0, np.zeros(2 * len(self.sets) + len(self.names), np.int64)

    def after(self, step: int) -> dict[str, Any]:
        """Return what was read until `step`: `sets` if there are several, `sources` if they are known.

        Of each `tokens`, its `share` of them and the share `requested`; of sets also `epochs`. `after_step` is `since`,
        where that is not 0.
        """
        if step <= self.since:
            return {}
        found = {"sets": self._of_sets(step), "sources": self._of_sources(step)}
        parts = {kind: parts for kind, parts in found.items() if parts}
        return {"after_step": self.since, **parts} if parts and self.since else parts

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
        """Sequences of each set."""
        if self.runs > 1:
            found: list[int] = self._count_until(step)[-len(self.sets) :].tolist()
            return found
        return mix.counts_between(*(self.batches.schedule.read(each) for each in (self.since, step)))

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
        """The share of a source in the sets, each by its share of the mix."""
        of = [part.manifest.sources.get(name) for part in self.mix.parts]
        shares = zip(self.mix.shares, of, self.mix.parts, strict=True)
        return sum(share * record.tokens / part.tokens for share, record, part in shares if record)

    def _count_until(self, step: int) -> NDArray[np.int64]:
        """Targets of each set, of each source, and sequences of each set, from `since` until `step`: (n,)."""
        if step < self._counted or self._counted < self.since:
            self._counted, self._found = self.since, np.zeros_like(self._found)
        run = self.batches.dp_rank % self.runs
        steps = max(1, _ROWS // self.batches.split.batch_size)
        for first in range(self._counted, step, steps):
            count = min(steps, step - first)
            self._found += self._count(self.batches.global_indices(first, count, run, self.runs))
        self._counted = step
        return self._found

    def _count(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Count the targets and sequences of `indices` for `_count_until`."""
        found = np.zeros_like(self._found)
        for number, _, rows in self.batches.data.by_set(indices):
            found[number] += self.sets[number].target_count(rows)
            found[number - len(self.sets)] += len(rows)
            if self.groups and (names := self.groups[number].sources):
                places = [len(self.sets) + self.names.index(name) for name in names]
                found[places] += self.groups[number].counts(rows)
        return found
