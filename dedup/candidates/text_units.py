"""Lines or paragraphs of a text, the breaks between them, and the text without some of them; pure functions of text.

A line ends with LF, CRLF or CR. Between paragraphs there are one or more lines that are empty or blank.
"""

import re
from collections.abc import Collection, Sequence
from typing import Literal

TextUnit = Literal["line", "paragraph"]
_NEWLINE = r"(?>\r\n|\n|\r)"  # atomic: CRLF is one newline, never a CR and an empty line
_BREAKS = {
    "line": re.compile(f"({_NEWLINE})"),
    "paragraph": re.compile(rf"({_NEWLINE}(?:[^\S\r\n]*{_NEWLINE})+|{_NEWLINE}\Z)"),
}


def split_units(text: str, unit: TextUnit) -> list[str]:
    """Return the units of a text and the breaks between them, in turn: joined they are the text again.

    >>> split_units("One.\\r\\nTwo.\\r\\n\\r\\n  Three.", "paragraph")
    ['One.\\r\\nTwo.', '\\r\\n\\r\\n', '  Three.']
    """
    return _BREAKS[unit].split(text)


def is_compared(unit: str, min_characters: int) -> bool:
    """Return whether a unit is long enough, but for spaces around it."""
    return len(unit) >= min_characters and len(unit.strip()) >= max(1, min_characters)


def without_units(pieces: Sequence[str], removed: Collection[int]) -> str:
    """Return the text of `pieces` (see `split_units`) without the units of these numbers; all else keeps its bytes.

    The break after a unit goes with it or, after the last, the break before it; a text ends as it did.

    >>> pieces = ["One.", "\\n\\n", "Two.", "\\n\\n\\n", "    Three.", "\\n", ""]
    >>> without_units(pieces, {1})
    'One.\\n\\n    Three.\\n'
    >>> without_units(pieces, {1, 2})
    'One.\\n'
    """
    units = pieces[::2]
    breaks = [*pieces[1::2], ""]
    end = len(units)
    ending = ""
    if not units[-1].strip() and end - 2 in removed:  # a newline at the end of the text
        end -= 1
        ending = breaks[end - 1] + units[-1]
    while end and end - 1 in removed:
        end -= 1
    kept = [units[number] + breaks[number] for number in range(end) if number not in removed]
    if end and end < len(units):
        kept[-1] = units[end - 1] + ending
    return "".join(kept)
