"""Measures of a text that rules compare with their numbers; each counts once what several of them need.

How much of a text is repeated n-grams of words is found by kernels, in linear time by hashing.
"""

from collections.abc import Callable, Iterable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from gristmill.kernels import kernel
from preprocessing.quality.language_identifier import language_identifier
from preprocessing.quality.scripts import SCRIPTS, script_shares
from preprocessing.quality.words import (
    ALPHABETIC,
    SENTENCE_ENDS,
    STOP_WORDS,
    SYMBOL,
    Words,
    WordSplitter,
    count_sentences,
)

_ENDS = tuple(sorted(SENTENCE_ENDS))
_SHORT = 30  # characters of a short line, as FineWeb's
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


@kernel(inline="always")
def _mix(hashes: NDArray[np.uint64], at: int, n: int) -> np.uint64:
    value = np.uint64(n)
    for position in range(at, at + n):
        value = (value ^ hashes[position]) * _MULTIPLIER
        value ^= value >> _SHIFT
    return value


@kernel(inline="always")
def _slots(entries: int) -> int:
    """Return the slots of a hash table at most half full, a power of two."""
    size = 4
    while size < 2 * entries:
        size *= 2
    return size


@kernel
def _top_ngram(hashes: NDArray[np.uint64], lengths: NDArray[np.int64], n: int) -> int:
    """Return the characters, spaces included, of all occurrences of the n-gram that a text has most often.

    It is 0 for a text without any.
    """
    total = len(hashes) - n + 1
    if total <= 0:
        return 0
    size = _slots(total)
    mask = np.uint64(size - 1)
    keys = np.zeros(size, np.uint64)
    counts = np.zeros(size, np.int64)
    firsts = np.zeros(size, np.int64)
    max_count = 0
    first = 0
    for at in range(total):
        key = _mix(hashes, at, n)
        slot = key & mask
        while counts[slot] and keys[slot] != key:
            slot = (slot + np.uint64(1)) & mask
        if counts[slot] == 0:
            keys[slot], firsts[slot] = key, at
        counts[slot] += 1
        if counts[slot] > max_count or (counts[slot] == max_count and firsts[slot] < first):
            max_count = counts[slot]
            first = firsts[slot]
    characters = n - 1
    for position in range(first, first + n):
        characters += lengths[position]
    return characters * max_count


@kernel
def _repeated_ngrams(hashes: NDArray[np.uint64], lengths: NDArray[np.int64], n: int) -> int:
    """Return the characters, without spaces, of the n-grams that a text had before; they do not overlap."""
    total = len(hashes) - n + 1
    if total <= 0:
        return 0
    size = _slots(total)
    mask = np.uint64(size - 1)
    keys = np.zeros(size, np.uint64)
    used = np.zeros(size, np.uint8)
    characters = 0
    at = 0
    while at < total:
        key = _mix(hashes, at, n)
        slot = key & mask
        while used[slot] and keys[slot] != key:
            slot = (slot + np.uint64(1)) & mask
        if used[slot]:
            for position in range(at, at + n):
                characters += lengths[position]
            at += n
        else:
            keys[slot], used[slot] = key, 1
            at += 1
    return characters


class TextMeasures:
    """Measures of one text, each counted when a rule first asks for of."""

    def __init__(
        self, text: str, splitter: WordSplitter, url: str = "", stop_hashes: NDArray[np.uint64] | None = None
    ) -> None:
        self.text = text
        self.url = url
        self._splitter = splitter
        self._stop_hashes = stop_hashes  # of the stop words of the text's language

    def of(self, text: str) -> "TextMeasures":
        """Return the measures of a rewritten text of the same document."""
        return TextMeasures(text, self._splitter, self.url, self._stop_hashes)

    @cached_property
    def language(self) -> tuple[str, float]:
        """Return the most likely language and its probability."""
        return language_identifier().identify(self.text)

    @cached_property
    def scripts(self) -> dict[str, float]:
        """Return the share of each script in the letters."""
        return script_shares(self.text)

    @cached_property
    def words(self) -> Words:
        return self._splitter.split(self.text)

    @cached_property
    def lines(self) -> list[str]:
        """Return the lines that are not blank."""
        return [line for line in self.text.split("\n") if line and not line.isspace()]

    @cached_property
    def all_lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def real_words(self) -> tuple[int, int]:
        """Return how many words are not signs alone, and their characters."""
        chosen = self.words.flags & SYMBOL == 0
        return int(np.count_nonzero(chosen)), int(self.words.length[chosen].sum())

    @cached_property
    def repeated_paragraphs(self) -> tuple[float, float]:
        return self._repeated(_paragraphs(self.text))

    @cached_property
    def repeated_lines(self) -> tuple[float, float]:
        return self._repeated(_lines(self.text))

    def _repeated(self, parts: list[str]) -> tuple[float, float]:
        """Return the share of parts that came before, and that of their characters in the text."""
        repeats, characters = _repeated(parts)
        return repeats / len(parts), _share(characters, len(self.text))

    def per_word(self, count: int) -> float:
        return _share(count, len(self.words.length))

    def share_of_lines(self, matching: Iterable[bool]) -> float:
        return _share(sum(matching), len(self.all_lines))

    def share_of_words(self, flag: int) -> float:
        return self.per_word(int(np.count_nonzero(self.words.flags & flag)))

    def stop_words(self) -> int:
        """Return how many different stop words there are."""
        if self._stop_hashes is not None:
            return int(np.count_nonzero(np.isin(self._stop_hashes, self.words.hash)))
        seen = int(np.bitwise_or.reduce(self.words.flags, initial=0)) >> 8
        return (seen & ((1 << len(STOP_WORDS)) - 1)).bit_count()

    def sentences(self) -> int:
        """Return the sentences of the lines: one begins after a mark that ends one, and each line ends one."""
        return len(self.lines) + count_sentences(self.words)

    def short_lines(self) -> float:
        short = sum(len(line) <= _SHORT for line in self.lines)
        return _share(short, len(self.lines))

    def ended_lines(self) -> float:
        ended = sum(line.endswith(_ENDS) for line in self.lines)
        return _share(ended, len(self.lines))

    def repeated_line_characters(self) -> float:
        """Return the share of characters in repeated lines, of all without newlines; blank lines do not count."""
        _, repeated = _repeated(self.lines)
        return _share(repeated, len(self.text) - self.text.count("\n"))


def _paragraphs(text: str) -> list[str]:
    """Return the paragraphs, between which are two line ends or more: one at least."""
    parts = text.strip().split("\n\n")
    return [part.lstrip("\n") for part in parts if part] or [""]


def _lines(text: str) -> list[str]:
    r"""Return what re.split(r"\n+", text) does, in another order: line ends that begin or end a text split it, too."""
    parts = [part for part in text.split("\n") if part]
    parts += [""] * (text.startswith("\n") + text.endswith("\n"))
    return parts or [""]


def _repeated(parts: list[str]) -> tuple[int, int]:
    """Return how many parts came before, and their characters."""
    distinct = set(parts)
    if len(distinct) == len(parts):
        return 0, 0
    characters = sum(map(len, parts)) - sum(map(len, distinct))
    return len(parts) - len(distinct), characters


def _share(part: float, whole: int) -> float:
    return part / whole if whole else 0.0


def _starts(line: str) -> bool:
    return line.lstrip().startswith(("•", "-"))


def _trails(line: str) -> bool:
    return line.rstrip().endswith(("...", "…"))


def _mean_length(measures: TextMeasures) -> float:
    count, characters = measures.real_words
    return _share(characters, count)


def _ngram(n: int, measure: Callable[[NDArray, NDArray, int], int]) -> Callable[[TextMeasures], float]:
    return lambda measured: _share(int(measure(measured.words.hash, measured.words.length, n)), len(measured.text))


def _script(name: str) -> Callable[[TextMeasures], float]:
    return lambda measured: measured.scripts[name]


MEASURES: dict[str, Callable[[TextMeasures], float]] = {
    "repeated_paragraphs": lambda measured: measured.repeated_paragraphs[0],
    "repeated_paragraph_characters": lambda measured: measured.repeated_paragraphs[1],
    "repeated_lines": lambda measured: measured.repeated_lines[0],
    "repeated_line_characters": lambda measured: measured.repeated_lines[1],
    **{f"top_{n}_gram": _ngram(n, _top_ngram) for n in (2, 3, 4)},
    **{f"repeated_{n}_grams": _ngram(n, _repeated_ngrams) for n in (5, 6, 7, 8, 9, 10)},
    "words": lambda measured: measured.real_words[0],
    "mean_word_length": _mean_length,
    "hashes_per_word": lambda measured: measured.per_word(measured.text.count("#")),
    "ellipses_per_word": lambda measured: measured.per_word(measured.text.count("...") + measured.text.count("…")),
    "bullet_lines": lambda measured: measured.share_of_lines(map(_starts, measured.all_lines)),
    "ellipsis_lines": lambda measured: measured.share_of_lines(map(_trails, measured.all_lines)),
    "alphabetic_words": lambda measured: measured.share_of_words(ALPHABETIC),
    "stop_words": lambda measured: measured.stop_words(),
    "lorem_ipsum": lambda measured: measured.text.lower().count("lorem ipsum"),
    "curly_brackets": lambda measured: measured.text.count("{"),
    "sentences": lambda measured: measured.sentences(),
    "ended_lines": lambda measured: measured.ended_lines(),
    "short_lines": lambda measured: measured.short_lines(),
    "repeated_nonblank_characters": lambda measured: measured.repeated_line_characters(),
    **{f"{script}_letters": _script(script) for script in SCRIPTS},
    "newlines_per_word": lambda measured: measured.per_word(measured.text.count("\n")),
}
"""A measure of a text by the name of the rule that compares it."""
UNBOUNDED = frozenset(
    [
        "words", "mean_word_length", "hashes_per_word", "ellipses_per_word", "stop_words", "lorem_ipsum",
        "curly_brackets", "sentences", "newlines_per_word",
    ]
)  # fmt: skip
"""Measures that may be above 1; all others are shares, from 0 to 1."""
