"""Near-duplicates of items in a text: places where most words of an item stand in n-grams that both have.

The n-grams of a text are read once, from first to last. Each candidate item has a window that moves along: the n-grams
of the item among the last words of the text, and how many of the item's words they cover. The time is linear in the
text, whatever it repeats: an n-gram has `MAX_ITEMS` entries in the index at most, and each comes and goes once.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gristmill.kernels import kernel

NEAR_LENGTH = 5  # words of an n-gram
ITEM_SIZE = np.dtype([("words", "<u4"), ("covered", "<u4")])  # of an item: words, and words in n-grams of the index
_STATE_BYTES = 16 << 20  # in memory, of the windows of candidates that are moved together
_SPAN = np.dtype([("item", "<i8"), ("first", "<i8"), ("last", "<i8"), ("covered", "<i8"),
                  ("best_first", "<i8"), ("best_last", "<i8")])  # fmt: skip
_WINDOW = np.dtype([("need", "<i8"), ("width", "<i8"), ("word", "<i8"), ("ring", "<i8"), ("room", "<i8"),
                    ("head", "<i8"), ("tail", "<i8"), ("covered", "<i8"), ("span", "<i8")])  # fmt: skip


class NearPlace(NamedTuple):
    """A place of an item: words `first` to `last` (exclusive) of a text; words of the item that a window there has.

    That window, the best one, are the words `best_first` to `best_last`.
    """

    item: int
    first: int
    last: int
    covered: int
    best_first: int
    best_last: int


class NearSearch:
    """The search for items of which a share of the words is in n-grams of one place of a text.

    A place has at most `words / share` words, of `words` that the item has. Words of an item that are in no n-gram of
    the index, as those of an instruction that many items share, count neither for it nor against it. At least
    `min_ngrams` words must be there, and `ignored` items are not looked for.
    """

    def __init__(
        self,
        keys: NDArray[np.uint64],
        entries: NDArray,
        sizes: NDArray,
        share: float,
        min_ngrams: int,
        ignored: NDArray[np.uint64],
    ) -> None:
        """`keys` ascending, `entries` ("item", "word") and `sizes` (ITEM_SIZE) as the index has them."""
        thousandths = round(share * 1000)  # whole numbers: no rounding that a platform could do another way
        self.keys = keys
        self.items = entries["item"]
        self.words = entries["word"]
        self.sizes = sizes
        counted = sizes["covered"].astype(np.int64)
        self.need = np.where(counted >= min_ngrams, np.maximum(min_ngrams, -(-counted * thousandths // 1000)), 0)
        self.need[ignored.astype(np.int64)] = 0
        self.width = sizes["words"].astype(np.int64) * 1000 // thousandths
        self._counts = np.zeros(len(sizes), np.int64)
        self._slots = np.full(len(sizes), -1, np.int64)
        self._touched = np.empty(len(sizes), np.int64)

    def find(self, entries: NDArray[np.int64]) -> Iterator[NearPlace]:
        """Yield the places in a text, of whose n-grams (n) `entries` has the first entry in the index, or −1."""
        count = _count_items(entries, self.keys, self.items, self._counts, self._touched)
        touched = np.sort(self._touched[:count])
        hits = self._counts[touched]
        self._counts[touched] = 0
        is_candidate = (self.need[touched] > 0) & (hits * NEAR_LENGTH >= self.need[touched])
        touched = touched[is_candidate]
        hits = hits[is_candidate]
        if not len(touched):
            return
        room = np.minimum(hits, self.width[touched])
        sizes = 8 * (self.sizes["words"][touched] + 2 * room)
        batch_starts = np.flatnonzero(np.diff(np.cumsum(sizes) // _STATE_BYTES)) + 1
        for batch in np.split(np.arange(len(touched)), batch_starts):
            yield from self._slide(entries, touched[batch], hits[batch], room[batch])

    def _slide(
        self, entries: NDArray[np.int64], items: NDArray[np.int64], hits: NDArray[np.int64], room: NDArray[np.int64]
    ) -> Iterator[NearPlace]:
        """Return the places of some candidates, of which the text has so many n-grams, and a window `room` at most."""
        windows = np.zeros(len(items), _WINDOW)
        words = self.sizes["words"][items].astype(np.int64)
        windows["need"] = self.need[items]
        windows["width"] = self.width[items]
        windows["room"] = room
        windows["span"] = -1
        windows["word"] = np.cumsum(words) - words
        windows["ring"] = np.cumsum(room) - room
        min_ngrams = -(-windows["need"] // NEAR_LENGTH)  # n-grams of a place, which are in no other place of the item
        spans = np.empty(int(np.sum(hits // np.maximum(1, min_ngrams))), _SPAN)
        self._slots[items] = np.arange(len(items))
        state = np.zeros(int(words.sum()), np.int64)
        rings = np.empty((int(room.sum()), 2), np.int64)
        count = _slide(entries, self.keys, self.items, self.words, self._slots, windows, state, rings, spans)
        self._slots[items] = -1
        return (NearPlace(*span) for span in spans[:count].tolist())


@kernel
def _count_items(
    entries: np.ndarray, keys: np.ndarray, items: np.ndarray, counts: np.ndarray, touched: np.ndarray
) -> int:
    """Count the n-grams of each item that a text has; write the items, in the order of the text."""
    count = 0
    for first in entries:
        entry = first
        while entry >= 0 and entry < len(keys) and keys[entry] == keys[first]:
            item = items[entry]
            if counts[item] == 0:
                touched[count] = item
                count += 1
            counts[item] += 1
            entry += 1
    return count


@kernel
def _is_outside(window: Any, ring: np.ndarray, end: int) -> bool:
    """Return whether a window that ends at a word of the text no longer has its oldest n-gram."""
    return ring[window.ring + window.tail % window.room, 0] < end - window.width


@kernel
def _is_covered_later(window: Any, covers: np.ndarray, ring: np.ndarray) -> bool:
    """Whether later n-grams of a window cover all words of the oldest one, and so will as long as it is there."""
    first = window.word + ring[window.ring + window.tail % window.room, 1]
    for at in range(first, first + NEAR_LENGTH):  # noqa: SIM110  a kernel has no generators
        if covers[at] == 1:
            return False
    return True


@kernel
def _drop_oldest(window: Any, covers: np.ndarray, ring: np.ndarray) -> None:
    first = window.word + ring[window.ring + window.tail % window.room, 1]
    for at in range(first, first + NEAR_LENGTH):
        covers[at] -= 1
        window.covered -= covers[at] == 0
    window.tail += 1


@kernel
def _slide(
    entries: np.ndarray,
    keys: np.ndarray,
    items: np.ndarray,
    words: np.ndarray,
    slots: np.ndarray,
    windows: np.ndarray,
    covers: np.ndarray,
    ring: np.ndarray,
    spans: np.ndarray,
) -> int:
    """Move the windows of candidates along a text; write the places where they cover enough, joined if they overlap.

    `covers` has, for each word of each candidate, how many n-grams of its window cover it; `ring` has those n-grams:
    position in the text and word of the item.
    """
    count = 0
    for position in range(len(entries)):
        entry = entries[position]
        while entry >= 0 and entry < len(keys) and keys[entry] == keys[entries[position]]:
            slot = slots[items[entry]]
            if slot >= 0:
                window = windows[slot]
                end = position + NEAR_LENGTH
                while window.tail < window.head and _is_outside(window, ring, end):
                    _drop_oldest(window, covers, ring)
                newest = window.ring + window.head % window.room
                ring[newest, 0], ring[newest, 1] = position, words[entry]
                window.head += 1
                for at in range(window.word + words[entry], window.word + words[entry] + NEAR_LENGTH):
                    window.covered += covers[at] == 0
                    covers[at] += 1
                while _is_covered_later(window, covers, ring):  # such a one would only make the place longer
                    _drop_oldest(window, covers, ring)
                if window.covered >= window.need:
                    first = ring[window.ring + window.tail % window.room, 0]
                    if window.span < 0 or first > spans[window.span].last:
                        window.span = count
                        spans[count].item = items[entry]
                        spans[count].first = first
                        spans[count].covered = 0
                        count += 1
                    spans[window.span].last = end
                    if window.covered > spans[window.span].covered:
                        spans[window.span].covered = window.covered
                        spans[window.span].best_first = first
                        spans[window.span].best_last = end
            entry += 1
    return count
