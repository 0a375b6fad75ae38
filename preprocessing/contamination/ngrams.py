"""Words of a text as they are compared with a benchmark's, and hashes of their n-grams.

A word is a run of letters, marks and digits; all else is between words, so punctuation, quotes and line ends change
nothing. Nor do case, Unicode's forms (NFC, NFD, full width, ligatures), characters without width inside words, and the
escapes of JSON and HTML. In scripts without spaces (Chinese, Japanese, Thai, …) a character is a word.
"""

import unicodedata
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from gristmill.kernels import kernel
from preprocessing.contamination.escapes import decode_escapes

_ALONE = 1 << 31  # bit of a code point that is a word of its own
_MARK = 1 << 30  # bit of a mark that may be written before or after other ones
_EXPANDS = 1 << 29  # bit of a place in the expansions
_IGNORED = 1 << 28  # a character without width, such as a soft hyphen
_CODE = (1 << 28) - 1
_SCRIPTS_WITHOUT_SPACES = (
    (0x0E00, 0x0EFF), (0x0F00, 0x0FFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x30FF), (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x323AF),
)  # fmt: skip  # Thai and Lao, Tibetan, Burmese, Khmer, kana, Han
_VOICED = (0x3099, 0x309A)  # marks of kana, which belong to the character before
_ALSO_IGNORED = (0x034F, *range(0x180B, 0x180E), *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))
_BASE = np.uint64(0x9E3779B97F4A7C15)
_SEED = np.uint64(0xCBF29CE484222325)
_PRIME = np.uint64(0x100000001B3)
_MIX = np.uint64(0xD6E8FEB86659FD93)
_BACKSLASH = 92
_ESCAPED = b"nrtbf"


@dataclass(frozen=True)
class TextWords:
    """The words of a text: hashes (n, uint64), and the characters of the text where each starts and ends (n).

    `form` is the text without escapes, and `form_starts` and `form_ends` (n) are where its words are.
    """

    hashes: NDArray[np.uint64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    form: str
    form_starts: NDArray[np.int64]
    form_ends: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.hashes)

    def spell(self, first: int, last: int) -> list[str]:
        """Return the words from `first` to `last` (exclusive) as they are compared."""
        spans = zip(self.form_starts[first:last].tolist(), self.form_ends[first:last].tolist(), strict=True)
        return [_fold_word(self.form[start:end]) for start, end in spans]


def find_words(text: str) -> TextWords:
    r"""Return the words of a text.

    >>> words = find_words('He said:\\n"Grind it!"')
    >>> [(int(a), int(b)) for a, b in zip(words.starts, words.ends)]
    [(0, 2), (3, 7), (11, 16), (17, 19)]
    >>> find_words("The ﬂour\\u2019s ＷＨＩＴＥ &amp;mdash; dr\u00ady").spell(0, 5)
    ['the', 'flour', 's', 'white', 'dry']
    """
    form, replaced = decode_escapes(text)
    codes = np.frombuffer(form.encode("utf-32-le", "surrogatepass"), np.uint32)
    folded, expansions = fold_tables()
    count = _hash_words(codes, folded, expansions, *_room(0))
    hashes, form_starts, form_ends = _room(count)
    _hash_words(codes, folded, expansions, hashes, form_starts, form_ends)
    starts = form_starts
    ends = form_ends
    for replacements in reversed(replaced):
        starts = replacements.origin_starts(starts)
        ends = replacements.origin_ends(ends)
    return TextWords(hashes, starts, ends, form, form_starts, form_ends)


def _room(words: int) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64]]:
    return np.empty(words, np.uint64), np.empty(words, np.int64), np.empty(words, np.int64)


def hash_ngrams(words: NDArray[np.uint64], length: int) -> NDArray[np.uint64]:
    """Return the hash of each run of `length` words (n − length + 1, uint64)."""
    hashes = np.empty(max(0, len(words) - length + 1), np.uint64)
    _hash_ngrams(words, length, hashes)
    return hashes


@cache
def fold_tables() -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Return for each code point what replaces it in a word, 0 between words; and the replacements of several.

    These end with 0.
    """
    table = np.zeros(0x110000, np.uint32)
    expansions = list[int]()
    for code in range(0x110000):
        category = unicodedata.category(chr(code))
        if category == "Cf":
            table[code] = _IGNORED
        elif category[0] in "LMNS":
            folded = [_entry(letter) for letter in _fold_letter(chr(code))]
            if len(folded) > 1:
                table[code] = _EXPANDS | len(expansions)
                expansions += [*folded, 0]
            elif folded:
                table[code] = folded[0]
    table[list(_ALSO_IGNORED)] = _IGNORED
    return table, np.array(expansions, np.uint32)


def _fold_letter(letter: str) -> str:
    """Return what replaces a character in a word: its decomposed, case-folded form; empty where it is no part of one.

    A character whose form would be several words stays as it is.
    """
    if letter.isascii():
        if not letter.isalnum():
            return ""
        return letter.lower()
    decomposed = unicodedata.normalize("NFKD", letter)
    form = unicodedata.normalize("NFKD", decomposed.casefold())
    if all(map(_is_part, form)) and not any(map(_is_alone, form[1:])):
        return form
    if _is_part(letter):
        return letter
    return ""


def _is_part(letter: str) -> bool:
    return unicodedata.category(letter)[0] in "LMN"


def _is_alone(letter: str) -> bool:
    code = ord(letter)
    return code not in _VOICED and any(first <= code <= last for first, last in _SCRIPTS_WITHOUT_SPACES)


def _entry(letter: str) -> int:
    if _is_alone(letter):
        return _ALONE | ord(letter)
    if unicodedata.combining(letter):
        return _MARK | ord(letter)
    return ord(letter)


def _fold_word(word: str) -> str:
    table, _ = fold_tables()
    letters = (_fold_letter(letter) for letter in word if table[ord(letter)] != _IGNORED)
    return unicodedata.normalize("NFD", "".join(letters))  # marks in one order


@kernel
def _is_escape(codes: np.ndarray, at: int) -> bool:
    """Return whether a character ends an escape of a JSON string, given that a backslash is before it."""
    for code in _ESCAPED:  # noqa: SIM110  a kernel has no generators
        if codes[at] == code:
            return True
    return False


@kernel
def _hash_words(
    codes: np.ndarray,
    folded: np.ndarray,
    expansions: np.ndarray,
    hashes: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
) -> int:
    """Count the words of a text, and write the hash and the ends of as many as there is room for."""
    word = -1
    is_inside = False  # a word that further letters belong to
    is_after_alone = False
    is_after_backslash = False
    for at in range(len(codes)):
        if is_after_backslash and _is_escape(codes, at):
            is_after_backslash = False
            continue
        is_after_backslash = codes[at] == _BACKSLASH
        entry = folded[codes[at]]
        if entry == _IGNORED:
            continue
        expansion = -1
        if entry & _EXPANDS and entry < _ALONE:
            expansion = int(entry & _CODE)
            entry = expansions[expansion]
        while True:
            is_of_word = is_inside or (is_after_alone and (entry & _MARK) != 0)
            if entry and (entry >= _ALONE or not is_of_word):
                word += 1
                if word < len(hashes):
                    starts[word] = at
                    hashes[word] = _SEED
            if entry and word < len(hashes):
                if entry & _MARK:
                    hashes[word] += np.uint64(entry) * _MIX  # the same for any order of marks
                else:
                    hashes[word] = (hashes[word] ^ np.uint64(entry)) * _PRIME
                ends[word] = at + 1
            is_after_alone = entry >= _ALONE or (is_after_alone and (entry & _MARK) != 0)
            is_inside = 0 < entry < _ALONE and not is_after_alone
            if expansion < 0:
                break
            expansion += 1
            entry = expansions[expansion]
            if entry == 0:
                break
    return word + 1


@kernel
def _hash_ngrams(words: np.ndarray, length: int, hashes: np.ndarray) -> None:
    """A polynomial of the words' hashes, rolled from one run to the next, and mixed."""
    if len(hashes) == 0:
        return
    highest = np.uint64(1)
    value = np.uint64(0)
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
def find_keys(hashes: np.ndarray, keys: np.ndarray, buckets: np.ndarray, shift: int, rows: np.ndarray) -> None:
    """For each hash the first place of an equal key in the sorted `keys`, or −1 (n, int64).

    `buckets` has where the keys of each value of the bits above `shift` begin.
    """
    for at in range(len(hashes)):
        bucket = np.int64(hashes[at] >> np.uint64(shift))
        low = buckets[bucket]
        high = buckets[bucket + 1]
        while low < high:
            middle = (low + high) >> 1
            if keys[middle] < hashes[at]:
                low = middle + 1
            else:
                high = middle
        rows[at] = low if low < buckets[bucket + 1] and keys[low] == hashes[at] else -1
