"""Decompress a .gz archive member by member; a damaged member is a gap, after which the next one is found.

Crawlers write a member for each record. So a damaged byte costs one record, not the archive.
"""

import io
import re
import zlib
from collections.abc import Iterator
from typing import BinaryIO

from gristmill.io.compression.zstd_frames import CHUNK

_MAGIC = b"\x1f\x8b"
_MEMBER = re.compile(rb"\x1f\x8b\x08[\x00-\x1f]")
_FIRST = b"WARC/"  # with which a member begins that can be continued with
_INPUT = 1 << 16  # bytes decompressed at a time
_SHOWN = 20  # bytes of the beginning of a file that is no archive
_HELD = 1 << 20  # decompressed bytes of a member that are held back until its checksum is verified
_PROBE = 4096  # compressed bytes of which the first few are decompressed to recognise a member
_FREE_RETRIES = 64 << 20  # compressed bytes that may be read again, besides as many as were read


class Gap(bytes):
    """An empty chunk in place of a damaged member, of which `streamed` bytes came before it, and are damaged too."""

    streamed: int = 0

    @classmethod
    def after(cls, streamed: int) -> "Gap":
        """Return the gap after so many bytes of the damaged member."""
        gap = cls()
        gap.streamed = streamed
        return gap


def gzip_members(file: BinaryIO) -> Iterator[bytes]:
    """Yield the decompressed content of all members, in chunks, and a Gap for each that is damaged.

    What is yielded of a member up to 1 MiB long is verified; a longer one may turn out as damaged later. Time is linear
    in the file. Raises zlib.error or EOFError where too much would be read again, where the last member is cut off,
    where no later member begins with a record, and for a file without any whole member.
    """
    following: int | None = 0
    retried = 0
    has_member = False
    while following is not None:
        start = following
        member = _Member(file, start)
        try:
            yield from member.read()
            has_member = has_member or member.is_found
            following = member.end
        except (zlib.error, EOFError) as error:
            retried += member.position - start
            if retried > start + _FREE_RETRIES:
                raise
            following, are_others_lost = _next_member(file, start + 1)
            if following is None and (isinstance(error, EOFError) or not has_member or are_others_lost):
                raise
            yield Gap.after(member.streamed)
    if not has_member:
        raise EOFError("the file has only zeros, and no gzip member")


class _Member:
    """One member of a file: where it ends (None: with the file), and how many bytes of it were yielded."""

    def __init__(self, file: BinaryIO, start: int) -> None:
        self._file = file
        self._start = start
        self.position = start
        self.end: int | None = None
        self.streamed = 0
        self.is_found = False

    def read(self) -> Iterator[bytes]:
        """Yield its content. Raises zlib.error where it is damaged, EOFError where it is cut off."""
        self._file.seek(self._start)
        data = self._skip_zeros()
        if not data:
            return
        if not data.startswith(_MAGIC[: len(data)]):
            if self._start == 0:
                raise zlib.error(f"it is neither gzip nor a web archive: it begins with {data[:_SHOWN]!r}")
            raise zlib.error("no member of gzip begins where the one before ends")
        stream = zlib.decompressobj(31)
        held = io.BytesIO()
        while not stream.eof:
            if not data:
                data = self._read_input()
                if not data:
                    raise EOFError("the last member is incomplete")
            content = stream.decompress(data, CHUNK)
            data = stream.unconsumed_tail
            if self.streamed or held.tell() + len(content) > _HELD:
                yield held.getvalue() + content
                self.streamed += held.tell() + len(content)
                held = io.BytesIO()
            else:
                held.write(content)
        self.end = self.position - len(stream.unused_data)
        self.is_found = True
        if held.tell():
            yield held.getvalue()

    def _read_input(self) -> bytes:
        data = self._file.read(_INPUT)
        self.position += len(data)
        return data

    def _skip_zeros(self) -> bytes:
        """Read on to the first byte that is not zero: padding may follow a member, and empty files have none."""
        while data := self._read_input():
            if stripped := data.lstrip(b"\0"):
                return stripped
        return b""


def _next_member(file: BinaryIO, start: int) -> tuple[int | None, bool]:
    """Return where the next member that begins with a record is, from `start` on, and whether others come before it."""
    at = start
    tail = b""
    has_others = False
    file.seek(start)
    while data := file.read(CHUNK):
        window = tail + data
        for match in _MEMBER.finditer(window):
            member_start = at - len(tail) + match.start()
            beginning = _beginning_of(file, member_start)
            if beginning == _FIRST:
                return member_start, has_others
            has_others = has_others or bool(beginning)
        at += len(data)
        tail = window[-3:]  # a byte less than what begins a member
        file.seek(at)
    return None, has_others


def _beginning_of(file: BinaryIO, start: int) -> bytes:
    """Return the first bytes of the content of a member that may begin at a place; none where there is no member."""
    file.seek(start)
    try:
        return zlib.decompressobj(31).decompress(file.read(_PROBE), len(_FIRST))
    except zlib.error:
        return b""
