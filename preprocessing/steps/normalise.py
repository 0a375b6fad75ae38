"""Step: normalise texts to Unicode NFC, so that equal texts have equal bytes."""

import importlib.util
import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gristmill.errors import UsageError
from gristmill.steps import Batch, DocumentStep, Outcome

_LOOKED_AT = 1 << 20  # characters that are looked at together, up to the next ASCII character
_NORMALISED = 512  # characters that are normalised together, up to the next ASCII character
_ASCII = re.compile(r"[\x00-\x7f]")
_STRIDE = 64  # a run of twice as many marks has two of the characters that are looked at
_DECOMPOSE_TO_MARKS = frozenset("\u0f73\u0f75\u0f81")  # and are of class 0 themselves


@dataclass(frozen=True)
class Normalise(DocumentStep):
    """Normalise texts to NFC; with `ftfy`, repair mojibake first."""

    name = "normalise"
    removes = False
    ftfy: bool = False

    @property
    def libraries(self) -> tuple[str, ...]:
        return ("unicode", "ftfy") if self.ftfy else ("unicode",)

    def apply(self, batch: Batch) -> Outcome:
        return Outcome(texts=list(map(normaliser(self.ftfy), batch.texts)))


def normaliser(ftfy: bool) -> Callable[[str], str]:
    """Return the function that normalises a text."""
    return _repair_and_normalise if ftfy else to_nfc


def check_ftfy() -> None:
    """Raise UsageError if the package that --ftfy needs is not installed."""
    if importlib.util.find_spec("ftfy") is None:
        raise UsageError("--ftfy needs the package ftfy, which is not installed: pip install 'gristmill[ftfy]'")


def to_nfc(text: str) -> str:
    """Return the NFC of a text.

    A text that is not normalised is normalised in small pieces: those that are stay as they are after one look, which
    most do. The others take ten times as long, and up to ten times their memory.
    """
    if text.isascii() or all(unicodedata.is_normalized("NFC", piece) for piece in _pieces(text, _LOOKED_AT)):
        return text
    return "".join([unicodedata.normalize("NFC", piece) for piece in _pieces(sort_marks(text), _NORMALISED)])


def sort_marks(text: str) -> str:
    """Sort each run of 128 combining marks or more by class: an equivalent text, whose NFC takes linear time.

    unicodedata sorts a run by insertion: a million of marks in turns of two classes take an hour.
    """
    if text.isascii() or not any(map(_is_mark, text[::_STRIDE])):
        return text
    parts = list[str]()
    done = 0
    end = 0
    for at in range(0, len(text) - _STRIDE, _STRIDE):
        if at < end or not (_is_mark(text[at]) and _is_mark(text[at + _STRIDE])):
            continue
        start = end = at
        while start > done and _is_mark(text[start - 1]):
            start -= 1
        while end < len(text) and _is_mark(text[end]):
            end += 1
        if end - start >= 2 * _STRIDE:
            marks = "".join(unicodedata.normalize("NFD", character) for character in text[start:end])
            parts += [text[done:start], "".join(sorted(marks, key=unicodedata.combining))]
            done = end
    return "".join([*parts, text[done:]]) if parts else text


def _is_mark(c: str) -> bool:
    return unicodedata.combining(c) != 0 or c in _DECOMPOSE_TO_MARKS


def _pieces(text: str, characters: int) -> Iterator[str]:
    """Cut a text before ASCII characters, which never combine with what is before them, each `characters` or later."""
    start = 0
    while start < len(text):
        cut = _ASCII.search(text, start + characters)
        end = cut.start() if cut else len(text)
        yield text[start:end]
        start = end


def _repair_and_normalise(text: str) -> str:
    import ftfy

    return ftfy.fix_text(sort_marks(text), normalization="NFC")
