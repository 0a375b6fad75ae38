"""Mixes of data sets: exact shares at every place, every sequence once an epoch, a function of the place alone."""

from collections import Counter
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from training.data.mix import MixOrder, MixPlace

SIZES, SHARES = (7, 40, 11), (0.5, 0.2, 0.3)


@given(st.lists(st.floats(1e-6, 1.0), min_size=2, max_size=5), st.integers(0, 2**40))
def test_after_any_number_of_places_each_set_has_its_share(shares: list[float], place: int) -> None:
    counts = MixOrder([5] * len(shares), shares, seed=1).counts(torch.arange(place, place + 3))
    assert counts.sum(0).tolist() == [place, place + 1, place + 2]
    assert ((counts[:, 1:] - counts[:, :-1]) >= 0).all()
    whole = sum(map(Fraction, shares))
    for number, share in enumerate(shares):
        wanted = Fraction(share) / whole * place
        assert abs(int(counts[number, 0]) - wanted) <= len(shares) + place * 2**-28


def test_every_epoch_of_each_set_has_each_of_its_sequences_once() -> None:
    order = MixOrder(SIZES, SHARES, seed=3)
    seen = order.at(torch.arange(200)).tolist()
    for number, (size, start) in enumerate(zip(SIZES, (0, 7, 47), strict=True)):
        of_set = [sequence - start for sequence in seen if start <= sequence < start + size]
        assert len(of_set) == 200 * Fraction(repr(SHARES[number]))
        for epoch in range(len(of_set) // size):
            assert sorted(of_set[epoch * size : (epoch + 1) * size]) == list(range(size))
        assert max(Counter(of_set[len(of_set) // size * size :]).values(), default=1) == 1


def test_a_place_alone_decides_its_sequence() -> None:
    order = MixOrder(SIZES, SHARES, seed=3)
    whole = order.at(torch.arange(100))
    assert torch.cat([order.at(torch.arange(first, first + 7)) for first in range(0, 98, 7)]).equal(whole[:98])
    assert torch.equal(order.at(torch.tensor([61, 4])), whole[[61, 4]])
    assert not torch.equal(MixOrder(SIZES, SHARES, seed=4).at(torch.arange(100)), whole)


def test_a_mix_that_takes_over_goes_on_in_every_set_that_was_read() -> None:
    first, place = MixOrder(SIZES, SHARES, seed=3), 23
    order = MixOrder((11, 7, 40, 5), (0.3, 0.4, 0.1, 0.2), seed=3)
    order.resume("cabd", MixPlace(sets=dict(zip("abc", first.progress(place), strict=True))), place)
    before, seen = first.at(torch.arange(place)), order.at(torch.arange(place, 130))
    for size, start, start_of_now in ((7, 0, 11), (40, 7, 18), (11, 47, 0), (5, 99, 58)):
        of_set = [sequence - start for sequence in before.tolist() if start <= sequence < start + size]
        of_set += [s - start_of_now for s in seen.tolist() if start_of_now <= s < start_of_now + size]
        for epoch in range(-(-len(of_set) // size)):
            assert max(Counter(of_set[epoch * size : (epoch + 1) * size]).values()) == 1
    resumed = MixOrder((11, 7, 40, 5), (0.3, 0.4, 0.1, 0.2), seed=3)
    resumed.resume("cabd", MixPlace(place, dict(zip("cabd", order.progress(50), strict=True))))
    assert torch.equal(resumed.at(torch.arange(50, 130)), seen[50 - place :])


def test_weights_in_any_unit_are_the_same_shares() -> None:
    first, second = (MixOrder(SIZES, shares, seed=3).at(torch.arange(50)) for shares in ((1, 2, 5), (0.5, 1.0, 2.5)))
    assert torch.equal(first, second)


@pytest.mark.parametrize("place", [2**40, 2**50])
def test_counts_do_not_overflow(place: int) -> None:
    counts = MixOrder(SIZES, (0.123456789, 0.3, 0.576543211), seed=3).counts(torch.tensor([place]))[:, 0].tolist()
    assert sum(counts) == place and counts[0] == pytest.approx(0.123456789 * place, rel=1e-8)
