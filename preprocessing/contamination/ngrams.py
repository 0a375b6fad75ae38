"""Words of a text as they are compared with a benchmark's, and hashes of their n-grams.

A word is a run of letters, marks and digits in lower case; all else is between words, so punctuation, quotes, line ends
and the escapes of JSON strings change nothing. In scripts without spaces (Chinese, Japanese, Thai, …) a character is a
word.
"""

import unicodedata
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from gristmill.kernels import kernel

ALONE = 1 << 31  # bit of a code point that is a word of its own
_SCRIPTS_WITHOUT_SPACES = (
    (0x0E00, 0x0EFF), (0x0F00, 0x0FFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x30FF), (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x323AF),
)  # fmt: skip  # Thai and Lao, Tibetan, Burmese, Khmer, kana, Han
_BASE, _SEED = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xCBF29CE484222325)
_PRIME, _MIX = np.uint64(0x100000001B3), np.uint64(0xD6E8FEB86659FD93)
_BACKSLASH, _ESCAPED = 92, b'nrtu"/\\'


@dataclass(frozen=True)
class TextWords:
    """The words of a text: hashes (n, uint64), and the characters of the text where each starts and ends (n)."""

    hashes: NDArray[np.uint64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.hashes)


def find_words(text: str) -> TextWords:
    """The words of a text.

    >>> words = find_words('He said:\\\\n"Grind it!"')
    >>> [(int(a), int(b)) for a, b in zip(words.starts, words.ends)]
    [(0, 2), (3, 7), (11, 16), (17, 19)]
    """
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    folded = fold_table()
    count = _hash_words(codes, folded, *_room(0))
    hashes, starts, ends = _room(count)
    _hash_words(codes, folded, hashes, starts, ends)
    return TextWords(hashes, starts, ends)


def _room(words: int) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64]]:
    return np.empty(words, np.uint64), np.empty(words, np.int64), np.empty(words, np.int64)


def hash_ngrams(words: NDArray[np.uint64], length: int) -> NDArray[np.uint64]:
    """The hash of each run of `length` words (n − length + 1, uint64)."""
    hashes = np.empty(max(0, len(words) - length + 1), np.uint64)
    _hash_ngrams(words, length, hashes)
    return hashes


@cache
def fold_table() -> NDArray[np.uint32]:
    """For each code point what replaces it in a word: its lower case; 0 between words."""
    table = np.zeros(0x110000, np.uint32)
    for code in range(0x110000):
        if unicodedata.category(chr(code))[0] in "LMN":
            lower = chr(code).lower()
            table[code] = ord(lower) if len(lower) == 1 else code
    for first, last in _SCRIPTS_WITHOUT_SPACES:
        table[first : last + 1] |= np.where(table[first : last + 1], np.uint32(ALONE), np.uint32(0))
    return table


@kernel
def _is_escape(codes: np.ndarray, at: int) -> bool:
    """Whether a backslash and the next character are an escape of a JSON string."""
    if codes[at] != _BACKSLASH or at + 1 >= len(codes):
        return False
    for code in _ESCAPED:  # noqa: SIM110  a kernel has no generators
        if codes[at + 1] == code:
            return True
    return False


@kernel
def _hash_words(codes: np.ndarray, folded: np.ndarray, hashes: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> int:
    """Count the words of a text, and write the hash and the ends of as many as there is room for."""
    word, inside, at = -1, False, 0
    while at < len(codes):
        if _is_escape(codes, at):
            inside = False
            at += 2
            continue
        code = folded[codes[at]]
        if code and (code >= ALONE or not inside):
            word += 1
            if word < len(hashes):
                starts[word], hashes[word] = at, _SEED
        inside = 0 < code < ALONE
        if code and word < len(hashes):
            hashes[word] = (hashes[word] ^ np.uint64(code)) * _PRIME
            ends[word] = at + 1
        at += 1
    return word + 1


@kernel
def _hash_ngrams(words: np.ndarray, length: int, hashes: np.ndarray) -> None:
    """A polynomial of the words' hashes, rolled from one run to the next, and mixed."""
    if len(hashes) == 0:
        return
    highest, value = np.uint64(1), np.uint64(0)
    for _ in range(length - 1):
        highest *= _BASE
    for at in range(len(words)):
        if at >= length:
            value -= words[at - length] * highest
        value = value * _BASE + words[at]
        if at >= length - 1:
            mixed = (value ^ (value >> np.uint64(32))) * _MIX
            hashes[at - length + 1] = mixed ^ (mixed >> np.uint64(29))


@kernel
def find_keys(hashes: np.ndarray, keys: np.ndarray, buckets: np.ndarray, shift: int, found: np.ndarray) -> None:
    """For each hash the first place of an equal key in the sorted `keys`, or −1 (n, int64).

    `buckets` has where the keys of each value of the bits above `shift` begin.
    """
    for at in range(len(hashes)):
        bucket = np.int64(hashes[at] >> np.uint64(shift))
        low, high = buckets[bucket], buckets[bucket + 1]
        while low < high:
            middle = (low + high) >> 1
            if keys[middle] < hashes[at]:
                low = middle + 1
            else:
                high = middle
        found[at] = low if low < buckets[bucket + 1] and keys[low] == hashes[at] else -1
