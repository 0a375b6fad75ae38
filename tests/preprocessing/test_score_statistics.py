"""What explains a score: sums of parts give NumPy's figures, and scores that say nothing of quality are told."""

import numpy as np
import pytest

from preprocessing.scoring.score_statistics import (
    ScoreSums,
    join_sums,
    odd_scores,
    share_of_length,
    share_of_sources,
    sum_up,
)

Parts = dict[str, tuple[np.ndarray, np.ndarray]]


def sums_of(parts: Parts, pieces: int = 3) -> dict[str, dict[str, ScoreSums]]:
    found = []
    for source, (scores, sizes) in parts.items():
        for piece in range(pieces):
            sums = ScoreSums("edu", source)
            sums.add(scores[piece::pieces].astype(np.float32), sizes[piece::pieces])
            found.append(sums)
    return join_sums(found)


@pytest.fixture
def parts() -> Parts:
    random = np.random.default_rng(2)
    return {
        name: (random.random(200) + shift, random.integers(10, 9000, 200)) for name, shift in (("a", 0), ("b", 0.1))
    }


def test_sums_of_parts_give_numpys_figures(parts: Parts) -> None:
    joined = sums_of(parts)["edu"]
    scores = np.concatenate([own.astype(np.float32) for own, _ in parts.values()]).astype(np.float64)
    lengths = np.log(np.concatenate([sizes for _, sizes in parts.values()]) + 1.0)
    whole = sum_up(joined.values())
    assert whole.mean == pytest.approx(scores.mean()) and whole.deviation == pytest.approx(scores.std())
    assert (whole.min, whole.max, whole.documents) == (scores.min(), scores.max(), 400)
    sources = list(joined.values())
    assert share_of_length(sources) == pytest.approx(np.corrcoef(scores, lengths)[0, 1] ** 2)
    is_a = np.arange(400) < 200
    assert share_of_sources(sources) == pytest.approx(np.corrcoef(scores, is_a)[0, 1] ** 2)  # of two groups
    assert list(odd_scores({"edu": joined}, 0.5)) == []


def test_scores_that_say_nothing_of_quality_are_told(parts: Parts) -> None:
    same = {name: (np.full(200, 0.25), sizes) for name, (_, sizes) in parts.items()}
    assert list(odd_scores(sums_of(same), 0.5)) == [
        "the score edu is 0.25 for all 400 documents: look at its model and label"
    ]
    apart = {name: (scores * 0.1 + (name == "b"), sizes) for name, (scores, sizes) in parts.items()}
    (line,) = odd_scores(sums_of(apart), 0.5)
    assert line.startswith("the source explains 100% of the score edu (on average a 0.0")
    long = {name: (np.log(sizes + 1.0) / 10, sizes) for name, (_, sizes) in parts.items()}
    (line,) = odd_scores(sums_of(long), 0.5)
    assert line.startswith("the length of documents explains 100% of the score edu")
    assert list(odd_scores(sums_of(long), 0)) == []


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e30])
def test_distributions_are_the_same_in_any_order_of_parts(scale: float) -> None:
    values = (np.random.default_rng(3).normal(size=900) * scale).astype(np.float32)
    parts = np.array_split(values, 7)
    found = []
    for order in (range(7), range(6, -1, -1)):
        whole = ScoreSums("edu", "web")
        for number in order:
            part = ScoreSums("edu", "web")
            part.add(parts[number], np.ones(len(parts[number]), np.int64))
            part.add_near(0.0, parts[number], "web/a", np.arange(900, dtype=np.int64)[: len(parts[number])])
            whole.merge(part)
        found.append((whole.width, whole.bins, whole.near))
    assert found[0] == found[1]
    width, bins, near = found[0]
    assert sum(count for _, count in bins) == 900 and len(bins) <= 64
    numbers, counts = np.unique(np.floor(values.astype(np.float64) / width), return_counts=True)
    assert bins == list(zip(numbers.astype(int).tolist(), counts.tolist(), strict=True))
    expected = sorted(abs(float(value)) for value in values if value < 0)[:3]
    assert [one.distance for one in near if not one.is_kept] == expected
