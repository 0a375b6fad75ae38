"""Scripts of a text: what share of its letters each has."""

import unicodedata
from functools import cache

import numpy as np
from numpy.typing import NDArray

SCRIPTS = {  # by the words with which Unicode's names of their letters begin
    "latin": ("LATIN",), "cyrillic": ("CYRILLIC",), "greek": ("GREEK",), "arabic": ("ARABIC",), "hebrew": ("HEBREW",),
    "devanagari": ("DEVANAGARI",), "thai": ("THAI",), "hangul": ("HANGUL",), "kana": ("HIRAGANA", "KATAKANA"),
    "han": ("CJK",),
}  # fmt: skip


def script_shares(text: str) -> dict[str, float]:
    """Return the share of each of SCRIPTS in the letters of a text, from 0 to 1.

    >>> {script: share for script, share in script_shares("Grain, зерно!").items() if share}
    {'latin': 0.5, 'cyrillic': 0.5}
    """
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    counts = np.bincount(_script_table()[codes], minlength=len(SCRIPTS) + 2)[1:]
    letters = max(1, int(counts.sum()))
    return {script: int(count) / letters for script, count in zip(SCRIPTS, counts, strict=False)}


@cache
def _script_table() -> NDArray[np.uint8]:
    """Return for each code point 0 if it is no letter, else its script from 1, or one more than there are."""
    numbers = dict[str, int]()
    for number, starts in enumerate(SCRIPTS.values(), 1):
        for start in starts:
            numbers[start] = number
    table = np.zeros(0x110000, np.uint8)
    for code in range(0x110000):
        if unicodedata.category(chr(code))[0] == "L":
            start = unicodedata.name(chr(code), "").replace("-", " ").partition(" ")[0]
            table[code] = numbers.get(start, len(SCRIPTS) + 1)
    return table
