"""Verification against a plain reference: sets of strings, fractions as Python divides them, no shortcut."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dedup.minhash.shingles import shingle_sets
from dedup.removal.verify import KeptSets, _shared, _wanted, check_measure, judge
from gristmill.errors import UsageError
from gristmill.text import matching_form

WIDTH = 3
THRESHOLDS = [0.1, 1 / 3, 0.5, 0.6, 2 / 3, 0.8, 0.9, 1.0]
# Sentences of few words: whatever is drawn, some resemble others, exactly at a threshold too.
_WORDS = st.sampled_from(["grain", "flour", "mill", "wheel", "Water!", "каша", "粉ひき", "a", ""])
_TEXTS = st.lists(st.lists(_WORDS, max_size=12).map(" ".join), max_size=14)


def shingles(text: str) -> set[str]:
    form = matching_form(text)
    return {form[i : i + WIDTH] for i in range(len(form) - WIDTH + 1)}


def similarity(measure: str, one: set[str], other: set[str]) -> float:
    whole = one if measure == "containment" else one | other
    return len(one & other) / len(whole) if whole else 0.0


def reference(texts: list[str], measure: str, threshold: float) -> list[tuple[int, int, float]]:
    found, kept, sets = [], [], [shingles(text) for text in texts]
    for i in range(len(texts)):
        matches = [(j, similarity(measure, sets[i], sets[j])) for j in kept]
        match = next((match for match in matches if match[1] >= threshold), None)
        if match is None:
            kept.append(i)
        found.append((i, *(match or (i, 1.0))))
    return found


def in_rounds(texts: list[str], kept: KeptSets) -> tuple[list[tuple[int, int, float]], int]:
    """What `judge` says of all texts, round after round, and how many rounds it took."""
    sets, found, rounds = shingle_sets(texts, WIDTH), [], 0
    left = list(range(len(texts)))
    while left:
        kept.clear()
        judged = list(judge([(i, sets[i]) for i in left], kept))
        found += [verdict for verdict in judged if verdict[1] is not None]
        left = [i for i, by, _ in judged if by is None]
        rounds += 1
    return sorted(found), rounds


@settings(max_examples=300)
@given(texts=_TEXTS, measure=st.sampled_from(["jaccard", "containment"]), threshold=st.sampled_from(THRESHOLDS))
@example(texts=["", "", "ab", "ab"], measure="jaccard", threshold=0.1)
@example(texts=["mill flour grain", "mill flour", "mill flour grain"], measure="containment", threshold=1.0)
def test_equals_the_reference(texts: list[str], measure: str, threshold: float) -> None:
    found, rounds = in_rounds(texts, KeptSets(measure, threshold))
    assert found == reference(texts, measure, threshold)
    assert rounds == min(1, len(texts))


@settings(max_examples=150)
@given(texts=_TEXTS, measure=st.sampled_from(["jaccard", "containment"]), room=st.integers(0, 3000))
def test_rounds_change_nothing(texts: list[str], measure: str, room: int) -> None:
    assert in_rounds(texts, KeptSets(measure, 0.6, room))[0] == reference(texts, measure, 0.6)


def test_without_room_there_is_a_round_for_each_kept_document() -> None:
    texts = ["grain grain", "flour flour", "a much longer sentence about mills", "x y z", "Flour, flour"]
    found, rounds = in_rounds(texts, KeptSets("jaccard", 0.5, room=0))
    assert [by for _, by, _ in found] == [0, 1, 2, 3, 1]
    assert rounds == 4


def test_a_chain_is_cut_where_the_end_no_longer_resembles_the_beginning(
    texts_of: Callable[[int, int], list[str]],
) -> None:
    words, others = (text.split() for text in texts_of(2, 0))
    chain = [" ".join(others[:i] + words[i:]) for i in range(0, 120, 4)]
    found, _ = in_rounds(chain, KeptSets("jaccard", 0.8))
    kept = sorted({by for _, by, _ in found})
    assert 2 < len(kept) < len(chain) // 2
    assert all(similarity("jaccard", shingles(chain[i]), shingles(chain[by])) >= 0.8 for i, by, _ in found)


def test_the_first_kept_one_wins_not_the_most_similar() -> None:
    texts = ["grain flour mill", "grain flour wheel", "grain flour wheel"]
    assert [by for _, by, _ in in_rounds(texts, KeptSets("jaccard", 0.3))[0]] == [0, 0, 0]
    assert [by for _, by, _ in in_rounds(texts, KeptSets("jaccard", 0.9))[0]] == [0, 1, 1]


def test_containment_looks_from_the_removed_document() -> None:
    long, short = "grain flour mill wheel water", "flour mill"
    assert [by for _, by, _ in in_rounds([long, short], KeptSets("containment", 1.0))[0]] == [0, 0]
    assert [by for _, by, _ in in_rounds([short, long], KeptSets("containment", 1.0))[0]] == [0, 1]


@given(one=st.integers(1, 60), other=st.integers(1, 60), contained=st.booleans(), threshold=st.floats(1e-6, 1.0))
@example(one=10, other=8, contained=False, threshold=0.8)
@example(one=5, other=5, contained=True, threshold=0.6)
def test_what_is_wanted_is_the_fewest_that_suffice(one: int, other: int, contained: bool, threshold: float) -> None:
    enough = [n for n in range(1, min(one, other) + 1) if n / (one if contained else one + other - n) >= threshold]
    wanted = _wanted(one, other, contained, threshold)
    assert wanted == enough[0] if enough else wanted > min(one, other)


_SETS = st.frozensets(st.integers(0, 40) | st.integers(2**64 - 5, 2**64 - 1))


@given(one=_SETS, other=_SETS, wanted=st.integers(1, 40))
def test_counting_stops_only_where_too_few_are_shared(one: frozenset, other: frozenset, wanted: int) -> None:
    if wanted > min(len(one), len(other)):
        return
    found = _shared(np.array(sorted(one), np.uint64), np.array(sorted(other), np.uint64), wanted)
    shared = len(one & other)
    assert found == shared if shared >= wanted else found < wanted


@pytest.mark.parametrize(("measure", "threshold"), [("cosine", 0.8), ("jaccard", 0.0), ("jaccard", 1.01)])
def test_measures_that_are_none(measure: str, threshold: float) -> None:
    with pytest.raises(UsageError, match="wanted"):
        check_measure(measure, threshold)
