"""Random numbers by key: uniform, independent; and the k-th smallest of them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from preprocessing.mixing.sampling import kth_smallest, random_number, random_numbers


@given(st.lists(st.lists(st.integers(0, 2**64 - 1), max_size=20), max_size=5), st.integers(0, 30))
def test_kth_smallest(pieces: list[list[int]], count: int) -> None:
    arrays = [np.array(piece, np.uint64) for piece in pieces]
    whole = sorted(sum(pieces, start=[]))
    if count <= len(whole):
        found = kth_smallest(lambda: arrays, count)
        assert found == (whole[count - 1] if count else None)


def test_random_numbers_are_uniform_and_independent_between_purposes() -> None:
    rows = np.arange(4096)
    one, two = (random_numbers(1, purpose, "book/a.jsonl", rows) / 2**64 for purpose in ("weight", "holdout"))
    assert len(set(one)) == 4096
    for drawn in (one, two):
        assert abs(drawn.mean() - 0.5) < 0.02 and np.histogram(drawn, 8, (0, 1))[0].min() > 420
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.05
    assert abs(np.corrcoef(one[1:], one[:-1])[0, 1]) < 0.05


@given(st.integers(0, 2**32 - 1), st.text(max_size=9), st.lists(st.integers(0, 2**62), min_size=1, max_size=5))
def test_the_number_of_one_row_is_that_of_many(seed: int, purpose: str, rows: list[int]) -> None:
    of_rows = random_numbers(seed, purpose, "book/a.jsonl", np.array(rows))
    assert [random_number(seed, purpose, "book/a.jsonl", row) for row in rows] == of_rows.tolist()
