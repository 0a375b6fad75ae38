"""The one matching rule: lower case, no ASCII punctuation, single spaces.

Whether a document is short and whether two are near-duplicates is decided on this form, as in
SlimPajama; what is written is always the text itself.
"""

import string

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def matching_form(text: str) -> str:
    """The text as comparisons see it.

    >>> matching_form("  Hello,\\tWORLD!\\n(again)  ")
    'hello world again'
    """
    return " ".join(text.lower().translate(_NO_PUNCTUATION).split())


def utf8_size(text: str) -> int:
    """Bytes of `text` in UTF-8, without encoding it where that is not needed."""
    return len(text) if text.isascii() else len(text.encode())
