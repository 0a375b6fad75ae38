"""Cuts of a text in UTF-8, given its bytes that repeat: they begin and end between words, and join none.

A word is what stands between white space. Where a script has no spaces between words, and between emojis, one may be
cut from the next; never a letter from its marks, nor parts of one emoji from each other.
"""

import unicodedata
from array import array
from collections.abc import Iterable, Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_SPACELESS = (  # first and last characters of scripts without spaces between words, and of their punctuation
    (0x0E00, 0x0EFF), (0x0F00, 0x0FFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x1950, 0x19DF), (0x1A20, 0x1AAF),
    (0x2E80, 0x312F), (0x3190, 0x4DBF), (0x4E00, 0xA4CF), (0xA9E0, 0xA9FF), (0xAA60, 0xAA7F), (0xF900, 0xFAFF),
    (0xFE30, 0xFE4F), (0xFF00, 0xFF9F), (0xFFE0, 0xFFEF), (0x1B000, 0x1B16F), (0x20000, 0x3FFFF),
)  # fmt: skip
_JOINER = "\u200d"
_FIRST_REGION = 0x1F1E6  # letters of flags
_LAST_REGION = 0x1F1FF
_TONES = (0x1F3FB, 0x1F3FF)  # of emojis
_TAGS = (0xE0020, 0xE007F)  # of emojis


# Bytes of a document that are cut, from start to end, and the document where they occur first: group, row and offset.
CUT = np.dtype([(name, "<i8") for name in ("start", "end", "first_group", "first_row", "first_offset")])


def plan_cuts(data: bytes, spans: NDArray, size: int) -> NDArray:
    """Return what is cut of a text as CUTs, in order, given its SPANs sorted by offset, of windows of `size` bytes.

    What repeats is all bytes of these windows. A run of them is cut but for words that it has a part of, and for white
    space that keeps the words around it apart (see trim). It is as few cuts as there can be, each from one document.
    """
    starts = spans["offset"].astype(np.int64)
    ends = starts + spans["windows"] + size - 1  # ascend as the starts do
    numbers = array("q")  # of spans
    bounds = array("q", [])
    firsts = np.flatnonzero(np.append(True, starts[1:] > ends[:-1])[: len(spans)])  # of runs that overlap or touch
    for first, end in zip(firsts.tolist(), [*firsts[1:].tolist(), len(spans)], strict=True):
        start, stop = trim(data, int(starts[first]), int(ends[end - 1]))
        while start < stop:
            number = int(np.searchsorted(starts[first:end], start, "right")) - 1 + first
            until = min(stop, int(ends[number]))
            if until < stop:  # the next may as well begin earlier: between words
                earliest = max(start + 1, int(starts[number + 1]))
                until = next((at for at in range(until, earliest - 1, -1) if _is_boundary(data, at)), until)
            numbers.append(number)
            bounds.extend((start, until))
            start = until
    cuts = np.empty(len(numbers), CUT)
    cuts["start"], cuts["end"] = np.array(bounds, np.int64).reshape(-1, 2).T
    chosen = spans[np.array(numbers, np.int64)]
    for name in ("first_group", "first_row", "first_offset"):
        cuts[name] = chosen[name]
    cuts["first_offset"] += cuts["start"] - chosen["offset"]
    return cuts


def without(data: bytes, cuts: NDArray) -> bytes:
    """Return a text without its CUTs."""
    kept = list[bytes]()
    end = 0
    for cut_start, cut_end in zip(cuts["start"].tolist(), cuts["end"].tolist(), strict=True):
        if cut_start > end:
            kept.append(data[end:cut_start])
        end = cut_end
    kept.append(data[end:])
    return b"".join(kept)


def trim(data: bytes, start: int, end: int) -> tuple[int, int]:
    """Return the bytes of data[start:end] that can be cut: between words, and none if they are white space.

    Of the white space before them and after them, which may be partly theirs, the longer stays.

    >>> text = "So it goes. Read more here. The end."
    >>> for start, end in ((9, 29), (11, 28), (0, 29), (12, 15)):
    ...     begin, stop = trim(text.encode(), start, end)
    ...     text[:begin] + "|" + text[begin:stop] + "|" + text[stop:]
    'So it goes. |Read more here. |The end.'
    'So it goes. |Read more here. |The end.'
    '|So it goes. Read more here. |The end.'
    'So it goes. ||Read more here. The end.'
    """
    start = _next_boundary(data, start, end)
    while start < end and not _is_boundary(data, end):
        end -= 1
    if 0 < start < end < len(data):
        leading = _space_at_start(data, start, end)
        trailing = _space_at_end(data, start, end)
        space_before = _space_at_end(data, 0, start) + leading
        space_after = trailing + _space_at_start(data, end, len(data))
        if (space_before, trailing) >= (space_after, leading):  # of equal ones that of which the span has less
            start += leading
        else:
            end -= trailing
    while 0 < start < end < len(data) and _joins(_char_before(data, start), _char_at(data, end)):
        start = _next_boundary(data, start + 1, end)
    is_blank = _space_at_start(data, start, end) == end - start
    return (start, start) if is_blank else (start, end)


def keeps_any(stretches: NDArray, cuts: NDArray, size: int, length: int) -> bool:
    """Return whether `size` bytes or more of one of some STRETCHes of a text are left by its CUTs, one after another.

    Both are sorted; `length` is that of the text.
    """
    starts = stretches["start"].tolist()
    ends = stretches["end"].tolist()
    number = 0
    begin = 0  # of what is left before a cut
    for cut_start, cut_end in [*zip(cuts["start"].tolist(), cuts["end"].tolist(), strict=True), (length, length)]:
        while number < len(starts) and starts[number] < cut_start:
            if min(ends[number], cut_start) - max(starts[number], begin) >= size:
                return True
            if ends[number] > cut_start:  # it may go on after the cut
                break
            number += 1
        begin = cut_end
    return False


def _next_boundary(data: bytes, start: int, end: int) -> int:
    """Return the first byte from `start` on where a text may be cut, `end` if none is before."""
    while start < end and not _is_boundary(data, start):
        start += 1
    return start


def _is_boundary(data: bytes, at: int) -> bool:
    """Return whether a text may be cut at this byte."""
    if at in (0, len(data)):
        return True
    if data[at] & 0xC0 == 0x80:
        return False
    return not _joins(_char_before(data, at), _char_at(data, at))


@lru_cache(1 << 14)
def _joins(before: str, after: str) -> bool:
    """Return whether two characters, one after the other, are of one word or one emoji."""
    if before == "\r" and after == "\n":
        return True
    if before.isspace() or after.isspace():
        return False
    if before == _JOINER or _extends(after):
        return True
    if _is_region(before) and _is_region(after):
        return True
    return not (_stands_alone(before) or _stands_alone(after))


def _extends(char: str) -> bool:
    """Return whether a character belongs to the one before it."""
    code = ord(char)
    is_mark = unicodedata.category(char) in ("Mn", "Me", "Mc")
    return is_mark or char == _JOINER or _TONES[0] <= code <= _TONES[1] or _TAGS[0] <= code <= _TAGS[1]


def _is_region(char: str) -> bool:
    return _FIRST_REGION <= ord(char) <= _LAST_REGION


def _stands_alone(char: str) -> bool:
    """Return whether a character is of a script without spaces, or a symbol such as an emoji."""
    code = ord(char)
    return unicodedata.category(char) == "So" or any(first <= code <= last for first, last in _SPACELESS)


def _char_at(data: bytes, at: int) -> str:
    end = at + 1
    while end < len(data) and data[end] & 0xC0 == 0x80:
        end += 1
    return data[at:end].decode()


def _char_before(data: bytes, at: int) -> str:
    start = at - 1
    while data[start] & 0xC0 == 0x80:
        start -= 1
    return data[start:at].decode()


def _space_at_start(data: bytes, start: int, end: int) -> int:
    """Return the bytes of white space at the beginning of data[start:end]."""
    at = start
    while at < end and (char := _char_at(data, at)).isspace():
        at += len(char.encode())
    return at - start


def _space_at_end(data: bytes, start: int, end: int) -> int:
    """Return the bytes of white space at the end of data[start:end]."""
    at = end
    while at > start and (char := _char_before(data, at)).isspace():
        at -= len(char.encode())
    return end - at


def spans_of_rows(blocks: Iterable[NDArray]) -> Iterator[tuple[int, NDArray]]:
    """Yield each row that has records among blocks sorted by row, and all of them."""
    held = list[NDArray]()
    row = -1
    for block in blocks:
        for records in np.split(block, np.flatnonzero(np.diff(block["row"])) + 1):
            if held and records["row"][0] != row:
                yield row, np.concatenate(held)
                held = []
            row = int(records["row"][0])
            held.append(records)
    if held:
        yield row, np.concatenate(held)
