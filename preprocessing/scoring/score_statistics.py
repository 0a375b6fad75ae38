"""How scores are distributed: sums by source, from which mean, spread, and what explains them follow."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from gristmill.io.documents import DocKey

_MAX_BINS = 64  # classes that have documents
_MAX_CLASS = 1 << 40
_NEAR = 3  # documents on each side of a limit
FEW_DOCUMENTS = 20  # fewer are not compared


class NearLimit(msgspec.Struct, frozen=True, order=True):
    """A document whose score is next to the limit."""

    distance: float
    file: str
    row: int
    score: float
    is_kept: bool

    @property
    def key(self) -> DocKey:
        return DocKey(self.file, self.row)


class ScoreSums(msgspec.Struct):
    """Sums over documents of a source: of their scores, of the logarithms of their lengths, squares and products.

    `bins` are classes of scores that have documents, and how many: class i has the scores from i to i + 1 times
    `width`. `near` are the documents nearest to the `limit`, on both sides of it.
    """

    score: str
    source: str
    documents: int = 0
    total: float = 0.0
    squares: float = 0.0
    min: float = np.inf
    max: float = -np.inf
    lengths: float = 0.0
    length_squares: float = 0.0
    products: float = 0.0
    width: float = 1 / 64
    bins: list[tuple[int, int]] = []
    limit: float | None = None
    near: list[NearLimit] = []

    @property
    def mean(self) -> float:
        return self.total / max(self.documents, 1)

    @property
    def deviation(self) -> float:
        """Return the standard deviation of the scores."""
        return float(np.sqrt(max(self.squares / max(self.documents, 1) - self.mean**2, 0.0)))

    def add(self, scores: NDArray[np.float32], sizes: NDArray[np.int64]) -> None:
        """Add documents with these scores and bytes."""
        if not len(scores):
            return
        values = scores.astype(np.float64)
        lengths = np.log(sizes + 1.0)
        self.documents += len(values)
        self.total += float(values.sum())
        self.squares += float(np.square(values).sum())
        self.min = min(self.min, float(values.min()))
        self.max = max(self.max, float(values.max()))
        self.lengths += float(lengths.sum())
        self.length_squares += float(np.square(lengths).sum())
        self.products += float((values * lengths).sum())
        width = self.width
        while np.abs(values).max() / width > _MAX_CLASS:
            width *= 2
        numbers, counts = np.unique(np.floor(values / width).astype(np.int64), return_counts=True)
        self._merge_bins(width, list(zip(numbers.tolist(), counts.tolist(), strict=True)))

    def add_near(self, limit: float, scores: NDArray[np.float32], file: str, rows: NDArray[np.int64]) -> None:
        """Add documents of a file to the documents next to the limit."""
        self.limit = limit
        distances = scores.astype(np.float64) - limit
        for is_kept in (False, True):
            chosen = np.flatnonzero((distances >= 0) == is_kept)
            nearest = chosen[np.argsort(np.abs(distances[chosen]), kind="stable")[:_NEAR]]
            for i in nearest.tolist():
                near = NearLimit(abs(float(distances[i])), file, int(rows[i]), float(scores[i]), is_kept)
                self.near.append(near)
        self._keep_nearest()

    def classes(self, width: float) -> dict[int, int]:
        """Return the documents of each class of this width, a multiple of the own one by a power of two."""
        joined = dict[int, int]()
        factor = round(width / self.width)
        for number, count in self.bins:
            joined[number // factor] = joined.get(number // factor, 0) + count
        return joined

    def _merge_bins(self, width: float, bins: list[tuple[int, int]]) -> None:
        """Add classes of some width; they are made wider until there are few: in any order of parts the same."""
        other = ScoreSums("", "", width=width, bins=bins)
        common = max(self.width, width)
        while True:
            joined = self.classes(common)
            for number, count in other.classes(common).items():
                joined[number] = joined.get(number, 0) + count
            if len(joined) <= _MAX_BINS:
                break
            common *= 2
        self.width = common
        self.bins = sorted(joined.items())

    def _keep_nearest(self) -> None:
        below = sorted(near for near in self.near if not near.is_kept)
        above = sorted(near for near in self.near if near.is_kept)
        self.near = below[:_NEAR] + above[:_NEAR]

    def merge(self, other: "ScoreSums") -> None:
        """Add the sums of other documents."""
        for name in ("documents", "total", "squares", "lengths", "length_squares", "products"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.min = min(self.min, other.min)
        self.max = max(self.max, other.max)
        self._merge_bins(other.width, other.bins)
        self.limit = other.limit if self.limit is None else self.limit
        self.near = self.near + other.near
        self._keep_nearest()


def join_sums(parts: Iterable[ScoreSums]) -> dict[str, dict[str, ScoreSums]]:
    """Return the sums by score and source, sorted by source."""
    joined: dict[str, dict[str, ScoreSums]] = {}
    for part in parts:
        of_score = joined.setdefault(part.score, {})
        of_score.setdefault(part.source, ScoreSums(part.score, part.source)).merge(part)
    in_order = dict[str, dict[str, ScoreSums]]()
    for score, sources in joined.items():
        in_order[score] = dict(sorted(sources.items()))
    return in_order


def sum_up(sources: Iterable[ScoreSums]) -> ScoreSums:
    """Return the sums of all sources together."""
    whole = ScoreSums("", "")
    for sums in sources:
        whole.merge(sums)
    return whole


def share_of_sources(sources: Sequence[ScoreSums]) -> float:
    """Return which share of the variance of a score the source explains: 0 if it is the same in all."""
    whole = sum_up(sources)
    variance = whole.squares - whole.documents * whole.mean**2
    between = sum(sums.documents * (sums.mean - whole.mean) ** 2 for sums in sources)
    return between / variance if variance > 0 else 0.0


def share_of_length(sources: Sequence[ScoreSums]) -> float:
    """Return which share of the variance of a score the logarithm of the length explains."""
    whole = sum_up(sources)
    count = max(whole.documents, 1)
    variance = whole.squares / count - whole.mean**2
    length = whole.lengths / count
    of_lengths = whole.length_squares / count - length**2
    covariance = whole.products / count - whole.mean * length
    return covariance**2 / (variance * of_lengths) if variance > 0 and of_lengths > 0 else 0.0


def odd_scores(joined: Mapping[str, Mapping[str, ScoreSums]], limit: float) -> Iterator[str]:
    """Yield scores that are constant, or of which the source or the length explains more than `limit`; 0: no limit."""
    for score, by_source in joined.items():
        sources = list(by_source.values())
        whole = sum_up(sources)
        if not limit or whole.documents < FEW_DOCUMENTS:
            continue
        if whole.min == whole.max:
            count = f"all {whole.documents:,} documents"
            yield f"the score {score} is {whole.min:.4g} for {count}: look at its model and label"
            continue
        if len(sources) > 1 and (share := share_of_sources(sources)) > limit:
            ordered = sorted(sources, key=lambda sums: sums.mean)
            ends = [ordered[0], ordered[-1]]
            means = ", ".join(f"{sums.source} {sums.mean:.3f}" for sums in ends)
            yield (
                f"the source explains {share:.0%} of the score {score} (on average {means}), which may tell sources "
                "apart and not good from bad: look at documents on both sides of the limit in one source"
            )
        if (share := share_of_length(sources)) > limit:
            yield (
                f"the length of documents explains {share:.0%} of the score {score}: look at short documents above the "
                "limit, and long ones below it"
            )


def score_table(joined: Mapping[str, Mapping[str, ScoreSums]], kept: Mapping[tuple[str, str], float]) -> Table:
    """Return how each score is distributed in each source; `kept` is the limit by score and source."""
    table = Table("score", "source", box=None)
    for name in ("documents", "mean", "deviation", "min", "max", "limit"):
        table.add_column(name, justify="right")
    for score, by_source in joined.items():
        for source, sums in by_source.items():
            limit = kept.get((score, source), -np.inf)
            shown = "none" if limit == -np.inf else f"{limit:.4g}"
            numbers = [f"{value:.4g}" for value in (sums.mean, sums.deviation, sums.min, sums.max)]
            table.add_row(score, source, f"{sums.documents:,}", *numbers, shown)
    return table
