"""The matching form of many texts, compiled: gristmill.text.matching_form as UTF-8, and where its units begin.

A shingle is `width` units of the matching form that follow one another: characters, or words with
the single spaces between them. What is compiled is kept by the age of its own file: after a change
here, `touch` the modules that import it.
"""

import string
from collections.abc import Iterator, Sequence
from typing import Literal

import numba as nb
import numpy as np
from numpy.typing import NDArray

from gristmill.errors import UsageError

Unit = Literal["character", "word"]
ROOM = 64  # bytes past the end of a form that may be read, and hold anything
CHUNK = 1 << 18  # bytes packed at a time
LONGEST = (1 << 31) - 1 - ROOM  # bytes of a matching form: positions are int32
_BEYOND = 0x20000  # no code point from here on has another case, or is a space
_PAGE = 64
_RUN = 64  # bytes that are ASCII together, or looked at one by one
_HARD = ("\u0130", "\u03a3")  # İ becomes two characters; a capital sigma depends on its neighbours


def pack(texts: Sequence[str]) -> Iterator[tuple[slice, NDArray[np.uint8], NDArray[np.int64]]]:
    """Texts as UTF-8, some at a time, one after the other: which, their bytes, and where each begins and the last ends.

    What `write_form` cannot lower-case is in lower case. The bytes are overwritten by the next ones.
    UsageError for a text of more than 1.4 GB.
    """
    room = bytearray(min(CHUNK, 4 * sum(map(len, texts))))
    start, ends = 0, [0]
    for i, text in enumerate(texts):
        data = text.encode() if text.isascii() else _encode(text)
        if ends[-1] + len(data) > len(room):
            yield from _packed(start, room, ends)
            start, ends = i, [0]
        if len(data) > len(room):
            yield from _packed(i, data, [0, len(data)])
            start = i + 1
        else:
            room[ends[-1] : ends[-1] + len(data)] = data
            ends.append(ends[-1] + len(data))
    yield from _packed(start, room, ends)


def _packed(
    start: int, data: bytes | bytearray, ends: list[int]
) -> Iterator[tuple[slice, NDArray[np.uint8], NDArray[np.int64]]]:
    if len(ends) > 1:
        if form_size(ends[-1]) > LONGEST:
            raise UsageError(f"a text of {ends[-1]:,} bytes: wanted 1.4 GB or less. Cut it, or leave it out")
        offsets = np.array(ends, np.int64)
        yield slice(start, start + len(ends) - 1), np.frombuffer(data, np.uint8)[: ends[-1]], offsets


def form_size(size: int) -> int:
    """The largest matching form of so many bytes of UTF-8, and room: Ⱥ and Ⱦ grow from two bytes to three."""
    return size * 3 // 2 + ROOM


def _encode(text: str) -> bytes:
    lowered = text.lower() if any(hard in text for hard in _HARD) else text
    return lowered.encode("utf-8", "surrogatepass")


def _lower_pages() -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
    """Python's lower case in two steps: the page of 64 code points, then each one's. Page 0 is for all that stays.

    A space becomes ASCII's.
    """
    codes = np.arange(_BEYOND, dtype="<u4")
    text = codes.tobytes().decode("utf-32-le", "surrogatepass")
    for hard in _HARD:
        text = text.replace(hard, "x")
    lowered = np.frombuffer(text.lower().encode("utf-32-le", "surrogatepass"), "<u4").copy()
    lowered[[code for code, letter in enumerate(text) if letter.isspace()]] = 32
    lowered[[ord(hard) for hard in _HARD]] = [ord(hard) for hard in _HARD]  # never seen: _encode
    changed = np.any((lowered != codes).reshape(-1, _PAGE), axis=1)
    pages = np.where(changed, np.cumsum(changed), 0).astype(np.uint8)
    return pages, np.concatenate([codes[:_PAGE], lowered.reshape(-1, _PAGE)[changed].reshape(-1)]).astype(np.uint32)


def _ascii_kinds() -> NDArray[np.uint16]:
    """For each byte what to write, and above it two flags: 1 for punctuation, 2 for white space."""
    kinds = np.arange(256, dtype=np.uint16)
    for code in range(128):
        letter = chr(code)
        kinds[code] = 32 | 0x200 if letter.isspace() else ord(letter.lower()) | 0x100 * (letter in string.punctuation)
    return kinds


_KINDS = _ascii_kinds()
_PAGES, _LOWER = _lower_pages()


@nb.njit(nogil=True, cache=True)
def write_form(text: np.ndarray, form: np.ndarray) -> tuple[int, bool]:
    """Write the matching form of packed `text`; return its size in bytes, and whether all of it is ASCII."""
    at, size, after_space = np.uintp(0), np.uintp(0), np.uintp(1)  # unsigned: numba then wraps no negative index
    end, is_ascii, one = np.uintp(len(text)), True, np.uintp(1)
    while at < end:
        stop = min(at + np.uintp(_RUN), end)
        if _is_ascii(text[at:stop]):
            size, after_space = _write_ascii(text[at:stop], form, size, after_space)
            at = stop
        while at < stop:
            code, at = _decode(text, at)
            kind = np.uintp(_KINDS[code]) if code < 0x80 else np.uintp(_lower(code))
            if code < 0x80 or kind == 32:
                kind |= np.uintp(0x200 if kind == 32 else 0)
                drop, space = (kind >> np.uintp(8)) & one, kind >> np.uintp(9)
                form[size] = np.uint8(kind)
                size += one - drop - (space & after_space)
                after_space = space | (drop & after_space)
            else:
                size, after_space = _write(form, size, np.uint32(kind)), np.uintp(0)
                is_ascii = bool(is_ascii and kind < 0x80)  # a Kelvin sign is a k
    if size and form[size - one] == 32:
        size -= one
    return int(np.int64(size)), is_ascii


@nb.njit(inline="always")
def _is_ascii(text: np.ndarray) -> bool:
    high = np.uint8(0)
    for byte in text:
        high |= byte
    return bool(high < 0x80)


@nb.njit(inline="always")
def _write_ascii(
    text: np.ndarray, form: np.ndarray, size: np.uintp, after_space: np.uintp
) -> tuple[np.uintp, np.uintp]:
    for byte in text:
        kind = np.uintp(_KINDS[byte])
        drop, space = (kind >> np.uintp(8)) & np.uintp(1), kind >> np.uintp(9)
        form[size] = np.uint8(kind)  # overwritten by the next one, unless it counts: no branch to mispredict
        size += np.uintp(1) - drop - (space & after_space)
        after_space = space | (drop & after_space)
    return size, after_space


@nb.njit(inline="always")
def _decode(text: np.ndarray, at: np.uintp) -> tuple[np.uint32, np.uintp]:
    """The code point that begins at `at`, and where the next one does."""
    lead = np.uint32(text[at])
    if lead < 0x80:
        return lead, at + np.uintp(1)
    last = np.uint32(text[at + np.uintp(1)] & 0x3F)
    if lead < 0xE0:
        return np.uint32((lead & 0x1F) << 6 | last), at + np.uintp(2)
    last = np.uint32(last << 6 | (text[at + np.uintp(2)] & 0x3F))
    if lead < 0xF0:
        return np.uint32((lead & 0x0F) << 12 | last), at + np.uintp(3)
    last = np.uint32(last << 6 | (text[at + np.uintp(3)] & 0x3F))
    return np.uint32((lead & 0x07) << 18 | last), at + np.uintp(4)


@nb.njit(inline="always")
def _lower(code: np.uint32) -> np.uint32:
    if code >= _BEYOND:
        return code
    page = np.uint32(_PAGES[code // np.uint32(_PAGE)])
    return _LOWER[page * np.uint32(_PAGE) + code % np.uint32(_PAGE)] if page else code


@nb.njit(inline="always")
def _write(form: np.ndarray, at: np.uintp, code: np.uint32) -> np.uintp:
    """Write a code point as UTF-8; return where the next one goes."""
    tail, one = np.uint8(0x80 | (code & 0x3F)), np.uintp(1)
    if code < 0x80:
        form[at] = np.uint8(code)
        return at + one
    if code < 0x800:
        form[at], form[at + one] = np.uint8(0xC0 | code >> 6), tail
        return at + np.uintp(2)
    middle = np.uint8(0x80 | (code >> 6 & 0x3F))
    if code < 0x10000:
        form[at], form[at + one], form[at + np.uintp(2)] = np.uint8(0xE0 | code >> 12), middle, tail
        return at + np.uintp(3)
    form[at], form[at + one] = np.uint8(0xF0 | code >> 18), np.uint8(0x80 | (code >> 12 & 0x3F))
    form[at + np.uintp(2)], form[at + np.uintp(3)] = middle, tail
    return at + np.uintp(4)


@nb.njit(nogil=True, cache=True)
def find_units(form: np.ndarray, size: int, by_word: bool, starts: np.ndarray) -> int:
    """Where each unit of a form begins, int32, and where one after the last would; return how many there are.

    Unit i ends at starts[i + 1], less the space if it is a word.
    """
    count, after_space = np.uintp(0), np.uintp(1)
    for i in range(size):
        starts[count] = i
        if by_word:
            count += after_space
            after_space = np.uintp(form[i] == 32)
        else:
            count += np.uintp((form[i] & 0xC0) != 0x80)
    starts[count] = size + by_word
    return int(np.int64(count))
