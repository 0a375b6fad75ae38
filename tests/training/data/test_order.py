import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.data.mix import EpochOrder, permute

seeds = st.integers(-(2**63), 2**63 - 1)


@settings(deadline=None)
@given(st.integers(1, 3_000), seeds)
def test_a_keyed_order_visits_every_index_once(size: int, key: int) -> None:
    assert permute(torch.arange(size), size, key).sort().values.equal(torch.arange(size))


@settings(deadline=None)
@given(st.integers(1, 2**62), seeds, st.integers(0))
def test_indices_far_apart_stay_distinct_and_inside(size: int, key: int, start: int) -> None:
    index = torch.tensor(sorted({(start + n * (size // 50 + 1)) % size for n in range(50)}))
    image = permute(index, size, key)
    assert len(image.unique()) == len(index) and image.min() >= 0 and image.max() < size
    assert permute(index[:1], size, key).equal(image[:1])  # each on its own


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    every = torch.arange(1_000)
    orders = [EpochOrder("keyed", 1_000, seed).at(epoch, every) for seed in (1, 2) for epoch in (0, 1)]
    for number, one in enumerate(orders):
        for other in orders[:number]:
            assert (one == other).sum() < 10  # of two random permutations one index agrees on average


def deviation(counts: torch.Tensor, freedom: int) -> float:
    """How many standard deviations the chi-square of counts, expected to be equal, lies above its mean."""
    expected = counts.double().mean()
    return float(((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("size", [10, 101])
def test_orders_look_random(size: int) -> None:
    """Over many keys each index goes everywhere, and what was side by side, or a grid's row apart, is any way apart."""
    orders = torch.stack([permute(torch.arange(size), size, key * 7919) for key in range(400)])
    places = torch.stack([torch.bincount(column, minlength=size) for column in orders.T])
    assert deviation(places, (size - 1) ** 2) < 4
    for apart in (1, math.isqrt(size)):
        steps = (orders[:, apart:] - orders[:, :-apart]) % size
        assert deviation(torch.bincount(steps.flatten(), minlength=size)[1:], max(1, size - 2)) < 4


def test_an_order_of_a_trillion_takes_no_memory() -> None:
    found = EpochOrder("keyed", 10**12, 1).at(3, torch.arange(10**12 - 4_096, 10**12))
    assert len(np.unique(found)) == 4_096
