"""Minimum length: which texts are too short to learn from, by the length of their matching form."""

from functools import lru_cache
from string import punctuation
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gristmill.errors import UsageError
from gristmill.text import matching_form, utf8_size

SizeUnit = Literal["character", "byte"]


def check_threshold(threshold: int) -> None:
    """Raise UsageError for a threshold that is not a number of characters."""
    if threshold < 0:
        raise UsageError(f"threshold {threshold}: expected 0 or more characters, such as 200")


def is_short(text: str, threshold: int, unit: SizeUnit = "character") -> bool:
    """Return whether the matching form of a text has fewer than `threshold` units.

    The form of a whole text is not shorter than that of its beginning. So the first 2 × threshold characters alone are
    counted, then brought to the form: most documents are known by the count to be long enough.

    >>> is_short("a b c", 5), is_short("A,  b, c!", 6)
    (False, True)
    >>> is_short("水車", 5), is_short("水車", 5, "byte")
    (True, False)
    """
    size_of = len if unit == "character" else utf8_size
    beginning = text[: 2 * threshold]
    if _count_kept(beginning) >= threshold or size_of(matching_form(beginning)) >= threshold:
        return False
    return size_of(matching_form(text)) < threshold


def _count_kept(text: str) -> int:
    """Return a lower bound of the matching form's characters: characters of 16 bits that it keeps."""
    units = np.frombuffer(text.encode("utf-16-le", "surrogatepass"), np.uint16)
    return int(np.count_nonzero(_is_kept()[units]))


@lru_cache
def _is_kept() -> NDArray[np.bool_]:
    """Return whether the matching form keeps a character: 65,536 UTF-16 units.

    Halves of a character are not counted.
    """
    units = map(chr, range(1 << 16))
    is_kept = np.ones(1 << 16, np.bool_)
    for number, character in enumerate(units):
        is_half = "\ud800" <= character <= "\udfff"
        is_kept[number] = not (character.isspace() or character in punctuation or is_half)
    return is_kept
