"""Matching form of many texts, compiled: lower case, no punctuation, single spaces, as gristmill.text.matching_form.

A shingle is `width` consecutive units of the matching form: characters, or words with the single spaces between them.
Where words are asked for, a text without spaces between them, as in Chinese or Thai, has shingles of 13 characters.
Texts are packed into UTF-8 (`pack`), rewritten (`write_form`, or `pack_forms` for all) and cut into units
(`find_shingles`).
"""

import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gristmill.errors import UsageError
from gristmill.kernels import kernel

Unit = Literal["character", "word"]
PADDING = 64  # bytes after a form that kernels may read; their values do not matter
CHUNK_BYTES = 1 << 18  # of texts packed at a time
MAX_FORM_BYTES = (1 << 31) - 1 - PADDING  # of a matching form, as offsets are int32
MAX_WORD = 16  # characters of a word, on average; a text whose words are longer has no spaces between words
WIDTH_WITHOUT_WORDS = 13  # characters of its shingles
_FIRST_UNCHANGED = 0x20000  # from this code point on none has a lower case or is white space
_PAGE_SIZE = 64  # code points
_ASCII_RUN = 64  # bytes tested together for being all ASCII
_LOWERED_BY_PYTHON = ("\u0130", "\u03a3")  # İ becomes two characters; a capital sigma depends on its context


def check_texts(texts: Any, numbers: Iterable[int] | None = None) -> None:
    """Raise UsageError unless `texts` are strings in a list, an array or the like.

    The error names a text by its number in `numbers`, by default its position.
    """
    if isinstance(texts, str | bytes | Mapping) or not hasattr(texts, "__len__") or getattr(texts, "shape", None) == ():
        raise UsageError(f"texts in a {type(texts).__name__}: expected a list of strings")
    if numbers is None:
        numbers = range(len(texts))
    for text, number in zip(texts, numbers, strict=True):
        if not isinstance(text, str):
            kind = "null" if text is None else f"of type {type(text).__name__}"
            raise UsageError(f"text {number} is {kind}: expected a string, an empty one where there is none")


def pack(texts: Sequence[str]) -> Iterator[tuple[slice, NDArray[np.uint8], NDArray[np.int64]]]:
    """Pack texts into chunks of UTF-8: yields the texts' slice, their bytes (uint8) and n + 1 offsets (int64).

    Texts with a character whose lower case `write_form` does not know are lower-cased here. The bytes are
    valid until the next chunk. UsageError for a text of more than 1.4 GB.
    """
    buffer = bytearray(min(CHUNK_BYTES, 4 * sum(map(len, texts))))
    start = 0
    ends = [0]
    for i, text in enumerate(texts):
        data = text.encode() if text.isascii() else _to_utf8(text)
        if ends[-1] + len(data) > len(buffer):
            yield from _as_arrays(start, buffer, ends)
            start = i
            ends = [0]
        if len(data) > len(buffer):
            yield from _as_arrays(i, data, [0, len(data)])
            start = i + 1
        else:
            buffer[ends[-1] : ends[-1] + len(data)] = data
            ends.append(ends[-1] + len(data))
    yield from _as_arrays(start, buffer, ends)


def _as_arrays(
    start: int, data: bytes | bytearray, ends: list[int]
) -> Iterator[tuple[slice, NDArray[np.uint8], NDArray[np.int64]]]:
    if len(ends) > 1:
        if form_size(ends[-1]) > MAX_FORM_BYTES:
            raise UsageError(f"a text of {ends[-1]:,} bytes: expected 1.4 GB or less. Cut it, or leave it out")
        packed = np.frombuffer(data, np.uint8)[: ends[-1]]
        offsets = np.array(ends, np.int64)
        packed.flags.writeable = False  # of a bytearray, too: numba compiles kernels for each of the two kinds
        yield slice(start, start + len(ends) - 1), packed, offsets


def form_size(size: int) -> int:
    """Return the bytes to allocate for the form of `size` bytes of UTF-8: Ⱥ and Ⱦ grow from two bytes to three."""
    return size * 3 // 2 + PADDING


def _to_utf8(text: str) -> bytes:
    """Return the UTF-8 of a text, which is lower-cased first if it has a character of _LOWERED_BY_PYTHON."""
    if any(char in text for char in _LOWERED_BY_PYTHON):
        text = text.lower()
    return text.encode("utf-8", "surrogatepass")


def _lower_case_pages() -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
    """Return a two-level table of Python's lower case: a page number for each 64 code points, and the pages' contents.

    Code points that lower-casing leaves as they are have page number 0. White space becomes the ASCII space.
    """
    codes = np.arange(_FIRST_UNCHANGED, dtype="<u4")
    text = codes.tobytes().decode("utf-32-le", "surrogatepass")
    for char in _LOWERED_BY_PYTHON:
        text = text.replace(char, "x")
    lowered = np.frombuffer(text.lower().encode("utf-32-le", "surrogatepass"), "<u4").copy()
    lowered[[code for code, letter in enumerate(text) if letter.isspace()]] = 32
    lowered[[ord(char) for char in _LOWERED_BY_PYTHON]] = [ord(char) for char in _LOWERED_BY_PYTHON]  # see _to_utf8
    changed = np.any((lowered != codes).reshape(-1, _PAGE_SIZE), axis=1)
    pages = np.where(changed, np.cumsum(changed), 0).astype(np.uint8)
    contents = np.concatenate([codes[:_PAGE_SIZE], lowered.reshape(-1, _PAGE_SIZE)[changed].reshape(-1)])
    return pages, contents.astype(np.uint32)


def _ascii_table() -> NDArray[np.uint16]:
    """Return for each ASCII byte its lower case, with the flag 0x100 for punctuation or 0x200 for white space."""
    table = np.arange(256, dtype=np.uint16)
    for code in range(128):
        letter = chr(code)
        if letter.isspace():
            table[code] = 32 | 0x200
        elif letter in string.punctuation:
            table[code] = code | 0x100
        else:
            table[code] = ord(letter.lower())
    return table


class PackedForms(NamedTuple):
    """Some texts and their matching forms.

    Text i is the UTF-8 bytes data[offsets[i] : offsets[i + 1]], its form forms[bounds[i] : bounds[i + 1]]; PADDING
    bytes follow the last form.
    """

    texts: slice  # among all that were given
    data: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    forms: NDArray[np.uint8]
    bounds: NDArray[np.int64]
    are_ascii: NDArray[np.bool_]  # the forms


def pack_forms(texts: Sequence[str]) -> Iterator[PackedForms]:
    """Yield chunks of texts as `pack` does, with their matching forms."""
    for chunk, data, offsets in pack(texts):
        forms = np.empty(form_size(len(data)), np.uint8)
        bounds = np.zeros(len(offsets), np.int64)
        are_ascii = np.empty(len(offsets) - 1, np.bool_)
        _write_forms(data, offsets, forms, bounds, are_ascii)
        yield PackedForms(chunk, data, offsets, forms, bounds, are_ascii)


_ASCII_TABLE = _ascii_table()
_PAGE_NUMBERS, _LOWER_CASE = _lower_case_pages()


@kernel
def write_form(text: np.ndarray, form: np.ndarray) -> tuple[int, bool]:
    """Write the matching form of a packed `text` (uint8) to `form` (uint8); return its size and whether it is ASCII."""
    # Indices are unsigned: numba then skips its check for negative ones.
    at = np.uintp(0)
    size = np.uintp(0)
    after_space = np.uintp(1)
    end = np.uintp(len(text))
    is_ascii = True
    one = np.uintp(1)
    while at < end:
        stop = min(at + np.uintp(_ASCII_RUN), end)
        if _is_ascii(text[at:stop]):
            size, after_space = _write_ascii(text[at:stop], form, size, after_space)
            at = stop
        while at < stop:
            code, at = _decode_utf8(text, at)
            entry = np.uintp(_ASCII_TABLE[code]) if code < 0x80 else np.uintp(_lower_case(code))
            if code < 0x80 or entry == 32:
                entry |= np.uintp(0x200 if entry == 32 else 0)
                punctuation = (entry >> np.uintp(8)) & one
                space = entry >> np.uintp(9)
                form[size] = np.uint8(entry)
                size += one - punctuation - (space & after_space)
                after_space = space | (punctuation & after_space)
            else:
                size = _encode_utf8(form, size, np.uint32(entry))
                after_space = np.uintp(0)
                is_ascii = bool(is_ascii and entry < 0x80)  # the lower case of the Kelvin sign is ASCII's k
    if size and form[size - one] == 32:
        size -= one
    return int(np.int64(size)), is_ascii


@kernel
def _write_forms(
    data: np.ndarray, offsets: np.ndarray, forms: np.ndarray, bounds: np.ndarray, are_ascii: np.ndarray
) -> None:
    """Write the matching form of packed text i to forms[bounds[i] : bounds[i + 1]]."""
    for i in range(len(offsets) - 1):
        size, are_ascii[i] = write_form(data[offsets[i] : offsets[i + 1]], forms[bounds[i] :])
        bounds[i + 1] = bounds[i] + size


@kernel(inline="always")
def _is_ascii(text: np.ndarray) -> bool:
    """Return whether all bytes are ASCII; without a branch per byte, so that it is vectorised."""
    high = np.uint8(0)
    for byte in text:
        high |= byte
    return bool(high < 0x80)


@kernel(inline="always")
def _write_ascii(
    text: np.ndarray, form: np.ndarray, size: np.uintp, after_space: np.uintp
) -> tuple[np.uintp, np.uintp]:
    """Write ASCII bytes; return the new size, and after_space: 1 if the form is empty or ends with a space."""
    for byte in text:
        entry = np.uintp(_ASCII_TABLE[byte])
        punctuation = (entry >> np.uintp(8)) & np.uintp(1)
        space = entry >> np.uintp(9)
        form[size] = np.uint8(entry)  # kept only if size grows: no branch to mispredict
        size += np.uintp(1) - punctuation - (space & after_space)
        after_space = space | (punctuation & after_space)
    return size, after_space


@kernel(inline="always")
def _decode_utf8(text: np.ndarray, at: np.uintp) -> tuple[np.uint32, np.uintp]:
    """Return the code point encoded at `at`, and the offset of the next."""
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


@kernel(inline="always")
def _lower_case(code: np.uint32) -> np.uint32:
    """Return the lower case of a code point, by the two-level table."""
    if code >= _FIRST_UNCHANGED:
        return code
    page = np.uint32(_PAGE_NUMBERS[code // np.uint32(_PAGE_SIZE)])
    return _LOWER_CASE[page * np.uint32(_PAGE_SIZE) + code % np.uint32(_PAGE_SIZE)] if page else code


@kernel(inline="always")
def _encode_utf8(form: np.ndarray, at: np.uintp, code: np.uint32) -> np.uintp:
    """Write a code point as UTF-8 at `at`; return the offset after it."""
    tail = np.uint8(0x80 | (code & 0x3F))
    one = np.uintp(1)
    if code < 0x80:
        form[at] = np.uint8(code)
        return at + one
    if code < 0x800:
        form[at] = np.uint8(0xC0 | code >> 6)
        form[at + one] = tail
        return at + np.uintp(2)
    middle = np.uint8(0x80 | (code >> 6 & 0x3F))
    if code < 0x10000:
        form[at] = np.uint8(0xE0 | code >> 12)
        form[at + one] = middle
        form[at + np.uintp(2)] = tail
        return at + np.uintp(3)
    form[at] = np.uint8(0xF0 | code >> 18)
    form[at + one] = np.uint8(0x80 | (code >> 12 & 0x3F))
    form[at + np.uintp(2)] = middle
    form[at + np.uintp(3)] = tail
    return at + np.uintp(4)


@kernel
def find_shingles(form: np.ndarray, size: int, width: int, by_word: bool, starts: np.ndarray) -> tuple[int, int, bool]:
    """Write the offsets of a form's units to `starts`; return the number of shingles, their width in units, by_word.

    A text whose words have more than MAX_WORD characters on average is cut into characters, as if it had been asked
    for shingles of WIDTH_WITHOUT_WORDS characters.
    """
    count = find_units(form, size, by_word, starts)
    if by_word and size > MAX_WORD * count:
        letters = 1 - count  # spaces between words are no letters
        for i in range(size):
            letters += int((form[i] & 0xC0) != 0x80)
        if letters > MAX_WORD * count:
            count = find_units(form, size, False, starts)
            width = WIDTH_WITHOUT_WORDS
            by_word = False
    return max(count - width + 1, 0), width, by_word


@kernel
def find_units(form: np.ndarray, size: int, by_word: bool, starts: np.ndarray) -> int:
    """Write the offsets of a form's units to `starts` (int32), n + 1 of them; return n.

    Unit i ends at starts[i + 1], or for words at the space before it.
    """
    count = np.uintp(0)
    after_space = np.uintp(1)
    for i in range(size):
        starts[count] = i
        if by_word:
            count += after_space
            after_space = np.uintp(form[i] == 32)
        else:
            count += np.uintp((form[i] & 0xC0) != 0x80)
    starts[count] = size + by_word
    return int(np.int64(count))
