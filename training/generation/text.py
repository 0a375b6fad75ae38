"""Text: a prompt and the tokens that follow it, as text that comes token by token."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from gristmill.io.tokenizer_file import AnyTokenizer

_BROKEN = "\ufffd"  # what a tokenizer writes for the first bytes of a character


@dataclass
class Text:
    """A prompt's tokens, those that follow it, and their text."""

    prompt: Sequence[int]
    limit: int
    """Tokens that may follow."""
    tokenizer: AnyTokenizer
    stops: Sequence[str] = ()
    """Texts that end it, and are no part of it."""
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    """What is sure by now of the text of `tokens`: no half characters, nor what may become a stop."""
    end: Literal["", "document", "stop", "length"] = ""
    """Why it has ended: with a document, by a stop, or at the limit; empty while it has not."""

    def __post_init__(self) -> None:
        self._ids = list(self.prompt)
        self._read = len(self._ids)  # tokens whose text is known
        self._start = max(0, self._read - 1)  # of the tokens decoded with new ones: a space depends on those before
        self._pending = ""  # known, but may become a stop

    def add(self, token: int, ends: frozenset[int]) -> None:
        """Add a token; one of `ends` ends the text, and is no part of it."""
        assert not self.end
        if token in ends:
            self._finish("document")
            return
        self.tokens.append(token)
        self._ids.append(token)
        self._decode()
        if not self.end and len(self.tokens) == self.limit:
            self._finish("length")

    def _decode(self) -> None:
        """Decode what is new, unless it ends within a character."""
        before = self.tokenizer.decode(self._ids[self._start : self._read])
        whole = self.tokenizer.decode(self._ids[self._start :])
        if whole.endswith(_BROKEN) or len(whole) <= len(before):
            return
        self._start = self._read
        self._read = len(self._ids)
        self._release(whole[len(before) :])

    def _release(self, new: str) -> None:
        """Add text; what may be the beginning of a stop waits."""
        self._pending += new
        starts = [self._pending.find(stop) for stop in self.stops if stop in self._pending]
        if starts:
            self._pending = self._pending[: min(starts)]
            self._finish("stop")
            return
        waiting = max((_overlap(self._pending, stop) for stop in self.stops), default=0)
        sure = len(self._pending) - waiting
        self.text += self._pending[:sure]
        self._pending = self._pending[sure:]

    def _finish(self, end: Literal["document", "stop", "length"]) -> None:
        self.end = end
        if end != "stop":  # half a character at the end is written as the tokenizer does
            before = self.tokenizer.decode(self._ids[self._start : self._read])
            self._pending += self.tokenizer.decode(self._ids[self._start :])[len(before) :]
        self.text += self._pending
        self._pending = ""


def _overlap(text: str, stop: str) -> int:
    """Return the number of characters at the end of `text` that may be the beginning of `stop`.

    >>> _overlap("The mill.\\n", "\\n\\n"), _overlap("The mill", "\\n\\n")
    (1, 0)
    """
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0
