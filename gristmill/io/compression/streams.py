"""Read .gz, .zst, .bz2 and .xz files in chunks; a stream that is truncated or corrupt is an error.

Such a file is a sequence of streams (gzip members, zstd frames), which are all read, over a padding of zero bytes where
the format allows one.
"""

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import BinaryIO

import zstandard

from gristmill.io.compression.zstd_frames import CHUNK, MAX_WINDOW, read_frames


class CorruptStream(ValueError):
    """A compressed stream is truncated or corrupt."""

    @property
    def fault(self) -> str:
        """Return truncated if the file ends within the stream, else corrupt."""
        return "truncated" if isinstance(self.__cause__, EOFError) else "corrupt"


@contextmanager
def wrap_corruption() -> Iterator[None]:
    """Raise CorruptStream for what libraries raise where data is truncated or corrupt."""
    try:
        yield
    except (zstandard.ZstdError, EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise CorruptStream(str(error)) from error
    except OSError as error:  # bz2 raises it for corrupt data, without an errno
        if error.errno is not None:
            raise
        raise CorruptStream(str(error)) from error


def decompress(
    file: BinaryIO,
    compression: str,
    gunzip: Callable[[BinaryIO], Iterator[bytes]] | None = None,
    end: int | None = None,
) -> Iterator[bytes]:
    """Yield the decompressed content of `file`, from where it is, in chunks of at most CHUNK bytes.

    `compression` is gz, zst, bz2 or xz; `gunzip` reads gz in place of what reads it otherwise; `end` is the byte at
    which the last frame of zst ends that is read. Memory is that of a chunk and of the window that the stream declares,
    at most 2 GiB, of which only as much is used as the stream is long; one of over 8 MiB of zstd is reserved. Raises
    CorruptStream, and UsageError for a window that does not fit the memory.
    """
    with wrap_corruption():
        start = file.tell()
        if not file.read(1):
            raise EOFError("the file is empty")
        file.seek(start)
        if compression == "zst":
            yield from read_frames(file, end)
        elif gunzip and compression == "gz":
            yield from gunzip(file)
        else:
            yield from _READERS[compression](file)


def _gzip_chunks(file: BinaryIO) -> Iterator[bytes]:
    with gzip.open(file) as stream:
        while chunk := stream.read(CHUNK):
            yield chunk


def _stream_chunks(
    file: BinaryIO, new: Callable[[], bz2.BZ2Decompressor] | Callable[[], lzma.LZMADecompressor]
) -> Iterator[bytes]:
    """Decompress all streams of a file. bz2.open and lzma.open would ignore a stream whose first bytes are corrupt."""
    data = _skip_zeros(file, b"")
    if not data:
        raise EOFError("the file has only zeros, and no compressed stream")
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


_READERS: dict[str, Callable[[BinaryIO], Iterator[bytes]]] = {
    "gz": _gzip_chunks,
    "bz2": partial(_stream_chunks, new=bz2.BZ2Decompressor),
    "xz": partial(_stream_chunks, new=lambda: lzma.LZMADecompressor(memlimit=MAX_WINDOW)),
}
