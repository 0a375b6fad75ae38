"""Matching form of a text: lower case, no ASCII punctuation, single spaces.

The length filter and near-duplicate detection compare texts in this form, as SlimPajama does; the
text that is written is never changed.
"""

import string

_PIECE = 1 << 20  # characters of a long text that are encoded together
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def matching_form(text: str) -> str:
    """Lower-case a text, drop ASCII punctuation, and join its words with single spaces.

    >>> matching_form("  Hello,\\tWORLD!\\n(again)  ")
    'hello world again'
    """
    return " ".join(text.lower().translate(_NO_PUNCTUATION).split())


def utf8_size(text: str) -> int:
    """Size of a text in UTF-8, in bytes; ASCII text is not encoded, which is faster, and a long text not as a whole."""
    if text.isascii():
        return len(text)
    return sum(len(text[start : start + _PIECE].encode()) for start in range(0, len(text), _PIECE))
