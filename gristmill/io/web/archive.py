"""Records of a web archive (WARC 0.17 to 1.1), as they are stored; a damaged record is skipped, not the archive.

Field names count in upper and lower case, and lines may end in a bare newline, as in ClueWeb09. After a record whose
header or length is damaged, the next line that begins a record is searched for, so that the records in between are not
lost.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from gristmill.budget import MemoryReservation
from gristmill.errors import DamagedFile
from gristmill.io.web.gzip_members import Gap
from gristmill.io.web.responses import parse_headers

KNOWN_TYPES = (
    "warcinfo", "response", "resource", "request", "metadata", "revisit", "conversion", "continuation",
)  # fmt: skip
_VERSION = re.compile(rb"WARC/\d+\.\d+[ \t]*\r?\n")
_NEXT_VERSION = re.compile(rb"\n(?=WARC/\d+\.\d+[ \t]*\r?\n)")
_BLANK = re.compile(rb"[\r\n]*")
_RECORD_END = re.compile(rb"\r?\n\r?\n")
_BLANK_LINE = re.compile(rb"\n\r?\n")
_LENGTH = re.compile(r"\d{1,15}")
_LONGEST_VERSION = 64  # bytes of such a line, about
_MAX_HEADER_BYTES = 1 << 20
_FREE_RETRIES = 256 << 20  # bytes of damaged records that may be searched again, besides as many as were read
_KEPT = 1024  # bytes of a damaged record
_MAX_UNKNOWN = 100  # records that are damaged or of unknown types, before the first of a known one
_BEGINNING = 1 << 16  # bytes that are kept of a record that is too long, for its HTTP headers


class Record(NamedTuple):
    """A record: headers by names in lower case, the length of its content, and that; of a long one the beginning."""

    headers: dict[str, list[str]]
    length: int
    content: bytes

    @property
    def is_whole(self) -> bool:
        return len(self.content) == self.length

    @property
    def type(self) -> str:
        return self.get("warc-type").lower()

    def get(self, name: str) -> str:
        """Return the value of a header; '' without one."""
        return self.headers.get(name, [""])[0]


class DamagedRecord(NamedTuple):
    """Bytes of an archive that are no record: how they begin, and how many there are, as far as that is known."""

    beginning: bytes
    size: int


def read_records(
    path: Path, chunks: Iterator[bytes], limit: int, hold: MemoryReservation
) -> Iterator[Record | DamagedRecord]:
    """Yield the records of an archive, whose `chunks` are decompressed; a Gap among them is a damaged record.

    Of a record over `limit` bytes, or one that does not fit the memory of `hold`, only the beginning is kept. Raises
    DamagedFile where the archive ends within a record, where it holds none of a known type, and where so much is
    damaged that the search would take too long.
    """
    yield from _Parser(path, _Stream(chunks), limit, hold).read()


class _Parser:
    """The state of reading an archive: how many records were read, and how much was searched a second time."""

    def __init__(self, path: Path, stream: "_Stream", limit: int, hold: MemoryReservation) -> None:
        self._path = path
        self._stream = stream
        self._limit = limit
        self._hold = hold
        self._read = 0
        self._searched = 0

    def read(self) -> Iterator[Record | DamagedRecord]:
        stream = self._stream
        is_known = False
        waiting = list[Record | DamagedRecord]()  # until there is a record that makes this an archive
        while len(waiting) < _MAX_UNKNOWN:
            stream.skip_blank_lines()
            start = stream.place
            record: Record | DamagedRecord
            if stream.peek(1):
                record = self._next()
                if stream.gap is not None and self._reaches_gap(record):
                    record = self._skip_gap(start)
            elif stream.gap is not None:
                record = self._skip_gap(start)
            else:
                break
            self._read += 1
            is_known = is_known or (isinstance(record, Record) and record.type in KNOWN_TYPES)
            if not is_known:
                if isinstance(record, Record):
                    record = record._replace(content=b"")
                waiting.append(record)
                continue
            yield from waiting
            waiting.clear()
            yield record
            del record
            self._hold.release()
        if not stream.place:
            raise DamagedFile(
                self._path,
                "empty archive",
                "expected records of a web archive, and it is empty: fetch the file again, or remove it to continue "
                "without it.",
            )
        if not is_known:
            raise DamagedFile(
                self._path,
                "no web archive",
                "expected records of a web archive, each with a line WARC/1.0 or the like and a known type, and got "
                "none: fetch the file again, or remove it to continue without it.",
            )

    def _reaches_gap(self, record: Record | DamagedRecord) -> bool:
        """Return whether the record just read is part of the damaged member, which follows in the stream."""
        stream = self._stream
        assert stream.gap is not None
        is_searched = isinstance(record, DamagedRecord) and not stream.peek(1)
        return is_searched or stream.place > stream.end - stream.gap.streamed

    def _skip_gap(self, start: int) -> DamagedRecord:
        """Go on after the damaged member, of which the record that began at `start` is a part."""
        stream = self._stream
        assert stream.gap is not None
        if start > stream.end - stream.gap.streamed:  # others were taken from it, and may be wrong
            raise self._damaged("the compressed data is damaged, and several records are compressed together")
        size = stream.end - start
        beginning = stream.skip_gap()
        return DamagedRecord(beginning[:_KEPT], size)

    def _next(self) -> Record | DamagedRecord:
        stream = self._stream
        head, is_whole = stream.read_head(_MAX_HEADER_BYTES)
        version = _VERSION.match(head)
        if not is_whole and stream.is_at_end() and (version or b"WARC/".startswith(head[:5])):
            raise self._damaged("cut off in its header")
        if not is_whole or not version:
            return self._resume(head)
        headers = parse_headers(head[version.end() :])
        length_text = headers.get("content-length", [""])[0]
        if not _LENGTH.fullmatch(length_text):
            return self._resume(head)
        length = int(length_text)
        is_kept = length <= self._limit and self._hold.fits(length)
        if is_kept:
            self._hold.grow(length)
        taken = length if is_kept else min(length, _BEGINNING)
        content = stream.take(taken)
        missing = length - len(content)
        if not is_kept:
            missing -= stream.skip(missing)
        if not missing and self._is_followed():
            return Record(headers, length, content)
        if missing and stream.is_at_end() and not _NEXT_VERSION.search(content):
            raise self._damaged(f"cut off after {length - missing:,} of {length:,} bytes")
        return self._resume(head, content if is_kept else b"")

    def _is_followed(self) -> bool:
        """Return whether a record is followed by two line ends, another record or the end: else its length is wrong."""
        ends_rightly = _RECORD_END.match(self._stream.peek(_LONGEST_VERSION)) is not None
        self._stream.skip_blank_lines()
        following = self._stream.peek(_LONGEST_VERSION)
        return ends_rightly or not following or _VERSION.match(following) is not None

    def _resume(self, head: bytes, content: bytes = b"") -> DamagedRecord:
        """Go on at the next line that begins a record, which may be in what was read as the damaged one's content."""
        stream = self._stream
        self._searched += len(head) + len(content)
        if self._searched > stream.place + _FREE_RETRIES:
            raise self._damaged("so much of it is damaged that the search for the rest would take too long")
        stream.push_back(head + content)
        skipped = stream.find(_NEXT_VERSION, _LONGEST_VERSION)
        return DamagedRecord(head[:_KEPT], skipped)

    def _damaged(self, fault: str) -> DamagedFile:
        detail = "It is unknown how much is lost: fetch the file again, or remove it to continue without it."
        return DamagedFile(self._path, "damaged archive", f"damaged in record {self._read + 1:,} ({fault}). {detail}")


class _Stream:
    """Chunks of bytes as one stream, up to the next gap; `place` is how many bytes of it were consumed."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._buffer = b""
        self._at = 0  # of the buffer, what was consumed
        self._is_finished = False
        self.gap: Gap | None = None
        self.place = 0

    @property
    def end(self) -> int:
        """Return the place of the last byte that was read from the chunks."""
        return self.place + len(self._buffer) - self._at

    def is_at_end(self) -> bool:
        """Return whether all bytes of the archive were consumed."""
        return not self.peek(1) and self.gap is None

    def peek(self, size: int) -> bytes:
        """Return the next `size` bytes, or fewer before a gap or the end, without consuming them."""
        while len(self._buffer) - self._at < size and self._fill():
            pass
        return self._buffer[self._at : self._at + size]

    def take(self, size: int) -> bytes:
        """Consume and return `size` bytes, or fewer before a gap or the end."""
        parts = list[bytes]()
        missing = size
        while missing:
            part = self._buffer[self._at : self._at + missing]
            self._consume(len(part))
            parts.append(part)
            missing -= len(part)
            if missing and not self._fill():
                break
        return b"".join(parts)

    def skip(self, size: int) -> int:
        """Consume `size` bytes, or fewer before a gap or the end; returns how many there were."""
        missing = size
        while missing:
            available = min(len(self._buffer) - self._at, missing)
            self._consume(available)
            missing -= available
            if missing and not self._fill():
                break
        return size - missing

    def skip_blank_lines(self) -> None:
        """Consume line ends."""
        while True:
            blank = _BLANK.match(self._buffer, self._at)
            assert blank is not None
            self._consume(len(blank[0]))
            if self._at < len(self._buffer) or not self._fill():
                return

    def read_head(self, limit: int) -> tuple[bytes, bool]:
        """Consume and return the bytes up to a blank line, and whether there is one within `limit` bytes."""
        looked = self._at
        while True:
            blank = _BLANK_LINE.search(self._buffer, looked)
            if blank:
                return self.take(blank.end() - self._at), True
            available = len(self._buffer) - self._at
            if available >= limit or not self._fill():
                return self.take(min(available, limit)), False
            looked = self._at + max(available - 2, 0)

    def find(self, pattern: re.Pattern[bytes], longest: int) -> int:
        """Consume up to the end of a match of `pattern`, at most `longest` bytes long, to a gap or to the end.

        Returns how many bytes there were.
        """
        start = self.place
        while True:
            match = pattern.search(self._buffer, self._at)
            if match:
                self._consume(match.end() - self._at)
                return self.place - start
            self._consume(max(len(self._buffer) - self._at - longest, 0))
            if not self._fill():
                self._consume(len(self._buffer) - self._at)
                return self.place - start

    def push_back(self, content: bytes) -> None:
        """Put consumed bytes back: they come next."""
        self._buffer = content + self._buffer[self._at :]
        self._at = 0
        self.place -= len(content)

    def skip_gap(self) -> bytes:
        """Consume all before the gap, which is returned, and the gap."""
        rest = self._buffer[self._at :]
        self._consume(len(rest))
        self.gap = None
        return rest

    def _consume(self, size: int) -> None:
        self._at += size
        self.place += size

    def _fill(self) -> bool:
        """Append the next chunk to the buffer. Returns whether there is one before a gap and the end."""
        if self._is_finished or self.gap is not None:
            return False
        chunk = next(self._chunks, None)
        if chunk is None:
            self._is_finished = True
            return False
        if isinstance(chunk, Gap):
            self.gap = chunk
            return False
        self._buffer = self._buffer[self._at :] + chunk
        self._at = 0
        return True
