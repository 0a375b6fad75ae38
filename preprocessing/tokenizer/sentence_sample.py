"""A random sample of documents within a number of bytes, as sentences in a buffer: memory holds no text of them."""

import heapq
import re
from array import array
from collections.abc import Iterator
from typing import NamedTuple

from gristmill.text import utf8_size
from preprocessing.mixing.line_buffer import LineBuffer

MAX_SENTENCE_BYTES = 4096  # longer lines are split
_SENTENCE = re.compile(rf"[^\t\r\n\0]{{1,{MAX_SENTENCE_BYTES // 4}}}")  # characters have up to 4 bytes
_INDEX_BITS = 32  # of a document among those that were ever in the sample
_FIELDS = 4  # of a document: source, bytes of its text, where its sentences begin and end in the buffer
_COPIED = 1 << 20  # bytes at a time


class Sampled(NamedTuple):
    """A document that was added: its source, and the bytes of its text in UTF-8."""

    source: str
    size: int


class SentenceSample:
    """Keeps the documents with the smallest random numbers: `budget` bytes of text, but at least one document.

    One that is removed leaves its sentences in `buffer`: few do, as most are refused before they are added.
    """

    def __init__(self, budget: int, buffer: LineBuffer) -> None:
        self._budget, self._buffer = budget, buffer
        self._heap: list[int] = []  # of number and index in one, negative: the largest on top
        self._documents = array("Q")  # _FIELDS for each
        self._sources: list[str] = []
        self._size = 0

    def add(self, number: int, source: str, text: str) -> list[Sampled]:
        """Add a document with a random number below 2^64; returns those that the sample now leaves out."""
        found = Sampled(source, utf8_size(text))
        index = len(self._documents) // _FIELDS
        place = -(number << _INDEX_BITS | index)
        if self._heap and self._size + found.size > self._budget and place < self._heap[0]:
            return [found]
        start = self._buffer.size
        for sentence in sentences(text):
            self._buffer.append(sentence.encode() + b"\n")
        if source not in self._sources:
            self._sources.append(source)
        self._documents.extend((self._sources.index(source), found.size, start, self._buffer.size))
        heapq.heappush(self._heap, place)
        self._size += found.size
        return self._remove_largest()

    def documents(self) -> Iterator[Sampled]:
        """The documents of the sample, in no order."""
        return map(self._document, self._heap)

    def blocks(self) -> Iterator[bytes]:
        """The lines of the sample's sentences, document by document in the order in which they were added."""
        view = self._buffer.view()
        for index in sorted(map(_index, self._heap)):
            start, end = self._documents[index * _FIELDS + 2 : (index + 1) * _FIELDS]
            for at in range(start, end, _COPIED):
                yield view[at : min(at + _COPIED, end)].tobytes()

    def _remove_largest(self) -> list[Sampled]:
        """Remove documents until the others fit the budget, or one is left."""
        removed = []
        while self._size > self._budget and len(self._heap) > 1:
            removed.append(self._document(heapq.heappop(self._heap)))
            self._size -= removed[-1].size
        return removed

    def _document(self, place: int) -> Sampled:
        at = _index(place) * _FIELDS
        return Sampled(self._sources[self._documents[at]], self._documents[at + 1])


def _index(place: int) -> int:
    return -place & ((1 << _INDEX_BITS) - 1)


def sentences(text: str) -> Iterator[str]:
    """Split a text into sentences that SentencePiece trains on: lines of up to MAX_SENTENCE_BYTES.

    Tabs split the text too, as SentencePiece skips a sentence with one; so do carriage returns and NULs.

    >>> list(sentences("a\\tb\\n\\nc"))
    ['a', 'b', 'c']
    """
    return (found[0] for found in _SENTENCE.finditer(text))  # a list of all may take many times the text's memory
