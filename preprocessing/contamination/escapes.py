r"""Escapes in a text, as of JSON (\u2019) and HTML (&rsquo;), decoded, with the way back to its characters.

Pure functions of text. Backslashes may be doubled, as in JSON inside JSON, and ampersands escaped, as in `&amp;rsquo;`.
"""

import html
import re
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_ESCAPE = re.compile(
    r"\\+u[dD][89abAB][0-9a-fA-F]{2}\\+u[dD][c-fC-F][0-9a-fA-F]{2}"  # a surrogate pair
    r"|\\+u[0-9a-fA-F]{4}"
    r"|&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[a-zA-Z][a-zA-Z0-9]{1,31});"
)
_MAX_DEPTH = 4  # of escapes in escapes


@dataclass(frozen=True)
class Replacements:
    """Where the pieces of a decoded text come from: replacements, each between two pieces that were left as they were.

    Piece 2i + 1 is the i-th replacement. `starts` and `origins` are where each piece starts in the decoded text and in
    the one that was decoded.
    """

    starts: NDArray[np.int64]
    origins: NDArray[np.int64]

    def origin_starts(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where the characters at some places of the decoded text start in the other text."""
        piece = np.searchsorted(self.starts, places, "right") - 1
        inside = np.where(piece % 2 == 0, places - self.starts[piece], 0)
        return self.origins[piece] + inside

    def origin_ends(self, ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where the characters that end at some places of the decoded text end in the other text."""
        piece = np.searchsorted(self.starts, ends - 1, "right") - 1
        of_kept = self.origins[piece] + ends - self.starts[piece]
        of_replaced = self.origins[np.minimum(piece + 1, len(self.origins) - 1)]
        return np.where(piece % 2 == 0, of_kept, of_replaced)


def decode_escapes(text: str) -> tuple[str, list[Replacements]]:
    r"""Return a text with its escapes decoded, and what was replaced, innermost last.

    >>> decode_escapes(r"it\\u2019s &amp;eacute; &unknown; \nabla")[0]
    'it’s é &unknown; \\nabla'
    """
    rounds = list[Replacements]()
    while len(rounds) < _MAX_DEPTH and ("&" in text or "\\u" in text):
        decoded, replacements = _decode_once(text)
        if replacements is None:
            break
        text = decoded
        rounds.append(replacements)
    return text, rounds


def _decode_once(text: str) -> tuple[str, Replacements | None]:
    pieces = list[str]()
    starts = [0]
    origins = [0]
    end = 0
    for match in _ESCAPE.finditer(text):
        letters = _decode(match[0])
        if letters == match[0]:  # a name that HTML does not have
            continue
        kept = text[end : match.start()]
        end = match.end()
        pieces += (kept, letters)
        starts.append(starts[-1] + len(kept))
        starts.append(starts[-1] + len(letters))
        origins += (match.start(), end)
    if not pieces:
        return text, None
    pieces.append(text[end:])
    return "".join(pieces), Replacements(np.array(starts), np.array(origins))


@lru_cache(1 << 16)
def _decode(escape: str) -> str:
    if escape.startswith("&"):
        return html.unescape(escape)
    codes = [int(part, 16) for part in re.split(r"\\+u", escape)[1:]]
    if len(codes) == 2:
        return chr(0x10000 + ((codes[0] - 0xD800) << 10) + codes[1] - 0xDC00)
    return chr(codes[0])
