"""Stream the lines of a file, compressed or not; long ones are cut, and truncated or corrupt data is an error."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from gristmill.errors import InputError, wrap_read_errors
from gristmill.io.formats.compressed import CHUNK, CorruptStream, decompress
from gristmill.io.formats.suffixes import compression_of

MAX_LINE_BYTES = 1 << 30
_KEPT_BYTES = 1024  # of the beginning of a line that is too long


class CutLine(bytes):
    """The beginning of a line that is longer than the limit; `size` is the length of the whole line in bytes."""

    size: int


def read_lines(path: Path, start: int = 0, end: int | None = None, limit: int = MAX_LINE_BYTES) -> Iterator[bytes]:
    """Yield the lines of a file, decompressed, without their newlines; a CutLine for one of over `limit` bytes.

    `start` and `end` are byte offsets, for uncompressed files only. Memory is bounded by the longest line
    up to the limit, whatever the compression ratio. Raises InputError if the file cannot be read, or, naming
    the last good line, if a compressed stream is truncated or corrupt.
    """
    count = 0
    try:
        with wrap_read_errors(path), path.open("rb", buffering=CHUNK) as file:
            for line in split_lines(_chunks(path, file, start, end), limit):
                yield line
                count += 1
    except CorruptStream as error:
        raise _corrupt(path, f"line {count:,}", error) from error


def read_whole(path: Path, limit: int = MAX_LINE_BYTES) -> bytes:
    """The content of a file, decompressed; a CutLine if it is longer than `limit` bytes. Raises as read_lines does."""
    content, size = bytearray(), 0
    try:
        with wrap_read_errors(path), path.open("rb", buffering=CHUNK) as file:
            for chunk in _chunks(path, file, 0, None):
                size += len(chunk)
                if size > limit:
                    content, chunk = content[:_KEPT_BYTES], chunk[:_KEPT_BYTES]
                content += chunk
    except CorruptStream as error:
        raise _corrupt(path, f"byte {size:,}", error) from error
    return _line(content, size, limit)


def _corrupt(path: Path, last_good: str, error: CorruptStream) -> InputError:
    return InputError(
        f"{path}: the compressed data is truncated or corrupt after {last_good} ({error}). It is unknown how "
        "much is lost: fetch the file again, or remove it to continue without it."
    )


def split_lines(chunks: Iterable[bytes], limit: int = MAX_LINE_BYTES) -> Iterator[bytes]:
    """Split chunks at newlines, in linear time; of a line of over `limit` bytes only the beginning is kept.

    >>> list(split_lines([b"a\\nb", b"", b"c\\n\\nd"]))
    [b'a', b'bc', b'', b'd']
    """
    pending, size = bytearray(), 0  # the beginning of a line that goes on in the next chunk; its length so far
    for chunk in chunks:
        head, newline, rest = chunk.partition(b"\n")
        size += len(head)
        if size <= limit:
            pending += head
        else:
            pending = pending[:_KEPT_BYTES] + head[:_KEPT_BYTES]
        if newline:
            yield _line(pending, size, limit)
            *lines, tail = rest.split(b"\n")
            yield from lines if len(rest) <= limit else (_line(line, len(line), limit) for line in lines)
            pending, size = bytearray(tail), len(tail)
    if size:
        yield _line(pending, size, limit)


def _line(content: bytes | bytearray, size: int, limit: int) -> bytes:
    if size <= limit:
        return bytes(content)
    line = CutLine(content[:_KEPT_BYTES])
    line.size = size
    return line


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
    compression = compression_of(path.name)
    return decompress(file, compression) if compression else _plain_chunks(file, start, end)


def _plain_chunks(file: BinaryIO, start: int, end: int | None) -> Iterator[bytes]:
    file.seek(start)
    left = end - start if end is not None else None
    while chunk := file.read(CHUNK if left is None else min(CHUNK, left)):
        yield chunk
        if left is not None:
            left -= len(chunk)
