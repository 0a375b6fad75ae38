"""Each MinHash scheme equals its formula in Python integers, and its similarity estimates are unbiased."""

from collections.abc import Callable, Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dedup.minhash.schemes import (
    AFFINE,
    EMPTY,
    FSS,
    MERSENNE,
    MERSENNE_PRIME,
    draw_coefficients,
    update_affine,
    update_fss,
    update_mersenne,
)

Sketch = Callable[[NDArray[np.uint32]], NDArray[np.uint32]]
MASK = 0xFFFFFFFF


def affine(permutations: int) -> Sketch:
    a, b = (drawn.astype(np.uint32) for drawn in draw_coefficients(AFFINE, permutations, 1))

    def sketch(hashes: NDArray[np.uint32]) -> NDArray[np.uint32]:
        mins = np.full(permutations, EMPTY)
        update_affine(hashes.copy(), a, b, mins)
        return mins

    return sketch


def fss(permutations: int) -> Sketch:
    a, b = (drawn.astype(np.uint32) for drawn in draw_coefficients(FSS, permutations, 1))
    mixed = np.empty(100, np.uint32)

    def sketch(hashes: NDArray[np.uint32]) -> NDArray[np.uint32]:
        mins = np.full(permutations, EMPTY)
        update_fss(hashes.copy(), a, b, mins, mixed)
        return mins

    return sketch


def fmix32(h: int) -> int:
    h = (h ^ h >> 16) * 0x85EBCA6B & MASK
    h = (h ^ h >> 13) * 0xC2B2AE35 & MASK
    return h ^ h >> 16


def fss_reference(hashes: Iterable[int], slots: int) -> list[int]:
    """Round by round, with sets."""
    a, b = (drawn.tolist() for drawn in draw_coefficients(FSS, slots, 1))
    found: dict[int, int] = {}
    for i in range(2 * slots):
        assigned: dict[int, list[int]] = {}
        for h in set(hashes):
            value = fmix32((a[i] * h + b[i]) & MASK)
            assigned.setdefault(value * slots >> 32 if i < slots else i - slots, []).append(value)
        found = {slot: min(values) for slot, values in assigned.items()} | found
        if len(found) == slots:
            break
    return [found[slot] for slot in range(slots)]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, MASK), min_size=1, max_size=40), st.sampled_from([1, 2, 7, 64, 128]))
def test_fss_is_its_algorithm(hashes: list[int], slots: int) -> None:
    assert fss(slots)(np.array(hashes, np.uint32)).tolist() == fss_reference(hashes, slots)


@pytest.mark.parametrize("count", [100, 700, 5000])
@pytest.mark.parametrize("slots", [64, 128, 256])
def test_fss_of_many_hashes(count: int, slots: int) -> None:
    hashes = np.random.default_rng(count).integers(0, 1 << 32, count, np.uint32)
    assert fss(slots)(hashes).tolist() == fss_reference(hashes.tolist(), slots)


@pytest.mark.parametrize("distinct", [1, 2, 30])
def test_fss_of_the_same_few_hashes_again_and_again(distinct: int) -> None:
    hashes = np.random.default_rng(1).integers(0, 1 << 32, distinct, np.uint32)
    assert fss(128)(np.tile(hashes, 2000)).tolist() == fss_reference(hashes.tolist(), 128)
    assert (fss(128)(np.tile(hashes, 2000)) == fss(128)(hashes)).all()


def test_affine_is_its_formula() -> None:
    hashes = np.random.default_rng(3).integers(0, 1 << 32, 29, np.uint32)
    a, b = (drawn.tolist() for drawn in draw_coefficients(AFFINE, 64, 1))
    expected = [min((x * fmix32(h) + y) & MASK for h in hashes.tolist()) for x, y in zip(a, b, strict=True)]
    assert affine(64)(hashes).tolist() == expected


@pytest.mark.parametrize("offset", range(-12, 13))
def test_mersenne_where_the_modulus_wraps(offset: int) -> None:
    """Coefficients such that a·h + b is next to a multiple of 2^61: chance would find none of them."""
    hashes = np.random.default_rng(4).integers(0, 1 << 32, 21, np.uint32)
    a, _ = draw_coefficients(MERSENNE, 128, 1)
    aims = [(j % 8 << 61) + offset - int(x) * int(hashes[j % 21]) for j, x in enumerate(a)]
    b = np.array([aim % (1 << 64) for aim in aims], np.uint64)
    mins = np.full(128, EMPTY)
    update_mersenne(hashes, a, b, mins, np.empty(128, np.uint32))
    formula = [
        min((int(x) * h + int(y)) % (1 << 64) % MERSENNE_PRIME & MASK for h in hashes.tolist())
        for x, y in zip(a, b, strict=True)
    ]
    assert mins.tolist() == formula


@pytest.mark.parametrize("size", [20, 100, 300])
@pytest.mark.parametrize("similarity", [0.5, 0.8, 0.9])
def test_fss_is_unbiased_and_no_worse_than_independent_slots(size: int, similarity: float) -> None:
    chance, sketch = np.random.default_rng(size), fss(128)
    common = round(2 * size * similarity / (1 + similarity))
    exact, pairs = common / (2 * size - common), 1500
    errors = []
    for _ in range(pairs):
        drawn = chance.integers(0, 1 << 32, 2 * size - common, np.uint32)
        one, other = sketch(drawn[:size]), sketch(np.concatenate([drawn[:common], drawn[size:]]))
        errors.append(float(np.mean(one == other)) - exact)
    deviation = (exact * (1 - exact) / 128) ** 0.5  # of independent slots
    assert abs(np.mean(errors)) < 4 * deviation / pairs**0.5
    assert np.std(errors) < 0.95 * deviation
