"""Ensembles of scores: the mean of a document's ranks by several scores, which may have any scales.

A rank is the share of the documents of a group, a source or all, that score lower, counting half of those that score
the same. It is known to a thousandth, from the quantiles of the group.
"""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

GRID = tuple(number / 1000 for number in range(1001))
"""The quantiles that ranks are found by."""


class GroupRanks(msgspec.Struct, frozen=True):
    """The scores at the quantiles GRID of a group, by the score's name in the facts."""

    quantiles: dict[str, tuple[float, ...]]

    def mean(self, scores: Mapping[str, NDArray[np.float32]]) -> NDArray[np.float32]:
        """Return the mean rank (n), from 0 to 1, of n documents by their scores, each (n)."""
        ranks = np.stack([self._rank(fact, values) for fact, values in scores.items()])
        return ranks.mean(axis=0).astype(np.float32)

    def _rank(self, fact: str, scores: NDArray[np.float32]) -> NDArray[np.float64]:
        quantiles = np.array(self.quantiles[fact], np.float64)
        lower = np.searchsorted(quantiles, scores.astype(np.float64), side="left")
        not_higher = np.searchsorted(quantiles, scores.astype(np.float64), side="right")
        ranks: NDArray[np.float64] = (lower + not_higher) / (2 * len(quantiles))
        return ranks


class ScoreRanks(msgspec.Struct, frozen=True):
    """The ranks of all groups that ensembles need."""

    groups: dict[str, GroupRanks]

    @classmethod
    def of(cls, limits: Mapping[str, Mapping[str, Sequence[float]]]) -> "ScoreRanks":
        """Return ranks from the scores at the quantiles GRID, by group and score."""
        groups = dict[str, GroupRanks]()
        for group, by_score in limits.items():
            groups[group] = GroupRanks({fact: tuple(values) for fact, values in by_score.items()})
        return cls(groups)
