from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from training.data.best_fit import best_fit_decreasing


def fullness(lengths: Sequence[int], capacity: int) -> list[int]:
    """How full the rows are if every piece, longest first, goes where it leaves the least room."""
    rows: list[int] = []
    for length in sorted(lengths, reverse=True):
        best = max((row for row in rows if row + length <= capacity), default=0)
        if best:
            rows.remove(best)
        rows.append(best + length)
    return sorted(rows)


@given(st.integers(1, 40), st.lists(st.integers(1, 40), max_size=60))
def test_the_packing_is_best_fit_decreasing(capacity: int, some: list[int]) -> None:
    lengths = [min(length, capacity) for length in some]
    found = best_fit_decreasing(np.array(lengths, np.int64), capacity)
    assert sorted(np.bincount(found, lengths).tolist()) == fullness(lengths, capacity)


def test_of_equal_pieces_the_first_is_packed_first() -> None:
    assert best_fit_decreasing(np.array([3, 7, 10, 5, 5, 5]), 10).tolist() == [1, 1, 0, 2, 2, 3]
