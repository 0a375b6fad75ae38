"""Tokens seen: what a run has read of each data set and of each source, beside what its mix asks for."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from training.data.batches import Batches
from training.data.mix import TokenMix
from training.data.target_groups import TargetGroups

_ROWS = 1 << 12  # sequences counted at once


class SeenTokens:
    """Counts the targets of the steps of a run; exact, and a function of the seed and the step.

    Of data sets it costs nothing; of sources it reads where the documents of every sequence start, once.
    """

    def __init__(self, batches: Batches, mix: TokenMix, by_source: bool) -> None:
        self.batches, self.mix = batches, mix
        self.groups = [TargetGroups(part) for part in mix.parts] if by_source else []
        self.names = sorted({name for groups in self.groups for name in groups.sources})
        self._counted, self._tokens = 0, np.zeros(len(self.names), np.int64)

    def after(self, step: int) -> dict[str, Any]:
        """What was read in the first `step` steps: `sets` if there are several, `sources` if they are known.

        Of each `tokens`, its `share` of them and the share `requested`; of sets also `epochs`.
        """
        found = {"sets": self._sets(step), "sources": self._sources(step)}
        return {kind: parts for kind, parts in found.items() if parts}

    def _sets(self, step: int) -> dict[str, Any]:
        if self.batches.mix is None or not step:
            return {}
        sequences = step * self.batches.split.batch_size
        counts = self.batches.mix.counts(torch.tensor([sequences]))[:, 0].tolist()
        return {
            str(part.folder): {
                "tokens": count * part.length,
                "share": count / sequences,
                "requested": share,
                "epochs": count / len(part),
            }
            for part, share, count in zip(self.mix.parts, self.mix.shares, counts, strict=True)
        }

    def _sources(self, step: int) -> dict[str, Any]:
        if not self.names or not step:
            return {}
        self._count_until(step)
        total = max(1, int(self._tokens.sum()))
        return {
            name: {"tokens": int(tokens), "share": int(tokens) / total, "requested": self._requested(name)}
            for name, tokens in zip(self.names, self._tokens, strict=True)
        }

    def _requested(self, name: str) -> float:
        """The share of a source in the sets, each by its share of the mix."""
        of = [part.manifest.sources.get(name) for part in self.mix.parts]
        shares = zip(self.mix.shares, of, self.mix.parts, strict=True)
        return sum(share * record.tokens / part.tokens for share, record, part in shares if record)

    def _count_until(self, step: int) -> None:
        if step < self._counted:
            self._counted, self._tokens = 0, np.zeros_like(self._tokens)
        steps = max(1, _ROWS // self.batches.split.batch_size)
        for first in range(self._counted, step, steps):
            self._tokens += self._count(self.batches.global_indices(first, min(steps, step - first)))
        self._counted = step

    def _count(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Targets of each source in sequences of the run: (sources,)."""
        starts = np.cumsum([0] + [len(part) for part in self.mix.parts], dtype=np.int64)
        of, found = np.searchsorted(starts, indices, side="right") - 1, np.zeros(len(self.names), np.int64)
        for number, groups in enumerate(self.groups):
            rows = indices[of == number] - starts[number]
            if len(rows) and groups.sources:
                counts = np.bincount(groups.of(rows).flatten().numpy(), minlength=groups.count)
                found[[self.names.index(name) for name in groups.sources]] += counts
        return found
