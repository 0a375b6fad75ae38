"""A stream of token ids in chunks, and where its documents end."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

CHUNK_TOKENS = 1 << 22  # of a chunk: 8 or 16 MiB
_LONGEST = 1 << 30  # tokens of a document: an .idx holds lengths as int32


class Chunk(NamedTuple):
    """Consecutive ids, and how many of them precede the end of each document that ends among them, ascending."""

    ids: NDArray[np.integer]
    ends: NDArray[np.int64]


NO_ENDS = np.empty(0, np.int64)


def cut_at_tokens(chunks: Iterator[Chunk], begin: int, end: int) -> Iterator[Chunk]:
    """Yield the same ids; a document ends after each id `end` and before each id `begin`. -1: there is no such id.

    >>> ids = np.array([7, 1, 2, 0, 7, 3, 0, 7, 4])
    >>> [chunk.ends.tolist() for chunk in cut_at_tokens(iter([Chunk(ids, NO_ENDS)]), begin=7, end=0)]
    [[4, 7]]
    """
    is_open = False
    for ids, _ in chunks:
        before_begin = NO_ENDS
        if begin >= 0:
            before_begin = np.flatnonzero(ids == begin)
        after_end = NO_ENDS
        if end >= 0:
            after_end = np.flatnonzero(ids == end) + 1
        ends = np.union1d(before_begin, after_end).astype(np.int64)
        if not is_open and len(ends) and ends[0] == 0:  # nothing precedes this id, so nothing ends before it
            ends = ends[1:]
        if len(ids):
            is_open = not (len(ends) and ends[-1] == len(ids))
        yield Chunk(ids, ends)


@dataclass
class DocumentTally:
    """Lengths of the documents of a stream, and how many of them begin and end with a given id; -1: no such id.

    Documents without a token are left out and counted as `empty`. One that is too long for an .idx is cut.
    """

    begin: int
    end: int
    begun: int = 0
    ended: int = 0
    empty: int = 0
    _lengths: list[NDArray[np.int64]] = field(default_factory=list)
    _open: int = 0  # tokens of the document that has not ended yet
    _last: int = -1  # the last id of the chunks before

    def add(self, chunk: Chunk) -> None:
        """Count the documents that end in a chunk."""
        ids, ends = chunk
        if len(ids):
            starts = ends
            if not self._open:
                starts = np.append(ends, 0)
            first_ids = ids[np.unique(starts[starts < len(ids)])]
            self.begun += int((first_ids == self.begin).sum())
        if len(ends):
            lengths = np.diff(ends, prepend=0)
            lengths[0] += self._open
            filled = lengths > 0
            self.empty += int(len(lengths) - filled.sum())
            self._lengths.append(lengths[filled])
            last_ids = np.full(len(ends), self._last)
            if len(ids):
                last_ids = np.where(ends > 0, ids[ends - 1], self._last)
            self.ended += int((last_ids[filled] == self.end).sum())
            self._open = len(ids) - int(ends[-1])
        else:
            self._open += len(ids)
        if len(ids):
            self._last = int(ids[-1])

    def close(self) -> None:
        """End the document that has not ended yet, as at the end of a file."""
        if self._open:
            self._lengths.append(np.array([self._open], np.int64))
            self.ended += self._last == self.end
            self._open = 0

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Return the tokens of each document that has ended."""
        lengths = np.concatenate([NO_ENDS, *self._lengths])
        if lengths.max(initial=0) > _LONGEST:
            pieces = list[int]()
            for length in lengths.tolist():
                pieces += _pieces(length)
            lengths = np.array(pieces, np.int64)
        return lengths.astype(np.int32)


def _pieces(length: int) -> list[int]:
    """Return the lengths of the pieces of a document that are short enough for an .idx."""
    return [min(_LONGEST, length - start) for start in range(0, length, _LONGEST)]
