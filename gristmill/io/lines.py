"""Stream the lines of a file, compressed or not; long ones are cut, and truncated or corrupt data is an error.

The compression follows from a file's first bytes, or from its name where these say nothing.
A .gz, .zst, .bz2 or .xz file is a sequence of streams (gzip members, zstd frames), which are all read, over a padding
of zero bytes where the format allows one. A stream that is truncated or corrupt is an error, wherever it lies in the
file. So is a file without a stream, as one of 0 bytes is: nothing, compressed, is some bytes, and a download that was
interrupted may leave such a file.
"""

import bz2
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

import zstandard

from gristmill.budget import MemoryReservation
from gristmill.errors import DamagedFile, InputError, wrap_read_errors
from gristmill.io.documents import TABLE_FORMATS, TEXT_FORMATS, compression_of, parse_name

CHUNK = 1 << 18  # bytes read, and decompressed, at a time
_MAX_WINDOW = 1 << 31  # bytes of decompressed data that a stream may refer back to; `zstd --long=31` needs them all
_FREE_WINDOW = 8 << 20  # of zstd's levels up to 19: reserved by none
_ZSTD_SKIPPABLE = bytes.fromhex("2a4d18")  # last bytes of the magic number of a skippable frame
_ZSTD_FRAME = bytes.fromhex("28b52ffd")
_DICTIONARY_FRAME = 0x5D  # first byte of a skippable frame that has the dictionary of a .warc.zst, by its specification
_MAX_DICTIONARY = 16 << 20
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


class CorruptStream(ValueError):
    """A compressed stream is truncated or corrupt."""

    @property
    def fault(self) -> str:
        """Return truncated if the file ends within the stream, else corrupt."""
        return "truncated" if isinstance(self.__cause__, EOFError) else "corrupt"


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


def is_compressed(path: Path) -> bool:
    """Return whether a local file is compressed, by its first bytes or its name."""
    with path.open("rb") as file:
        return bool(compression_in(path.name, file.read(FIRST)))


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


def _chunks(
    path: Path,
    file: BinaryIO,
    start: int,
    end: int | None,
    gunzip: Callable[[BinaryIO], Iterator[bytes]] | None = None,
) -> Iterator[bytes]:
    if start:
        return _plain_chunks(file, start, end)
    first = file.read(FIRST)
    file.seek(0)
    reject_stand_in(path, first)
    compression = compression_in(path.name, first)
    if compression:
        return decompress(file, compression, gunzip)
    return _plain_chunks(file, start, end)


def _plain_chunks(file: BinaryIO, start: int, end: int | None) -> Iterator[bytes]:
    file.seek(start)
    left = end - start if end is not None else None
    while chunk := file.read(CHUNK if left is None else min(CHUNK, left)):
        yield chunk
        if left is not None:
            left -= len(chunk)


def decompress(
    file: BinaryIO, compression: str, gunzip: Callable[[BinaryIO], Iterator[bytes]] | None = None
) -> Iterator[bytes]:
    """Yield the decompressed content of `file` in chunks of at most CHUNK bytes.

    `compression` is gz, zst, bz2 or xz; `gunzip` reads gz in place of what reads it otherwise. Memory is that of a
    chunk and of the window that the stream declares, at most 2 GiB, of which only as much is used as the stream is
    long; one of over 8 MiB of zstd is reserved. Raises CorruptStream, and UsageError for a window that does not fit
    the memory.
    """
    try:
        if not file.read(1):
            raise EOFError("the file is empty")
        file.seek(0)
        read = gunzip if gunzip and compression == "gz" else _READERS[compression]
        yield from read(file)
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


def _zstd_chunks(file: BinaryIO) -> Iterator[bytes]:
    """Decompress all frames of a file, a block at a time: a block has at most 128 KiB of content (RFC 8878).

    zstandard has no limit on the content that it returns for some input, and its stream reader takes a
    truncated frame for a whole one.
    """
    dictionary: zstandard.ZstdCompressionDict | None = None
    has_frame = False
    while magic := file.read(4):
        magic += _read_exactly(file, 4 - len(magic))
        if magic[1:] == _ZSTD_SKIPPABLE and magic[0] >> 4 == 5:
            size = int.from_bytes(_read_exactly(file, 4), "little")
            if magic[0] == _DICTIONARY_FRAME and size <= _MAX_DICTIONARY and not dictionary:
                dictionary = _dictionary_in(_read_exactly(file, size))
            else:
                _skip(file, size)
        else:
            yield from _zstd_frame(file, magic, dictionary)
            has_frame = True
    if not has_frame:
        raise EOFError("the file has only skippable frames, and no data")


def _dictionary_in(content: bytes) -> zstandard.ZstdCompressionDict:
    """Return the dictionary that a skippable frame holds, which may be compressed itself."""
    if content.startswith(_ZSTD_FRAME):
        content = zstandard.ZstdDecompressor().decompress(content, max_output_size=_MAX_DICTIONARY)
    return zstandard.ZstdCompressionDict(content)


def _zstd_frame(file: BinaryIO, magic: bytes, dictionary: zstandard.ZstdCompressionDict | None) -> Iterator[bytes]:
    header = magic + _read_exactly(file, 1)
    header += _read_exactly(file, zstandard.frame_header_size(header) - len(header))
    parameters = zstandard.get_frame_parameters(header)
    known = dictionary if parameters.dict_id else None
    frame = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW, dict_data=known).decompressobj()
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
            size = number >> 3
            content = frame.decompress(block + _read_exactly(file, 1 if is_repeated_byte else size))
            if held < window and (held := min(window, held + len(content))) > _FREE_WINDOW:
                if not hold.fits(held):
                    raise hold.refuse(
                        f"{getattr(file, 'name', 'a file')}, which refers back over {window:,} bytes,", window
                    )
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


_READERS: dict[str, Callable[[BinaryIO], Iterator[bytes]]] = {
    "gz": _gzip_chunks,
    "zst": _zstd_chunks,
    "bz2": partial(_stream_chunks, new=bz2.BZ2Decompressor),
    "xz": partial(_stream_chunks, new=lambda: lzma.LZMADecompressor(memlimit=_MAX_WINDOW)),
}
