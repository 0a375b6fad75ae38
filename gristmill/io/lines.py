"""Stream the lines of a file, compressed or not; long ones are cut, and truncated or corrupt data is an error.

The compression follows from a file's first bytes, or from its name where these say nothing. A compressed file without a
stream, as one of 0 bytes is, is an error, too: nothing, compressed, is some bytes, and a download that was interrupted
may leave such a file.
"""

import io
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from gristmill.budget import MemoryReservation
from gristmill.errors import DamagedFile, InputError, wrap_read_errors
from gristmill.io.compression.streams import CorruptStream, decompress, wrap_corruption
from gristmill.io.compression.zstd_frames import CHUNK, frames_of
from gristmill.io.documents import TABLE_FORMATS, TEXT_FORMATS, compression_of, parse_name

MAX_LINE_BYTES = 1 << 30
MEMORY_A_BYTE = 4  # bytes of memory for a byte of a line: the line, its text, the text in UTF-8 or what is written
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_KEPT_BYTES = 1024  # of the beginning of a line that is too long
FIRST = 64  # bytes that are looked at
_COMPRESSED = {
    "gz": re.compile(rb"\x1f\x8b"),
    "zst": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),  # the second begins a frame to skip
    "bz2": re.compile(rb"BZh[1-9]1AY&SY"),
    "xz": re.compile(rb"\xfd7zXZ\0"),
}
_PLAIN = re.compile(rb"(?:\xef\xbb\xbf)?\s*[{\[]|WARC/")  # as no compressed stream begins
_JSON = re.compile(rb"(?:\xef\xbb\xbf)?\s*[{\[]")  # as no compressed stream and no table begins
_PAGE = "HTML page"
_STAND_INS = {  # what a file is: how it begins, and what to do
    "pointer of Git LFS": (rb"version https://git-lfs", "and not the file itself: fetch it with git lfs pull"),
    _PAGE: (rb"(?i)\s*(?:<!doctype html|<html)", "as a server sends for a file that it does not give: fetch it again"),
    "Parquet file": (rb"PAR1", "whatever its name says: name it .parquet"),
    "Arrow file": (rb"ARROW1\0\0", "whatever its name says: name it .arrow"),
}


class CutLine(bytes):
    """The beginning of a line that is longer than the limit; `size` is the length of the whole line in bytes."""

    size: int


def read_lines(path: Path, start: int = 0, end: int | None = None, limit: int = MAX_LINE_BYTES) -> Iterator[bytes]:
    """Yield the lines of a file, decompressed, without their newlines; a CutLine for one of over `limit` bytes.

    `start` and `end` are byte offsets: of lines, or of frames of a .zst that begin a line. Memory is bounded by the
    longest line up to the limit, whatever the compression ratio; a long line is read while no other worker reads one
    (budget.py). Raises InputError if the file cannot be read; DamagedFile, naming the last good line, if a compressed
    stream is truncated or corrupt; UsageError for a line that needs more memory than there is.
    """
    count = 0
    hold = MemoryReservation()

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


def read_whole(path: Path, hold: MemoryReservation, limit: int = MAX_LINE_BYTES) -> bytes:
    """Return the content of a file, decompressed.

    A CutLine if it is longer than `limit` bytes. Raises as read_lines does.

    The memory of `hold` grows with it, and is the caller's to release.
    """
    content = io.BytesIO()
    size = 0
    for chunk in read_chunks(path):
        size += len(chunk)
        content = _append(content, chunk, size, limit, hold)
    if size <= limit and not hold.fits(size * MEMORY_A_BYTE):
        raise hold.refuse(f"{path}, of {size:,} bytes,", size * MEMORY_A_BYTE)
    return _line(content, size, limit, hold)


def read_chunks(path: Path, gunzip: Callable[[BinaryIO], Iterator[bytes]] | None = None) -> Iterator[bytes]:
    """Yield the content of a file, decompressed, in chunks. Raises as read_lines does.

    `gunzip` reads a .gz in place of what reads it otherwise.
    """
    size = 0
    try:
        with wrap_read_errors(path), path.open("rb", buffering=CHUNK) as file:
            for chunk in _chunks(path, file, 0, None, gunzip):
                size += len(chunk)
                yield chunk
    except CorruptStream as error:
        raise damaged_stream(path, f"byte {size:,}", error) from error


def without_mark(content: bytes) -> bytes:
    """Return the first line of a file, or all of it, without a byte order mark."""
    return content if isinstance(content, CutLine) else content.removeprefix(_BYTE_ORDER_MARK)


def damaged_stream(path: Path, last_good: str, error: CorruptStream) -> InputError:
    """Return the error for a file that cannot be decompressed after `last_good`.

    A DamagedFile if not only memory lacked.
    """
    if "Allocation error" in str(error):  # of zstd: nothing is known of the file
        return InputError(f"cannot read {path}: there is too little memory ({error}). Give fewer --workers")
    return DamagedFile(
        path,
        f"{error.fault} {compression_of(path.name) or 'compressed data'}",
        f"the compressed data is truncated or corrupt after {last_good} ({error}). It is unknown how "
        "much is lost: fetch the file again, or remove it to continue without it.",
    )


def compression_in(name: str, first: bytes) -> str:
    """Return the compression of a file by its first bytes, or else by its name; '' for none.

    >>> compression_in("a.jsonl", bytes.fromhex("1f8b08")), compression_in("a.jsonl.gz", b'{"text": 1}')
    ('gz', '')
    >>> compression_in("a.jsonl.gz", b"rubbish"), compression_in("a.warc.gz", b"WARC/1.0")
    ('gz', '')
    """
    for compression, magic in _COMPRESSED.items():
        if magic.match(first):
            return compression
    if _PLAIN.match(first):
        return ""
    return compression_of(name)


def compression_in_file(path: Path) -> str:
    """Return the compression of a local file, as compression_in."""
    with path.open("rb") as file:
        return compression_in(path.name, file.read(FIRST))


def reject_stand_in(path: Path, first: bytes) -> None:
    """Raise DamagedFile where a corpus file is, by its first bytes, something in its place."""
    parts = parse_name(path.name)
    kind = parts.format if parts else ""
    for fault, (pattern, what) in _STAND_INS.items():
        is_itself = fault == _PAGE if kind in TEXT_FORMATS else kind and what.endswith(f".{kind}")
        if re.match(pattern, first) and not is_itself:
            raise _named(path, fault, what)
    if kind in TABLE_FORMATS and _JSON.match(first):
        raise _named(path, "JSON", "and no table: name it .jsonl")


def _named(path: Path, fault: str, what: str) -> DamagedFile:
    kind = f"a {fault}"
    if fault == "JSON":
        kind = fault
    elif fault[0] in "AH":
        kind = f"an {fault}"
    return DamagedFile(path, fault, f"this is {kind}, {what}, or remove it to continue without it.")


def split_lines(
    chunks: Iterable[bytes], limit: int = MAX_LINE_BYTES, hold: MemoryReservation | None = None
) -> Iterator[bytes]:
    """Split chunks at newlines, in linear time; of a line of over `limit` bytes only the beginning is kept.

    Nor is more kept of one that needs more memory than there is; `hold` holds that of a line until the next is read.

    >>> list(split_lines([b"a\\nb", b"", b"c\\n\\nd"]))
    [b'a', b'bc', b'', b'd']
    """
    hold = hold or MemoryReservation()
    pending = io.BytesIO()  # the beginning of a line that continues in the next chunk
    size = 0  # of what is pending
    for chunk in chunks:
        end = chunk.find(b"\n")  # not split or partition, which look at single bytes, or copy the rest
        head = chunk if end < 0 else chunk[:end]
        size += len(head)
        pending = _append(pending, head, size, limit, hold)
        if end >= 0:
            whole = [_line(pending, size, limit, hold)]
            pending = io.BytesIO()
            yield whole.pop()  # a long line is the caller's alone
            hold.release()
            start = end + 1
            while (end := chunk.find(b"\n", start)) >= 0:
                yield chunk[start:end] if end - start <= limit else _cut_line(chunk[start:end], end - start)
                start = end + 1
            size = pending.write(chunk[start:])
    if size:
        whole = [_line(pending, size, limit, hold)]
        pending = io.BytesIO()
        yield whole.pop()


def _append(content: io.BytesIO, data: bytes, size: int, limit: int, hold: MemoryReservation) -> io.BytesIO:
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


def _line(content: io.BytesIO, size: int, limit: int, hold: MemoryReservation) -> bytes:
    line = content.getvalue()
    return line if _is_kept(size, limit, hold) else _cut_line(line, size)


def _is_kept(size: int, limit: int, hold: MemoryReservation) -> bool:
    return size <= limit and hold.fits(size * MEMORY_A_BYTE)


def _cut_line(beginning: bytes, size: int) -> CutLine:
    line = CutLine(beginning[:_KEPT_BYTES])
    line.size = size
    return line


def line_starts(path: Path, step: int) -> list[tuple[int, int]]:
    """Return (byte offset, row) of the first line that begins at or after each multiple of `step` bytes.

    The first is (0, 0). Reads the file, which is uncompressed, once, to count its lines.
    """
    starts = [(0, 0)]
    offset = 0
    row = 0
    target = step
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            position = 0
            while offset + len(chunk) >= target:
                line_end = chunk.find(b"\n", max(target - 1 - offset, position))
                if line_end < 0:
                    break
                row += chunk.count(b"\n", position, line_end + 1)
                position = line_end + 1
                starts.append((offset + position, row))
                target = (offset + position) // step * step + step
            row += chunk.count(b"\n", position)
            offset += len(chunk)
    return [start for start in starts if start[0] < offset or start[0] == 0]


def frame_starts(path: Path, step: int) -> list[tuple[int, int]]:
    """Return (byte offset, row) of the first frame of a .zst that begins a line at or after each multiple of `step`.

    The first is (0, 0). Reads the file once, to count its lines. Raises DamagedFile if it is truncated or corrupt.
    """
    starts = [(0, 0)]
    row = 0
    is_line_end = True
    try:
        with wrap_corruption(), path.open("rb", buffering=CHUNK) as file:
            for offset, chunks in frames_of(file):
                may_start = is_line_end and offset // step > starts[-1][0] // step
                for chunk in filter(None, chunks):
                    if may_start:
                        starts.append((offset, row))
                        may_start = False
                    row += chunk.count(b"\n")
                    is_line_end = chunk.endswith(b"\n")
    except CorruptStream as error:
        raise damaged_stream(path, f"line {row:,}", error) from error
    return starts


def _chunks(
    path: Path,
    file: BinaryIO,
    start: int,
    end: int | None,
    gunzip: Callable[[BinaryIO], Iterator[bytes]] | None = None,
) -> Iterator[bytes]:
    if start:
        compression = compression_of(path.name)
    else:
        first = file.read(FIRST)
        reject_stand_in(path, first)
        compression = compression_in(path.name, first)
    file.seek(start)
    if compression:
        return decompress(file, compression, gunzip, end)
    return _plain_chunks(file, start, end)


def _plain_chunks(file: BinaryIO, start: int, end: int | None) -> Iterator[bytes]:
    left = end - start if end is not None else None
    while chunk := file.read(CHUNK if left is None else min(CHUNK, left)):
        yield chunk
        if left is not None:
            left -= len(chunk)
