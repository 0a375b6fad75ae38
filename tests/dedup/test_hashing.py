"""The compiled hashes are the real ones, at every length."""

import hashlib
import random

import numpy as np
import pytest
import xxhash

from dedup.hashing import LANES, ONE_BLOCK, SHA1_ROWS, sha1_32, sha1_32_lanes, xxh32, xxh32_windows

LENGTHS = [*range(140), 183, 184, 247, 248, 1000]  # past several blocks of 16 and of 64 bytes


@pytest.mark.parametrize("start", [0, 5])
def test_xxh32(start: int) -> None:
    data = np.frombuffer(random.Random(1).randbytes(1100), np.uint8)
    for length in LENGTHS:
        expected = xxhash.xxh32_intdigest(data[start : start + length].tobytes())
        assert xxh32(data, start, start + length) == expected


@pytest.mark.parametrize("start", [0, 5])
def test_sha1_32(start: int) -> None:
    data, schedule = np.frombuffer(random.Random(2).randbytes(1100), np.uint8), np.empty(1036, np.uint32)
    for length in LENGTHS:
        digest = hashlib.sha1(data[start : start + length].tobytes()).digest()
        assert sha1_32(data, start, start + length, schedule) == int.from_bytes(digest[:4], "little")


@pytest.mark.parametrize("width", range(1, 16))
def test_windows_are_hashed_as_one_by_one(width: int) -> None:
    words = np.empty(1024 + 12, np.uint32)
    for count in (1, 2, 17, 1023, 1024):
        data = np.frombuffer(random.Random(count).randbytes(count + width - 1), np.uint8)
        values = np.empty(count, np.uint32)
        xxh32_windows(data, width, values, words)
        assert values.tolist() == [xxhash.xxh32_intdigest(data[i : i + width].tobytes()) for i in range(count)]


def test_sha1_side_by_side() -> None:
    data, chance = np.frombuffer(random.Random(3).randbytes(1000), np.uint8), np.random.default_rng(0)
    values, rows = np.empty(LANES, np.uint32), np.empty((SHA1_ROWS, LANES), np.uint32)
    for _ in range(8):
        starts = chance.integers(0, 900, LANES)
        ends = starts + chance.permutation(np.arange(LANES) % (ONE_BLOCK + 1))
        sha1_32_lanes(data, starts, ends, values, rows)
        digests = [hashlib.sha1(data[i:j].tobytes()).digest() for i, j in zip(starts, ends, strict=True)]
        assert values.tolist() == [int.from_bytes(digest[:4], "little") for digest in digests]
