"""The compiled XXH64 equals the xxhash package's at every length, one by one and side by side."""

import random

import numpy as np
import pytest
import xxhash

from dedup.minhash.message_words import MAX_BYTES, WORDS, gather_fixed
from dedup.minhash.xxh64 import STRIPE, xxh64, xxh64_fixed

DATA = np.frombuffer(random.Random(1).randbytes(1000), np.uint8)


def expected(start: int, length: int) -> int:
    return xxhash.xxh64_intdigest(DATA[start : start + length].tobytes())


def test_one_by_one() -> None:
    for length in range(200):
        assert int(xxh64(DATA, 5, 5 + length)) == expected(5, length)


@pytest.mark.parametrize("count", [1, 17, 512])
def test_windows_of_one_length(count: int) -> None:
    words, scratch = np.empty((WORDS, count), np.uint32), np.empty(count + MAX_BYTES, np.uint32)
    hashes = np.empty(count, np.uint64)
    for length in range(STRIPE):
        gather_fixed(DATA, length, count, words, scratch)
        xxh64_fixed(words, length, hashes)
        assert hashes.tolist() == [expected(i, length) for i in range(count)], length
