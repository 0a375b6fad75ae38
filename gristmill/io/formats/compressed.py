"""Decompressed chunks of a .gz, .zst, .bz2 or .xz file: small ones, whatever the compression ratio.

A file is a sequence of streams (gzip members, zstd frames), which are all read, over a padding of
zero bytes where the format allows one. A stream that is truncated or corrupt is an error, wherever it lies in the file.
So is a file without a stream, as one of 0 bytes is: nothing, compressed, is some bytes, and a download that was
interrupted may leave such a file.
"""

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO

import zstandard

CHUNK = 1 << 18  # bytes read, and decompressed, at a time
_MAX_WINDOW = 1 << 31  # bytes of decompressed data that a stream may refer back to; `zstd --long=31` needs them all
_ZSTD_SKIPPABLE = bytes.fromhex("2a4d18")  # last bytes of the magic number of a skippable frame


class CorruptStream(ValueError):
    """A compressed stream is truncated or corrupt."""

    @property
    def fault(self) -> str:
        """Which of the two: it is truncated if the file ends within it."""
        return "truncated" if isinstance(self.__cause__, EOFError) else "corrupt"


def decompress(file: BinaryIO, compression: str) -> Iterator[bytes]:
    """Yield the decompressed content of `file` in chunks of at most CHUNK bytes.

    `compression` is gz, zst, bz2 or xz. Memory is that of a chunk and of the window that the stream declares,
    at most 2 GiB, of which only as much is used as the stream is long. Raises CorruptStream.
    """
    try:
        if not file.read(1):
            raise EOFError("the file is empty")
        file.seek(0)
        yield from _READERS[compression](file)
    except (zstandard.ZstdError, EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise CorruptStream(str(error)) from error
    except OSError as error:  # bz2 raises it for corrupt data, without an errno
        if error.errno is not None:
            raise
        raise CorruptStream(str(error)) from error


def _gzip_chunks(file: BinaryIO) -> Iterator[bytes]:
    with gzip.open(file) as stream:
        while chunk := stream.read(CHUNK):
            yield chunk


def _bz2_chunks(file: BinaryIO) -> Iterator[bytes]:
    return _stream_chunks(file, bz2.BZ2Decompressor)


def _xz_chunks(file: BinaryIO) -> Iterator[bytes]:
    return _stream_chunks(file, lambda: lzma.LZMADecompressor(memlimit=_MAX_WINDOW))


def _stream_chunks(
    file: BinaryIO, new: Callable[[], bz2.BZ2Decompressor] | Callable[[], lzma.LZMADecompressor]
) -> Iterator[bytes]:
    """Decompress all streams of a file. bz2.open and lzma.open would ignore a stream whose first bytes are corrupt."""
    data = _skip_zeros(file, b"")
    if not data:
        raise EOFError("there are zeros in the file, and no stream")
    while data:
        stream = new()
        while not stream.eof:
            if stream.needs_input and not data:
                data = file.read(CHUNK)
                if not data:
                    raise EOFError("the last stream is incomplete")
            yield stream.decompress(data, CHUNK)
            data = b""
        data = _skip_zeros(file, stream.unused_data)


def _skip_zeros(file: BinaryIO, data: bytes) -> bytes:
    """Read on until there is data other than zeros; empty at the end of the file."""
    data = data.lstrip(b"\0")
    while not data and (chunk := file.read(CHUNK)):
        data = chunk.lstrip(b"\0")
    return data


def _zstd_chunks(file: BinaryIO) -> Iterator[bytes]:
    """Decompress all frames of a file, a block at a time: a block has at most 128 KiB of content (RFC 8878).

    zstandard has no limit on the content that it returns for some input, and its stream reader takes a
    truncated frame for a whole one.
    """
    while magic := file.read(4):
        magic += _read_exactly(file, 4 - len(magic))
        if magic[1:] == _ZSTD_SKIPPABLE and magic[0] >> 4 == 5:
            _skip(file, int.from_bytes(_read_exactly(file, 4), "little"))
        else:
            yield from _zstd_frame(file, magic)


def _zstd_frame(file: BinaryIO, magic: bytes) -> Iterator[bytes]:
    header = magic + _read_exactly(file, 1)
    header += _read_exactly(file, zstandard.frame_header_size(header) - len(header))
    parameters = zstandard.get_frame_parameters(header)
    frame = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).decompressobj()
    frame.decompress(header)
    is_last = False
    while not is_last:
        block = _read_exactly(file, 3)
        number = int.from_bytes(block, "little")
        is_last, is_repeated_byte, size = bool(number & 1), number >> 1 & 3 == 1, number >> 3
        yield frame.decompress(block + _read_exactly(file, 1 if is_repeated_byte else size))
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


_READERS = {"gz": _gzip_chunks, "zst": _zstd_chunks, "bz2": _bz2_chunks, "xz": _xz_chunks}
