"""Similarity kernels against fractions as Python divides them and sets as Python intersects them."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dedup.cluster_graph import pairwise_jaccard
from dedup.clustering.similarity import KeptSets, SimilarityCheck, count_shared, fewest_shared
from gristmill.errors import UsageError
from tests.dedup.removal.clustered_corpus import shingles


@given(one=st.integers(1, 60), other=st.integers(1, 60), contained=st.booleans(), threshold=st.floats(1e-6, 1.0))
@example(one=10, other=8, contained=False, threshold=0.8)
@example(one=5, other=5, contained=True, threshold=0.6)
def test_the_fewest_shared_shingles_that_reach_the_threshold(
    one: int, other: int, contained: bool, threshold: float
) -> None:
    enough = [n for n in range(1, min(one, other) + 1) if n / (one if contained else one + other - n) >= threshold]
    needed = fewest_shared(one, other, contained, threshold)
    assert needed == enough[0] if enough else needed > min(one, other)


_SETS = st.frozensets(st.integers(0, 40) | st.integers(2**64 - 5, 2**64 - 1))


@given(one=_SETS, other=_SETS, wanted=st.integers(1, 40))
def test_counting_stops_only_if_too_few_are_shared(one: frozenset, other: frozenset, wanted: int) -> None:
    if wanted > min(len(one), len(other)):
        return
    found = count_shared(np.array(sorted(one), np.uint64), np.array(sorted(other), np.uint64), wanted)
    shared = len(one & other)
    assert found == shared if shared >= wanted else found < wanted


@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 2**32), contained=st.booleans(), threshold=st.sampled_from([0.05, 0.5, 0.77, 0.8, 0.99, 1.0])
)
def test_the_first_match_is_that_of_plain_sets(seed: int, contained: bool, threshold: float) -> None:
    """Sets of one to thousands of shingles, which differ in few, some or all from one of them."""
    chance = np.random.default_rng(seed)
    pool = chance.integers(0, 2**64, 6000, np.uint64)
    kept, sets = KeptSets(contained, threshold, 1 << 30), list[set[int]]()
    for _ in range(25):
        size, share = int(chance.choice([1, 9, 300, 3000])), chance.choice([0.0, 0.1, 0.2, 0.25, 0.9])
        chosen = np.where(chance.random(size) < share, chance.choice(pool, size), pool[:size])
        shingles = np.unique(chosen)
        similar = [
            (number, shared / (len(shingles) if contained else len(shingles) + len(one) - shared))
            for number, one in enumerate(sets)
            if (shared := len(one.intersection(shingles.tolist())))
        ]
        expected = next(((number, found) for number, found in similar if found >= threshold), (-1, 0.0))
        assert kept.first_match(shingles) == expected
        assert kept.add(shingles)
        sets.append(set(shingles.tolist()))


@pytest.mark.parametrize(("measure", "threshold"), [("cosine", 0.8), ("jaccard", 0.0), ("jaccard", 1.01)])
def test_unknown_measures_and_impossible_thresholds(measure: str, threshold: float) -> None:
    with pytest.raises(UsageError, match="expected"):
        SimilarityCheck(measure, threshold, 13, "character")  # type: ignore[arg-type]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.none() | st.text("ab é,", max_size=20), min_size=1, max_size=6))
def test_similarities_are_those_of_plain_sets(texts: list[str | None]) -> None:
    found = pairwise_jaccard(texts, 2, "character")
    sets = [shingles(text or "", 2) for text in texts]
    expected = [[len(a & b) / len(a | b) if a and b else np.nan for b in sets] for a in sets]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
