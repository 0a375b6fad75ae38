"""The compiled XXH32 equals the xxhash package's at every length, one by one and side by side."""

import random

import numpy as np
import pytest
import xxhash

from dedup.minhash.message_words import MAX_BYTES, WORDS, gather_fixed, gather_varying
from dedup.minhash.xxh32 import STRIPE, xxh32, xxh32_fixed, xxh32_varying

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
    words, scratch = np.empty((WORDS, count + 5), np.uint32), np.empty(count + MAX_BYTES, np.uint32)
    hashes = np.empty(count, np.uint32)
    accumulators = np.empty((4, count), np.uint32)
    for length in range(MAX_BYTES + 1):
        gather_fixed(DATA, length, count, words, scratch)
        if length < STRIPE:
            xxh32_fixed(words, length, hashes)
        else:
            xxh32_varying(words, np.full(count, length, np.uint32), length, hashes, accumulators)
        assert hashes.tolist() == [expected(i, length) for i in range(count)], length


@pytest.mark.parametrize("max_length", [0, 3, 4, 15, 16, 31, 39, 63, 64])
def test_messages_of_any_length(max_length: int) -> None:
    chance = np.random.default_rng(max_length)
    starts, lengths = chance.integers(0, 1900, 300, np.int32), chance.integers(0, max_length + 1, 300, np.uint32)
    words, accumulators, hashes = (
        np.empty((WORDS, 512), np.uint32),
        np.empty((4, 512), np.uint32),
        np.empty(300, np.uint32),
    )
    gather_varying(DATA, starts, lengths, max_length, words)
    xxh32_varying(words, lengths, max_length, hashes, accumulators)
    assert hashes.tolist() == [expected(start, length) for start, length in zip(starts, lengths, strict=True)]
