"""Read the frames of a .zst file, from one up to another, and find where they begin."""

from collections.abc import Iterator
from typing import BinaryIO

import zstandard

from gristmill.budget import MemoryReservation

CHUNK = 1 << 18  # bytes read, and decompressed, at a time
MAX_WINDOW = 1 << 31  # bytes of decompressed data that a stream may refer back to; `zstd --long=31` needs them all
_FREE_WINDOW = 8 << 20  # of zstd's levels up to 19: reserved by none
_SKIPPABLE = bytes.fromhex("2a4d18")  # last bytes of the magic number of a skippable frame
_FRAME = bytes.fromhex("28b52ffd")
_DICTIONARY_FRAME = 0x5D  # first byte of a skippable frame that has the dictionary of a .warc.zst, by its specification
_MAX_DICTIONARY = 16 << 20


def read_frames(file: BinaryIO, end: int | None = None) -> Iterator[bytes]:
    """Yield the content of a file's frames in chunks, from where it is up to the byte `end`, at which a frame ends."""
    for _, chunks in frames_of(file, end):
        yield from chunks


def frames_of(file: BinaryIO, end: int | None = None) -> Iterator[tuple[int, Iterator[bytes]]]:
    """Yield where each frame begins, and its content in chunks, to be read before the next; skippable ones are none.

    A chunk is a block, of at most 128 KiB of content (RFC 8878): zstandard has no limit on the content that it returns
    for some input, and its stream reader takes a truncated frame for a whole one. Raises EOFError if the last frame is
    incomplete or if there is none, ZstdError if one is corrupt.
    """
    dictionary: zstandard.ZstdCompressionDict | None = None
    has_frame = False
    offset = file.tell()
    while offset != end and (magic := file.read(4)):
        magic += _read_exactly(file, 4 - len(magic))
        if magic[1:] == _SKIPPABLE and magic[0] >> 4 == 5:
            size = int.from_bytes(_read_exactly(file, 4), "little")
            if magic[0] == _DICTIONARY_FRAME and size <= _MAX_DICTIONARY and not dictionary:
                dictionary = _dictionary_in(_read_exactly(file, size))
            else:
                _skip(file, size)
        else:
            yield offset, _frame_content(file, magic, dictionary)
            has_frame = True
        offset = file.tell()
    if not has_frame:
        raise EOFError("the file has only skippable frames, and no data")


def _dictionary_in(content: bytes) -> zstandard.ZstdCompressionDict:
    """Return the dictionary that a skippable frame holds, which may be compressed itself."""
    if content.startswith(_FRAME):
        content = zstandard.ZstdDecompressor().decompress(content, max_output_size=_MAX_DICTIONARY)
    return zstandard.ZstdCompressionDict(content)


def _frame_content(file: BinaryIO, magic: bytes, dictionary: zstandard.ZstdCompressionDict | None) -> Iterator[bytes]:
    """Yield the content of a frame in blocks; its first bytes, `magic`, have been read."""
    header = magic + _read_exactly(file, 1)
    header += _read_exactly(file, zstandard.frame_header_size(header) - len(header))
    parameters = zstandard.get_frame_parameters(header)
    known = dictionary if parameters.dict_id else None
    frame = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW, dict_data=known).decompressobj()
    frame.decompress(header)
    is_last = False
    hold = MemoryReservation()
    window = parameters.window_size
    held = 0
    try:
        while not is_last:
            block = _read_exactly(file, 3)
            number = int.from_bytes(block, "little")
            is_last = bool(number & 1)
            is_repeated_byte = number >> 1 & 3 == 1
            size = 1 if is_repeated_byte else number >> 3
            content = frame.decompress(block + _read_exactly(file, size))
            if held < window:
                held = min(window, held + len(content))
                if held > _FREE_WINDOW:
                    if not hold.fits(held):
                        name = getattr(file, "name", "a file")
                        raise hold.refuse(f"{name}, which refers back over {window:,} bytes,", window)
                    hold.grow(held)
            yield content
    finally:
        hold.release()
    if parameters.has_checksum:
        yield frame.decompress(_read_exactly(file, 4))


def _read_exactly(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise EOFError("the last zstd frame is incomplete")
    return data


def _skip(file: BinaryIO, size: int) -> None:
    while size:
        size -= len(_read_exactly(file, min(size, CHUNK)))
