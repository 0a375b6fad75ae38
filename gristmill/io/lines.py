"""Stream the lines of a file, compressed or not; long ones are cut, and truncated or corrupt data is an error."""

import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from gristmill.budget import Hold
from gristmill.errors import DamagedFile, InputError, wrap_read_errors
from gristmill.io.formats.compressed import CHUNK, CorruptStream, decompress
from gristmill.io.formats.suffixes import compression_of

MAX_LINE_BYTES = 1 << 30
MEMORY_A_BYTE = 4  # bytes of memory for a byte of a line: the line, its text, the text in UTF-8 or what is written
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_KEPT_BYTES = 1024  # of the beginning of a line that is too long


class CutLine(bytes):
    """The beginning of a line that is longer than the limit; `size` is the length of the whole line in bytes."""

    size: int


def read_lines(path: Path, start: int = 0, end: int | None = None, limit: int = MAX_LINE_BYTES) -> Iterator[bytes]:
    """Yield the lines of a file, decompressed, without their newlines; a CutLine for one of over `limit` bytes.

    `start` and `end` are byte offsets, for uncompressed files only. Memory is bounded by the longest line
    up to the limit, whatever the compression ratio; a long line is read while no other worker reads one (budget.py).
    Raises InputError if the file cannot be read; DamagedFile, naming the last good line, if a compressed stream is
    truncated or corrupt; UsageError for a line that needs more memory than there is.
    """
    count, hold = 0, Hold()

    def check(line: bytes) -> bytes:
        nonlocal count
        count += 1
        if isinstance(line, CutLine) and line.size <= limit:
            where = f"line {count:,}" + (f" after byte {start:,}" if start else "")
            raise hold.refuse(f"{path} {where}, of {line.size:,} bytes,", line.size * MEMORY_A_BYTE)
        return line

    try:
        with wrap_read_errors(path), path.open("rb", buffering=CHUNK) as file:
            yield from map(check, split_lines(_chunks(path, file, start, end), limit, hold))  # keeps no line itself
    except CorruptStream as error:
        raise damaged_stream(path, f"line {count:,}", error) from error
    finally:
        hold.release()


def read_whole(path: Path, hold: Hold, limit: int = MAX_LINE_BYTES) -> bytes:
    """The content of a file, decompressed; a CutLine if it is longer than `limit` bytes. Raises as read_lines does.

    The memory of `hold` grows with it, and is the caller's to release.
    """
    content, size = io.BytesIO(), 0
    try:
        with wrap_read_errors(path), path.open("rb", buffering=CHUNK) as file:
            for chunk in _chunks(path, file, 0, None):
                size += len(chunk)
                content = _append(content, chunk, size, limit, hold)
    except CorruptStream as error:
        raise damaged_stream(path, f"byte {size:,}", error) from error
    if size <= limit and not hold.fits(size * MEMORY_A_BYTE):
        raise hold.refuse(f"{path}, of {size:,} bytes,", size * MEMORY_A_BYTE)
    return _line(content, size, limit, hold)


def without_mark(content: bytes) -> bytes:
    """The first line of a file, or all of it, without a byte order mark."""
    return content if isinstance(content, CutLine) else content.removeprefix(_BYTE_ORDER_MARK)


def damaged_stream(path: Path, last_good: str, error: CorruptStream) -> InputError:
    """The error for a file that cannot be decompressed after `last_good`; a DamagedFile if not only memory lacked."""
    if "Allocation error" in str(error):  # of zstd: nothing is known of the file
        return InputError(f"cannot read {path}: there is too little memory ({error}). Give fewer --workers")
    return DamagedFile(
        path,
        f"{error.fault} {compression_of(path.name)}",
        f"the compressed data is truncated or corrupt after {last_good} ({error}). It is unknown how "
        "much is lost: fetch the file again, or remove it to continue without it.",
    )


def split_lines(chunks: Iterable[bytes], limit: int = MAX_LINE_BYTES, hold: Hold | None = None) -> Iterator[bytes]:
    """Split chunks at newlines, in linear time; of a line of over `limit` bytes only the beginning is kept.

    Nor is more kept of one that needs more memory than there is; `hold` holds that of a line until the next is read.

    >>> list(split_lines([b"a\\nb", b"", b"c\\n\\nd"]))
    [b'a', b'bc', b'', b'd']
    """
    hold = hold or Hold()
    pending, size = io.BytesIO(), 0  # the beginning of a line that goes on in the next chunk; its length so far
    for chunk in chunks:
        end = chunk.find(b"\n")  # not split or partition, which look at single bytes, or copy the rest
        head = chunk if end < 0 else chunk[:end]
        size += len(head)
        pending = _append(pending, head, size, limit, hold)
        if end >= 0:
            whole, pending = [_line(pending, size, limit, hold)], io.BytesIO()
            yield whole.pop()  # a long line is the caller's alone
            hold.release()
            start = end + 1
            while (end := chunk.find(b"\n", start)) >= 0:
                yield chunk[start:end] if end - start <= limit else _cut(chunk[start:end])
                start = end + 1
            size = pending.write(chunk[start:])
    if size:
        whole, pending = [_line(pending, size, limit, hold)], io.BytesIO()
        yield whole.pop()


def _append(content: io.BytesIO, data: bytes, size: int, limit: int, hold: Hold) -> io.BytesIO:
    """`content` with `data`, `size` bytes together; if they are too many, only their beginning, and nothing is held.

    A BytesIO, as its getvalue does not copy the content.
    """
    if _is_kept(size, limit, hold):
        hold.grow(size * MEMORY_A_BYTE)
        content.write(data)
        return content
    hold.release()
    beginning = content.getvalue()[:_KEPT_BYTES] + data[:_KEPT_BYTES]
    content = io.BytesIO()
    content.write(beginning[:_KEPT_BYTES])
    return content


def _line(content: io.BytesIO, size: int, limit: int, hold: Hold) -> bytes:
    line = content.getvalue()
    return line if _is_kept(size, limit, hold) else _cut_line(line, size)


def _is_kept(size: int, limit: int, hold: Hold) -> bool:
    return size <= limit and hold.fits(size * MEMORY_A_BYTE)


def _cut(line: bytes) -> CutLine:
    return _cut_line(line[:_KEPT_BYTES], len(line))


def _cut_line(beginning: bytes, size: int) -> CutLine:
    line = CutLine(beginning)
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
