"""The compiled SHA-1 is the real one, at every length, one by one and side by side."""

import hashlib
import random

import numpy as np
import pytest

from dedup.minhash.sha1 import ONE_BLOCK, sha1_32, sha1_rows
from dedup.minhash.xxh32 import LONGEST, ROWS, gather_even, gather_uneven

LENGTHS = [*range(140), 183, 184, 247, 248, 1000]  # past several blocks of 64 bytes
DATA = np.frombuffer(random.Random(2).randbytes(2000), np.uint8)


def expected(start: int, length: int) -> int:
    return int.from_bytes(hashlib.sha1(DATA[start : start + length].tobytes()).digest()[:4], "little")


@pytest.mark.parametrize("start", [0, 5])
def test_one_by_one(start: int) -> None:
    schedule = np.empty(80, np.uint32)
    for length in LENGTHS:
        assert sha1_32(DATA, start, start + length, schedule) == expected(start, length)


@pytest.mark.parametrize("count", [1, 17, 512])
def test_windows_of_one_length(count: int) -> None:
    rows, words = np.empty((ROWS, count), np.uint32), np.empty(count + LONGEST, np.uint32)
    values = np.empty(count, np.uint32)
    for length in range(ONE_BLOCK + 1):
        gather_even(DATA, length, count, rows, words)
        sha1_rows(rows, np.full(count, length, np.uint32), length, values)
        assert values.tolist() == [expected(i, length) for i in range(count)], length


@pytest.mark.parametrize("most", [0, 3, 4, 39, 54, 55])
def test_messages_of_any_length(most: int) -> None:
    chance = np.random.default_rng(most)
    starts, lengths = chance.integers(0, 1900, 300, np.int32), chance.integers(0, most + 1, 300, np.uint32)
    rows, values = np.empty((ROWS, 512), np.uint32), np.empty(300, np.uint32)
    gather_uneven(DATA, starts, lengths, most, rows)
    sha1_rows(rows, lengths, most, values)
    assert values.tolist() == [expected(start, length) for start, length in zip(starts, lengths, strict=True)]
