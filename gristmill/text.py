"""Matching form of a text: lower case, no ASCII punctuation, single spaces.

The length filter and near-duplicate detection compare texts in this form, as SlimPajama does; the
text that is written is never changed.
"""

import hashlib
import string
import sys
from typing import Any

_PIECE = 1 << 20  # characters of a long text that are encoded together
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def matching_form(text: str) -> str:
    """Lower-case a text, drop ASCII punctuation, and join its words with single spaces.

    >>> matching_form("  Hello,\\tWORLD!\\n(again)  ")
    'hello world again'
    """
    return " ".join(text.lower().translate(_NO_PUNCTUATION).split())


def utf8_size(text: str) -> int:
    """Return the bytes of a text in UTF-8; ASCII text is not encoded, which is faster, and a long text in pieces."""
    if text.isascii():
        return len(text)
    if len(text) <= _PIECE:
        return len(text.encode())
    size = 0
    for start in range(0, len(text), _PIECE):
        size += len(text[start : start + _PIECE].encode())
    return size


def text_digest(text: str) -> bytes:
    """Return the SHA-256 of a text in UTF-8, 32 bytes."""
    return hashlib.sha256(text.encode()).digest()


def working_memory(text: str, record: Any) -> int:
    """Return the bytes that a document takes while it is worked on: its text and its line, if it has one, each twice.

    A text takes one byte a character if all are of Latin-1, else two or four.
    """
    line = len(record) if isinstance(record, bytes) else 0
    return 2 * sys.getsizeof(text) + 2 * line
