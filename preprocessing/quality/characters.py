"""Characters that rules know: signs, and the marks that end a sentence, of the scripts that have them."""

import unicodedata
from functools import lru_cache

SENTENCE_ENDS = frozenset(".!?։؟۔܀܁܂߹।॥၊။።፧፨᙮᠃᠉‼‽⁇⁈⁉⸮⸼。꓿﹒﹖﹗！．？｡")
_SIGNS = frozenset(["Pd", "Ps", "Pe", "Pi", "Pf", "Cc"])

_MORE_SIGNS = frozenset("！：％，；？、。…►")


def is_symbol(word: str) -> bool:
    """Whether a word has none but signs: ASCII punctuation, brackets, quotes, dashes, marks and control characters.

    >>> is_symbol("--"), is_symbol("3"), is_symbol("»")
    (True, False, True)
    """
    return all(map(_is_sign, word))


@lru_cache(1 << 12)
def _is_sign(c: str) -> bool:
    if c.isascii():
        return (not c.isalnum() and not c.isspace()) or unicodedata.category(c) == "Cc"
    return unicodedata.category(c) in _SIGNS or c in _MORE_SIGNS or c in SENTENCE_ENDS
