"""Blocks and windows of texts, compiled: what is compared to find every span of `size` bytes that repeats.

A window is `size` bytes of a text; one starts at each byte that has so many after it. A span of `size` bytes or more
repeats if its windows do, so it is enough to find equal windows, and too much to compare all of them. Each window has
an anchor: of the grams in it (pieces of `gram_bytes(size)` bytes) the one with the smallest hash, the last of equal
ones. Equal windows have equal anchors, and neighbouring windows mostly have the same one. A block is a longest run of
windows with one anchor at one place. For random text there is a block for every (size + 3) / 4 windows or so.

So windows whose anchor's gram occurs in one block alone do not repeat. Where equal blocks are all that have a gram,
their windows are equal one by one. Only where a gram is in different blocks their windows have to be compared.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gristmill import kernels
from gristmill.kernels import kernel

MIN_BYTES = 16  # of a window: shorter ones repeat in any language
MAX_BYTES = 1 << 20  # of a window
GRAM_BITS = 48  # of a block's digest that are of its gram
PIECE_BYTES = 64 << 10  # windows of a text are taken so many at a time, or as many as one has bytes

_U = np.uint64
_P1, _P2, _P3 = map(_U, (11400714785074694791, 14029467366897019727, 1609587929392839161))
_P4, _P5 = map(_U, (9650029242287828579, 2870177450012600261))
_ROLLING = _U(6364136223846793005)
_HIGH_BITS = _U(((1 << GRAM_BITS) - 1) << (64 - GRAM_BITS))
_LOW_BITS = _U((1 << (64 - GRAM_BITS)) - 1)
_BYTES = np.random.Generator(np.random.PCG64(49)).integers(0, 2**64, 256, np.uint64)


class Piece(NamedTuple):
    """Bytes of a text, the row of its document, and where in the text they begin."""

    data: bytes
    row: int
    offset: int


def gram_bytes(size: int) -> int:
    """Return the length of a gram, given that of a window: so long that few grams repeat without their windows."""
    return size // 2


def note_compilation(quiet: bool = False) -> None:
    """Print a note on standard error if the kernels have to be compiled first."""
    if not quiet:
        kernels.note_compilation(_find_blocks, seconds=5)


def cut_pieces(data: bytes, row: int, size: int, first: int = 0, windows: int | None = None) -> Iterator[Piece]:
    """Yield pieces of a text that have each of its windows once, or each of some `windows` from byte `first` on.

    >>> [(bytes(piece.data), piece.offset) for piece in cut_pieces(b"abcdef", 0, 3, first=1, windows=2)]
    [(b'bcde', 1)]
    """
    end = max(0, len(data) - size + 1) if windows is None else first + windows
    step = max(PIECE_BYTES, size)
    for start in range(first, end, step):
        yield Piece(data[start : min(start + step, end) + size - 1], row, start)


def find_blocks(pieces: Iterable[Piece], size: int, block: np.dtype) -> NDArray:
    """Return the blocks of pieces as records: high and low of the digest, row, offset of the first window, windows.

    The digest is of the gram (its upper GRAM_BITS), of the block's bytes and of the place of the gram in it.
    """
    data, bounds, rows, offsets = _pack(pieces)
    hashes = np.empty(int(np.diff(bounds).max(initial=0)), np.uint64)
    owners = np.empty(len(data), np.int64)
    high = np.empty(len(data), np.uint64)
    low = np.empty(len(data), np.uint64)
    starts = np.empty(len(data), np.uint32)  # in their pieces
    windows = np.empty(len(data), np.uint32)
    count = _find_blocks(data, bounds, size, gram_bytes(size), hashes, high, low, starts, windows, owners)
    owners = owners[:count]
    records = np.empty(count, block)
    records["high"] = high[:count]
    records["low"] = low[:count]
    records["row"] = rows[owners]
    records["offset"] = starts[:count] + offsets[owners]
    records["windows"] = windows[:count]
    return records


def digest_windows(pieces: Iterable[Piece], size: int, window: np.dtype) -> NDArray:
    """Return all windows of pieces as records: high and low of the digest, row, offset."""
    data, bounds, rows, offsets = _pack(pieces)
    counts = np.maximum(0, np.diff(bounds) - size + 1)
    records = np.empty(int(counts.sum()), window)
    owners = np.repeat(np.arange(len(counts)), counts)
    starts = np.arange(len(records)) - np.repeat(np.cumsum(counts) - counts, counts)  # in their pieces
    high = np.empty(len(records), np.uint64)
    low = np.empty(len(records), np.uint64)
    _digest_windows(data, starts + bounds[owners], size, high, low)
    records["high"] = high
    records["low"] = low
    records["row"] = rows[owners]
    records["offset"] = starts + offsets[owners]
    return records


def _pack(pieces: Iterable[Piece]) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.uint32], NDArray]:
    """Return the bytes of pieces one after another, their bounds (n + 1), rows (n) and offsets (n)."""
    packed = list(pieces)
    data = np.frombuffer(b"".join(piece.data for piece in packed), np.uint8)
    bounds = np.zeros(len(packed) + 1, np.int64)
    np.cumsum([len(piece.data) for piece in packed], out=bounds[1:])
    rows = np.array([piece.row for piece in packed], np.uint32)
    offsets = np.array([piece.offset for piece in packed], np.uint32)
    return data, bounds, rows, offsets


@kernel(inline="always")
def _rotate_left(value: np.uint64, bits: int) -> np.uint64:
    return _U((value << _U(bits)) | (value >> _U(64 - bits)))


@kernel(inline="always")
def _avalanche(value: np.uint64) -> np.uint64:
    value = _U(_U(value ^ (value >> _U(33))) * _P2)
    value = _U(_U(value ^ (value >> _U(29))) * _P3)
    return _U(value ^ (value >> _U(32)))


@kernel(inline="always")
def _load_eight(data: np.ndarray, at: np.uintp) -> np.uint64:
    """Return the eight bytes from data[at] on, little-endian."""
    word = _U(data[at])
    for number in range(1, 8):
        word |= _U(data[at + np.uintp(number)]) << _U(8 * number)
    return word


@kernel(inline="always")
def _mix(value: np.uint64, word: np.uint64) -> np.uint64:
    """Return the next state of a hash: for each word a bijection of states, and for each state one of words."""
    word = _U(_rotate_left(_U(word * _P2), 31) * _P1)
    return _U(_rotate_left(_U(value ^ word), 27) * _P1 + _P4)


@kernel(inline="always")
def _mix_otherwise(value: np.uint64, word: np.uint64) -> np.uint64:
    """Return the next state of a second hash, as `_mix`, with other constants."""
    word = _U(_rotate_left(_U(word * _P3), 29) * _P5)
    return _U(_rotate_left(_U(value + word), 33) * _P2 ^ _P3)


@kernel
def _digest(data: np.ndarray, start: int, end: int, salt: int) -> tuple[np.uint64, np.uint64]:
    """Return two hashes of data[start:end], 128 bits together."""
    length = _U(end - start)
    high = _U(_U(_P5 + length) ^ _U(_U(salt) * _P1))
    low = _U(_U(_P4 ^ length) + _U(_U(salt) * _P3))
    at = np.uintp(start)
    last = np.uintp(end)
    while at + np.uintp(8) <= last:
        word = _load_eight(data, at)
        high = _mix(high, word)
        low = _mix_otherwise(low, word)
        at += np.uintp(8)
    rest = _U(0)
    while at < last:
        rest = _U(rest << _U(8)) | _U(data[at])
        at += np.uintp(1)
    return _avalanche(_mix(high, rest)), _avalanche(_mix_otherwise(low, rest))


@kernel
def _digest_windows(data: np.ndarray, starts: np.ndarray, size: int, high: np.ndarray, low: np.ndarray) -> None:
    for number in range(len(starts)):
        high[number], low[number] = _digest(data, starts[number], starts[number] + size, 0)


@kernel
def _hash_grams(data: np.ndarray, start: int, end: int, gram: int, leaving: np.uint64, hashes: np.ndarray) -> None:
    """Write the hash of each gram of data[start:end] to `hashes`."""
    rolling = _U(0)
    for at in range(start, start + gram - 1):
        rolling = _U(rolling * _ROLLING) + _BYTES[data[np.uintp(at)]]
    for number in range(end - start - gram + 1):
        leaves = np.uintp(start + number)
        rolling = _U(rolling * _ROLLING) + _BYTES[data[leaves + np.uintp(gram - 1)]]
        hashes[np.uintp(number)] = _avalanche(rolling)
        rolling = _U(rolling - _U(leaving * _BYTES[data[leaves]]))


@kernel
def _find_blocks(
    data: np.ndarray,
    bounds: np.ndarray,
    size: int,
    gram: int,
    hashes: np.ndarray,
    high: np.ndarray,
    low: np.ndarray,
    offsets: np.ndarray,
    windows: np.ndarray,
    owners: np.ndarray,
) -> int:
    """Write the blocks of each piece to the last five arrays; return how many there are.

    `hashes` has room for the grams of a piece.
    """
    grams = size - gram + 1  # of a window
    leaving = _U(1)  # factor of the byte that leaves a gram
    for _ in range(gram - 1):
        leaving = _U(leaving * _ROLLING)
    count = 0
    for owner in range(len(bounds) - 1):
        start = bounds[owner]
        end = bounds[owner + 1]
        if end - start < size:
            continue
        _hash_grams(data, start, end, gram, leaving, hashes)
        number_of_windows = end - start - size + 1
        anchor = -1
        smallest = _U(0)
        first = 0  # window of the block
        for window in range(number_of_windows):
            last = window + grams - 1  # gram of the window
            if anchor >= window:
                if hashes[np.uintp(last)] > smallest:
                    continue
                chosen = last
            else:  # the anchor has left the window
                chosen = window
                for gram_number in range(window + 1, last + 1):
                    if hashes[np.uintp(gram_number)] <= hashes[np.uintp(chosen)]:
                        chosen = gram_number
            if anchor >= 0:
                high[count], low[count] = _name_block(data, start, first, window, size, anchor, smallest)
                offsets[count] = first
                windows[count] = window - first
                owners[count] = owner
                count += 1
            anchor = chosen
            smallest = hashes[np.uintp(anchor)]
            first = window
        high[count], low[count] = _name_block(data, start, first, number_of_windows, size, anchor, smallest)
        offsets[count] = first
        windows[count] = number_of_windows - first
        owners[count] = owner
        count += 1
    return count


@kernel
def _name_block(
    data: np.ndarray, start: int, first: int, end: int, size: int, anchor: int, anchor_hash: np.uint64
) -> tuple[np.uint64, np.uint64]:
    """Return the digest of the block of the windows from `first` up to `end` of a piece that begins at `start`."""
    high, low = _digest(data, start + first, start + end + size - 1, anchor - first)
    return _U(anchor_hash & _HIGH_BITS) | _U(high & _LOW_BITS), low
