"""Stream the lines of .jsonl, .jsonl.gz and .jsonl.zst files; truncated or corrupt data is an error."""

import gzip
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import zstandard

from gristmill.errors import InputError, wrap_read_errors

_CHUNK = 1 << 18  # bytes
_ZSTD_WINDOW = 1 << 31  # bytes; required by files of `zstd --long=31`


def read_lines(path: Path, start: int = 0, end: int | None = None) -> Iterator[bytes]:
    """Yield the lines of a file, decompressed, without their newlines.

    `start` and `end` are byte offsets, for uncompressed files only. Raises InputError if the file cannot
    be read, or, naming the last good line, if a compressed stream is truncated or corrupt.
    """
    count = 0
    try:
        with wrap_read_errors(path), path.open("rb") as file:
            for line in split_lines(_chunks(path, file, start, end)):
                yield line
                count += 1
    except (zstandard.ZstdError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(
            f"{path}: the compressed data is truncated or corrupt after line {count:,} ({error}). It is unknown how "
            "much is lost: fetch the file again, or remove it to continue without it."
        ) from error


def split_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Split chunks at newlines, in linear time: a line that spans many chunks is copied once.

    >>> list(split_lines([b"a\\nb", b"", b"c\\n\\nd"]))
    [b'a', b'bc', b'', b'd']
    """
    pending: list[bytes] = []
    for chunk in chunks:
        head, newline, rest = chunk.partition(b"\n")
        pending.append(head)
        if newline:
            yield b"".join(pending)
            *lines, tail = rest.split(b"\n")
            yield from lines
            pending = [tail]
    last = b"".join(pending)
    if last:
        yield last


def line_starts(path: Path, step: int) -> list[tuple[int, int]]:
    """(byte offset, row) of the first line that begins at or after each multiple of `step` bytes.

    The first is (0, 0). Reads the file, which is uncompressed, once, to count its lines.
    """
    starts, offset, row, target = [(0, 0)], 0, 0, step
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            position = 0
            while offset + len(chunk) >= target:
                found = chunk.find(b"\n", max(target - 1 - offset, position))
                if found < 0:
                    break
                row += chunk.count(b"\n", position, found + 1)
                position = found + 1
                starts.append((offset + position, row))
                target = (offset + position) // step * step + step
            row += chunk.count(b"\n", position)
            offset += len(chunk)
    return [start for start in starts if start[0] < offset or start[0] == 0]


def _chunks(path: Path, file: BinaryIO, start: int, end: int | None) -> Iterator[bytes]:
    if path.name.endswith(".zst"):
        return _zstd_chunks(file)
    if path.name.endswith(".gz"):
        return _gzip_chunks(file)
    return _plain_chunks(file, start, end)


def _plain_chunks(file: BinaryIO, start: int, end: int | None) -> Iterator[bytes]:
    file.seek(start)
    left = end - start if end is not None else None
    while chunk := file.read(_CHUNK if left is None else min(_CHUNK, left)):
        yield chunk
        if left is not None:
            left -= len(chunk)


def _gzip_chunks(file: BinaryIO) -> Iterator[bytes]:
    with gzip.open(file) as stream:
        while chunk := stream.read(_CHUNK):
            yield chunk


def _zstd_chunks(file: BinaryIO) -> Iterator[bytes]:
    """Decompress all frames of a file. zstandard's stream reader would not report a truncated frame."""
    data = file.read(_CHUNK)
    while data:
        frame = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj()
        while True:
            yield frame.decompress(data)
            if frame.eof:
                break
            data = file.read(_CHUNK)
            if not data:
                raise EOFError("the last zstd frame is incomplete")
        data = frame.unused_data or file.read(_CHUNK)
