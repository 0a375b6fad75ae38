"""The compiled hashes are the real ones, at every length, one by one and side by side."""

import random

import numpy as np
import pytest
import xxhash

from dedup.minhash.xxh32 import LONGEST, ROWS, STRIPE, gather_even, gather_uneven, xxh32, xxh32_even, xxh32_uneven

LENGTHS = [*range(140), 183, 184, 247, 248, 1000]  # past several blocks of 16 and of 64 bytes
DATA = np.frombuffer(random.Random(1).randbytes(2000), np.uint8)


def expected(start: int, length: int) -> int:
    return xxhash.xxh32_intdigest(DATA[start : start + length].tobytes())


@pytest.mark.parametrize("start", [0, 5])
def test_xxh32(start: int) -> None:
    for length in LENGTHS:
        assert xxh32(DATA, start, start + length) == expected(start, length)


@pytest.mark.parametrize("count", [1, 17, 512])
def test_windows_of_one_length(count: int) -> None:
    rows, words = np.empty((ROWS, count + 5), np.uint32), np.empty(count + LONGEST, np.uint32)
    values = np.empty(count, np.uint32)
    lanes = np.empty((4, count), np.uint32)
    for length in range(LONGEST + 1):
        gather_even(DATA, length, count, rows, words)
        if length < STRIPE:
            xxh32_even(rows, length, values)
        else:
            xxh32_uneven(rows, np.full(count, length, np.uint32), length, values, lanes)
        assert values.tolist() == [expected(i, length) for i in range(count)], length


@pytest.mark.parametrize("most", [0, 3, 4, 15, 16, 31, 39, 63, 64])
def test_messages_of_any_length(most: int) -> None:
    chance = np.random.default_rng(most)
    starts, lengths = chance.integers(0, 1900, 300, np.int32), chance.integers(0, most + 1, 300, np.uint32)
    rows, lanes, values = np.empty((ROWS, 512), np.uint32), np.empty((4, 512), np.uint32), np.empty(300, np.uint32)
    gather_uneven(DATA, starts, lengths, most, rows)
    xxh32_uneven(rows, lengths, most, values, lanes)
    assert values.tolist() == [expected(start, length) for start, length in zip(starts, lengths, strict=True)]
