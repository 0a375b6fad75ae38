"""The compiled SHA-1 equals hashlib's at every length, one by one and side by side."""

import hashlib
import random

import numpy as np
import pytest

from dedup.minhash.message_words import MAX_BYTES, WORDS, gather_fixed, gather_varying
from dedup.minhash.sha1 import ONE_BLOCK_BYTES, sha1_32, sha1_32_varying

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
    words, scratch = np.empty((WORDS, count), np.uint32), np.empty(count + MAX_BYTES, np.uint32)
    hashes = np.empty(count, np.uint32)
    for length in range(ONE_BLOCK_BYTES + 1):
        gather_fixed(DATA, length, count, words, scratch)
        sha1_32_varying(words, np.full(count, length, np.uint32), length, hashes)
        assert hashes.tolist() == [expected(i, length) for i in range(count)], length


@pytest.mark.parametrize("max_length", [0, 3, 4, 39, 54, 55])
def test_messages_of_any_length(max_length: int) -> None:
    chance = np.random.default_rng(max_length)
    starts, lengths = chance.integers(0, 1900, 300, np.int32), chance.integers(0, max_length + 1, 300, np.uint32)
    words, hashes = np.empty((WORDS, 512), np.uint32), np.empty(300, np.uint32)
    gather_varying(DATA, starts, lengths, max_length, words)
    sha1_32_varying(words, lengths, max_length, hashes)
    assert hashes.tolist() == [expected(start, length) for start, length in zip(starts, lengths, strict=True)]
