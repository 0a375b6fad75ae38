"""Similarity kernels against fractions as Python divides them and sets as Python intersects them."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dedup.removal.similarity import (
    SimilarityCheck,
    _count_shared,
    _fewest_shared,
    pairwise_jaccard,
)
from gristmill.errors import UsageError
from tests.dedup.removal.clustered_corpus import shingles


@given(one=st.integers(1, 60), other=st.integers(1, 60), contained=st.booleans(), threshold=st.floats(1e-6, 1.0))
@example(one=10, other=8, contained=False, threshold=0.8)
@example(one=5, other=5, contained=True, threshold=0.6)
def test_the_fewest_shared_shingles_that_reach_the_threshold(
    one: int, other: int, contained: bool, threshold: float
) -> None:
    enough = [n for n in range(1, min(one, other) + 1) if n / (one if contained else one + other - n) >= threshold]
    needed = _fewest_shared(one, other, contained, threshold)
    assert needed == enough[0] if enough else needed > min(one, other)


_SETS = st.frozensets(st.integers(0, 40) | st.integers(2**64 - 5, 2**64 - 1))


@given(one=_SETS, other=_SETS, wanted=st.integers(1, 40))
def test_counting_stops_only_if_too_few_are_shared(one: frozenset, other: frozenset, wanted: int) -> None:
    if wanted > min(len(one), len(other)):
        return
    found = _count_shared(np.array(sorted(one), np.uint64), np.array(sorted(other), np.uint64), wanted)
    shared = len(one & other)
    assert found == shared if shared >= wanted else found < wanted


@pytest.mark.parametrize(("measure", "threshold"), [("cosine", 0.8), ("jaccard", 0.0), ("jaccard", 1.01)])
def test_unknown_measures_and_impossible_thresholds(measure: str, threshold: float) -> None:
    with pytest.raises(UsageError, match="wanted"):
        SimilarityCheck(measure, threshold, 13, "character")  # type: ignore[arg-type]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.none() | st.text("ab é,", max_size=20), min_size=1, max_size=6))
def test_similarities_are_those_of_plain_sets(texts: list[str | None]) -> None:
    found = pairwise_jaccard(texts, 2, "character")
    sets = [shingles(text or "", 2) for text in texts]
    expected = [[len(a & b) / len(a | b) if a and b else np.nan for b in sets] for a in sets]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
