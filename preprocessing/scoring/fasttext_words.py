"""Words of texts for fastText models: where they are, their first 16 bytes, and their hashes, of many at once.

None of these loops has a branch that depends on the letters of a text, so that the processor computes many words at the
same time.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gristmill.kernels import kernel

MARGIN = 128  # bytes behind the space behind the last text, for what reads 64 at once
SHORT = 16  # bytes of a word: shorter ones are compared by two numbers
NO_WORD = -1  # stands for where one begins
_BLOCKS = 32  # of 64 bytes, whose words are looked up together
_USUAL = 12  # words that begin in a block, or fewer
_MAX_WORDS = 32 * _BLOCKS + 2 + _USUAL  # that end in these blocks, and room for what is written behind them
FNV_START = np.uint32(2166136261)
_FNV_PRIME = np.uint32(16777619)
# The first 8 bytes, and the second, that words of 0 to 16 bytes have:
_LOW_BYTES = np.array([(1 << 8 * min(size, 8)) - 1 for size in range(SHORT + 1)], np.uint64)
_HIGH_BYTES = np.array([(1 << 8 * max(size - 8, 0)) - 1 for size in range(SHORT + 1)], np.uint64)
# Of eight bytes at once:
_SEVEN_BITS = np.uint64(0x7F7F7F7F7F7F7F7F)
_HIGH_BITS = np.uint64(0x8080808080808080)
_SPACES = np.uint64(0x2020202020202020)
_FROM_TAB = np.uint64(0x7777777777777777)  # added to a byte, it sets the high bit from 9, a tab, on
_ABOVE_RETURN = np.uint64(0x7272727272727272)  # from 14 on, the byte after a carriage return
_TO_BITS = np.uint64(0x0102040810204080)  # times a number of bytes 0 or 1, it has these as its highest bits


class JoinedTexts(NamedTuple):
    """Texts that follow one another, each with a space behind it: their bytes, `eights` from each byte on, `blocks`."""

    content: NDArray[np.uint8]
    eights: NDArray[np.uint64]
    blocks: NDArray[np.uint64]
    sizes: NDArray[np.int64]

    @classmethod
    def join(cls, encoded: list[bytes]) -> "JoinedTexts":
        """Return texts in UTF-8 as one array."""
        sizes = np.array([len(data) for data in encoded], np.int64)
        joined = b" ".join([*encoded, bytes(MARGIN)])
        return cls(
            np.frombuffer(joined, np.uint8),
            np.ndarray((len(joined) - 7,), np.uint64, joined, strides=(1,)),
            np.frombuffer(joined, np.uint64, len(joined) // 8),
            sizes,
        )


class WordGroup(NamedTuple):
    """Room for words that are looked up together: where they begin and end in `borders`, and what is known of each.

    `low` and `high` are bytes 1 to 8 and 9 to 16, `values` the hash and the row. `missing` are the numbers of words
    that have to be looked up one by one.
    """

    borders: NDArray[np.int64]
    low: NDArray[np.uint64]
    high: NDArray[np.uint64]
    sizes: NDArray[np.uint32]
    hashes: NDArray[np.uint32]
    values: NDArray[np.uint64]
    missing: NDArray[np.int64]

    @classmethod
    def new(cls) -> "WordGroup":
        """Return room for the words of a group."""
        numbers = [np.empty(_MAX_WORDS, kind) for kind in ("u8", "u8", "u4", "u4", "u8", "i8")]
        return cls(np.empty((2, _MAX_WORDS), np.int64), *numbers)


@kernel
def hash_bytes(content: NDArray[np.uint8], start: int, end: int) -> np.uint32:
    """Return fastText's hash, FNV-1a over signed bytes."""
    value = FNV_START
    for i in range(start, end):
        value = hash_byte(value, content[np.uint64(i)])
    return value


@kernel(inline="always")
def hash_byte(value: np.uint32, byte: np.uint8) -> np.uint32:
    """Return the hash of what `value` is the hash of and another byte."""
    return np.uint32((value ^ np.uint32(np.int8(byte))) * _FNV_PRIME)


@kernel
def find_words(
    blocks: NDArray[np.uint64], first: int, stop: int, begun: int, borders: NDArray[np.int64]
) -> tuple[int, int, int]:
    """Write where the words begin and end that end from `first` on, in some blocks.

    Return how many there are; where one has `begun` that ends in later blocks, as one may have before `first`, or -1;
    and where to go on.
    """
    block = np.uint64(first) >> np.uint64(6)
    last = np.uint64(stop) >> np.uint64(6)
    behind = block + np.uint64(_BLOCKS)
    starts = np.uint64(0)
    ends = np.uint64(0)
    before = np.uint64(1)  # whether the byte before a block is a space
    if begun >= 0:
        borders[0, 0] = begun
        starts += np.uint64(1)
        before = np.uint64(0)
    spaces = find_spaces(blocks, block) | ((np.uint64(1) << (np.uint64(first) & np.uint64(63))) - np.uint64(1))
    while True:
        if block == last:
            spaces |= ~np.uint64(0) << (np.uint64(stop) & np.uint64(63))
        after = (spaces << np.uint64(1)) | before  # bytes that a space is before
        begins = after & ~spaces
        finishes = spaces & ~after
        offset = block << np.uint64(6)
        write_places(begins, offset, borders[0, starts:])
        write_places(finishes, offset, borders[1, ends:])
        starts += count_bits(begins)
        ends += count_bits(finishes)
        before = spaces >> np.uint64(63)
        block += np.uint64(1)
        if block > last or block == behind:
            break
        spaces = find_spaces(blocks, block)
    begun = borders[0, ends] if starts > ends else NO_WORD
    return int(np.int64(ends)), int(begun), int(np.int64(block << np.uint64(6)))


@kernel(inline="always")
def write_places(bits: np.uint64, offset: np.uint64, places: NDArray[np.int64]) -> None:
    """Write the numbers of the bits that are set, from `offset` on; of fewer than _USUAL, other numbers behind them.

    A loop that ended with the last bit would end at another place each time, which the processor cannot predict.
    """
    for i in range(_USUAL):
        places[np.uint64(i)] = np.int64(offset + lowest_bit(bits))
        bits &= bits - np.uint64(1)
    at = np.uint64(_USUAL)
    while bits:
        places[at] = np.int64(offset + lowest_bit(bits))
        bits &= bits - np.uint64(1)
        at += np.uint64(1)


@kernel(inline="always")
def find_spaces(blocks: NDArray[np.uint64], block: np.uint64) -> np.uint64:
    """Return which of 64 bytes are white space for fastText, or zero: a bit for each."""
    bits = np.uint64(0)
    for i in range(8):
        eight = blocks[block * np.uint64(8) + np.uint64(i)]
        seven_bits = eight & _SEVEN_BITS
        from_tab = seven_bits + _FROM_TAB  # its high bits are set where a byte is 9 or more, as to the others
        above_return = seven_bits + _ABOVE_RETURN
        is_other = ((seven_bits ^ _SPACES) + _SEVEN_BITS) & (seven_bits + _SEVEN_BITS)
        spaces = ((from_tab & ~above_return) | ~is_other) & ~eight & _HIGH_BITS
        bits |= ((spaces >> np.uint64(7)) * _TO_BITS >> np.uint64(56)) << np.uint64(8 * i)
    return bits


@kernel(inline="always")
def lowest_bit(bits: np.uint64) -> np.uint64:
    """Return the number of the lowest bit that is set, or 64: how many are below it."""
    return count_bits((bits & (np.uint64(0) - bits)) - np.uint64(1))


@kernel(inline="always")
def count_bits(bits: np.uint64) -> np.uint64:
    """Return how many bits are set, which LLVM knows as one instruction."""
    bits -= (bits >> np.uint64(1)) & np.uint64(0x5555555555555555)
    bits = (bits & np.uint64(0x3333333333333333)) + ((bits >> np.uint64(2)) & np.uint64(0x3333333333333333))
    bits = (bits + (bits >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return (bits * np.uint64(0x0101010101010101)) >> np.uint64(56)


@kernel
def load_words(eights: NDArray[np.uint64], group: WordGroup, count: int) -> None:
    """Write the sizes and the first 16 bytes of words."""
    for i in range(count):
        start = np.uint64(group.borders[0, i])
        size = np.uint64(group.borders[1, i]) - start
        loaded = min(size, np.uint64(SHORT))
        group.sizes[i] = np.uint32(min(size, np.uint64(SHORT + 1)))
        group.low[i] = eights[start] & _LOW_BYTES[loaded]
        group.high[i] = eights[start + np.uint64(8)] & _HIGH_BYTES[loaded]


@kernel
def hash_words(group: WordGroup, count: int) -> None:
    """Write fastText's hash of words of up to 16 bytes, all of whose bytes are hashed: vector instructions do many."""
    for i in range(count):
        size = group.sizes[i]
        value = FNV_START
        for position in range(SHORT):
            eight = group.low[i] if position < 8 else group.high[i]
            longer = hash_byte(value, np.uint8(eight >> np.uint64(8 * (position % 8))))
            value = longer if size > np.uint32(position) else value
        group.hashes[i] = value
