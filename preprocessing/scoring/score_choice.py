"""Documents that a score keeps, and how often: from a limit, by bands with weights, or by chance along a curve."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from gristmill.errors import InputError, require
from preprocessing.scoring.score_ranks import GroupRanks, ScoreRanks

_MAX_WEIGHT = 1_000
ALL = "*"  # the group of all sources; no source has this name


@dataclass(frozen=True)
class Band:
    """The documents whose score is at least `min`, or at least a `quantile`, and that are in no better band.

    The lowest has neither. `weight` multiplies that of the source in the mix; documents of a band without one go.
    """

    name: str
    weight: float = 1.0
    min: float | None = None
    quantile: float | None = None


@dataclass(frozen=True)
class Choice:
    """Documents that a score keeps: those from `min` to `max`, or from a `quantile` of a source or, `of_all`, of all.

    Or by chance, the chance being that of the score on the curve `keep`: points of score and chance, straight between
    them. Or all but those of `bands`, the lowest first, that have no weight. `fact` is the score's name in the facts,
    `name` the one in its table. Of an ensemble `members` are the names in the facts of the scores that it joins.
    """

    name: str
    fact: str
    min: float | None = None
    quantile: float | None = None
    of_all: bool = False
    bands: tuple[Band, ...] = ()
    keep: tuple[tuple[float, float], ...] = ()
    max: float | None = None
    members: tuple[str, ...] = ()

    @property
    def facts(self) -> tuple[str, ...]:
        """Return the names in the facts of the scores that are read."""
        return self.members or (self.fact,)

    @property
    def reason(self) -> str:
        """Return the reason under which documents go."""
        return f"low {self.name}" if self.max is None else f"{self.name} out of bounds"

    @property
    def quantiles(self) -> tuple[float, ...]:
        """Return the quantiles that limits are looked for at."""
        quantiles = list[float]()
        if self.quantile is not None:
            quantiles.append(self.quantile)
        for band in self.bands:
            if band.quantile is not None:
                quantiles.append(band.quantile)
        return tuple(quantiles)

    def group(self, source: str) -> str:
        """Return the group whose quantile decides on documents of a source."""
        return ALL if self.of_all else source


class Cut(msgspec.Struct, frozen=True):
    """The limit that a quantile of a score gives to the documents of a group, a source or ALL."""

    name: str
    group: str
    quantile: float
    limit: float


class Cuts:
    """The limits that quantiles give."""

    def __init__(self, cuts: Sequence[Cut]) -> None:
        self._limits = dict[tuple[str, str, float], float]()  # by name, group and quantile
        for cut in cuts:
            self._limits[cut.name, cut.group, cut.quantile] = cut.limit

    def limit(self, choice: Choice, source: str) -> float:
        """Return below which score documents of a source go: of the lowest band with a weight, if there are bands."""
        for number, band in enumerate(choice.bands):
            if band.weight > 0:
                return self.band_limits(choice, source)[number - 1] if number else -np.inf
        return self._limit(choice, source, choice.min, choice.quantile)

    def band_limits(self, choice: Choice, source: str) -> list[float]:
        """Return the limits between the bands of a source, ascending."""
        return [self._limit(choice, source, band.min, band.quantile) for band in choice.bands[1:]]

    def _limit(self, choice: Choice, source: str, min_score: float | None, quantile: float | None) -> float:
        if quantile is not None:
            return self._limits[choice.name, choice.group(source), quantile]
        return -np.inf if min_score is None else min_score


def is_kept(
    choice: Choice, cuts: Cuts, source: str, scores: NDArray[np.float32], digests: NDArray[np.uint64]
) -> NDArray[np.bool_]:
    """Return whether each document (n) of a source is kept, given its score and, for a curve, 64 bits of its digest.

    The digest is what decides by chance: the same for the same text, whatever else is in the corpus.
    """
    values = scores.astype(np.float64)
    if choice.keep:
        points = np.array(choice.keep, np.float64)
        chance: NDArray[np.float64] = np.interp(values, points[:, 0], points[:, 1])
        return digests.astype(np.float64) < chance * 2.0**64
    if not choice.bands:
        kept: NDArray[np.bool_] = values >= cuts.limit(choice, source)
        if choice.max is not None:
            kept &= values <= choice.max
        return kept
    weights = np.array([band.weight for band in choice.bands])
    bands = np.searchsorted(np.array(cuts.band_limits(choice, source)), values, side="right")
    has_weight: NDArray[np.bool_] = weights[bands] > 0
    return has_weight


class ScoreBands(msgspec.Struct, frozen=True):
    """The bands of a score, the lowest first, their weights, and the limits between them in each source."""

    score: str
    facts: tuple[str, ...]
    names: tuple[str, ...]
    weights: tuple[float, ...]
    limits: dict[str, tuple[float, ...]]
    ranks: dict[str, GroupRanks] = {}  # of an ensemble, by source

    @classmethod
    def of(cls, choice: Choice, cuts: Cuts, sources: Sequence[str], ranks: ScoreRanks | None = None) -> "ScoreBands":
        """Return the bands of a choice, and of an ensemble the `ranks` that it is made of."""
        names = tuple(band.name for band in choice.bands)
        weights = tuple(band.weight for band in choice.bands)
        limits = dict[str, tuple[float, ...]]()
        ranks_of_sources = dict[str, GroupRanks]()
        for source in sources:
            limits[source] = tuple(cuts.band_limits(choice, source))
            if choice.members and ranks:
                ranks_of_sources[source] = ranks.groups[choice.group(source)]
        return cls(choice.name, choice.facts, names, weights, limits, ranks_of_sources)

    @classmethod
    def read(cls, path: Path) -> "ScoreBands":
        """Read the bands that choose_by_score wrote. InputError for a file that is none of them."""
        from gristmill.storage.files import read_file  # here, as steps on documents import this file

        try:
            return msgspec.json.decode(read_file(path), type=cls)
        except msgspec.DecodeError as error:
            raise InputError(
                f"{path}: expected the bands of a score, as choose_by_score writes them ({error})"
            ) from error

    def of_source(self, source: str) -> "ScoreBands":
        """Return the bands with what is known of one source alone."""
        limits = {source: self.limits[source]} if source in self.limits else {}
        ranks = {source: self.ranks[source]} if source in self.ranks else {}
        return ScoreBands(self.score, self.facts, self.names, self.weights, limits, ranks)

    def find(self, source: str, scores_of: Mapping[str, NDArray[np.float32]]) -> NDArray[np.int64]:
        """Return the number of the band of each document (n) of a source, by its scores: each of `facts` (n)."""
        limits = np.array(self.limits.get(source, ()), np.float64)
        scores = self.ranks[source].mean(scores_of) if source in self.ranks else scores_of[self.facts[0]]
        return np.searchsorted(limits, scores.astype(np.float64), side="right").astype(np.int64)


def check_choice(table: str, bands: Mapping[str, "BandTable"], keep: Sequence[tuple[float, float]]) -> None:
    """Raise UsageError for bands or a curve of a table, as messages name it, that cannot be."""
    if bands:
        _check_bands(table, bands)
    if keep:
        _check_curve(table, keep)


def _check_bands(table: str, bands: Mapping[str, "BandTable"]) -> None:
    limits = list[float]()
    quantiles = list[float]()
    weights = list[float]()
    for band in bands.values():
        weights.append(band.weight)
        if band.min is not None:
            limits.append(band.min)
        if band.quantile is not None:
            quantiles.append(band.quantile)
    require(
        not (limits and quantiles) and len(set(limits + quantiles)) == len(bands) - 1 >= 1,
        f"{table}: expected two bands or more, one without a limit and the others each with another min, or each "
        f"with another quantile, got {', '.join(bands)}; such as high = {{quantile = 0.9}}, low = {{}}",
    )
    require(all(map(isfinite, limits)), f"{table}: expected a finite min of each band")
    require(all(0 < quantile < 1 for quantile in quantiles), f"{table}: expected quantiles between 0 and 1")
    are_weights = all(0 <= weight <= _MAX_WEIGHT for weight in weights)
    require(
        are_weights and any(weights),
        f"{table}: expected weights of bands from 0 to {_MAX_WEIGHT:,}, one of them above 0",
    )


def _check_curve(table: str, points: Sequence[tuple[float, float]]) -> None:
    scores, chances = zip(*points, strict=True)
    require(
        len(points) >= 2 and all(map(isfinite, scores)) and sorted(set(scores)) == list(scores),
        f"{table}: keep: expected two points or more of ascending scores, such as [[0.2, 0.0], [0.8, 1.0]]",
    )
    require(
        all(0 <= chance <= 1 for chance in chances),
        f"{table}: keep: expected chances from 0 to 1, the second number of each point",
    )


def parse_bands(tables: Mapping[str, "BandTable"]) -> tuple[Band, ...]:
    """Return the bands of a table, the lowest first."""
    bands = list[Band]()
    for name, table in tables.items():
        bands.append(Band(name, table.weight, table.min, table.quantile))
    bands.sort(key=_limit_of)
    return tuple(bands)


def _limit_of(band: Band) -> float:
    """Return the min or the quantile of a band; the lowest number if it has neither."""
    if band.min is not None:
        return band.min
    if band.quantile is not None:
        return band.quantile
    return -np.inf


class BandTable(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A table [scores.NAME.bands.BAND] of a run's TOML; see Band."""

    weight: float = 1.0
    min: float | None = None
    quantile: float | None = None
