"""HTTP responses as crawlers store them: status, headers, and the body without its transfer and content codings.

Many archives hold bodies that are decoded already under headers that say otherwise: such a body is taken as it is.
"""

import re
import zlib
from collections.abc import Callable
from typing import NamedTuple

import zstandard

_STATUS = re.compile(rb"(?i)[\r\n]{0,4}(?:HTTP|ICY)(?:/\d+(?:\.\d+)?)?[ \t]+(\d{3})(?!\d)([^\n]*)\n")
_TUNNEL = b"connection established"  # a proxy says so before the response of the server
_BLANK_LINE = re.compile(rb"\n\r?\n")
_MEDIA_TYPE = re.compile(r"[\w!#$%&'*+.^`|~-]+/[\w!#$%&'*+.^`|~-]+")
_UNKNOWN_TYPES = ("*/*", "unknown/unknown", "application/unknown")  # browsers look at the content
_CHARSET = re.compile(r"""(?i);\s*charset\s*=\s*["']?([^"';]*)""")
_CHUNK_SIZE = re.compile(rb"[ \t]*0*([0-9a-fA-F]{1,8})[ \t]*(?:;[^\r\n]*)?\r?\n")
_CHUNK_END = re.compile(rb"\r?\n|\r?\Z")
_ZSTD = b"\x28\xb5\x2f\xfd"
_GZIP = b"\x1f\x8b"
_ZSTD_WINDOW = 8 << 20  # RFC 9659
_PIECE = 512  # of a zstd body, as a byte may stand for 100,000
CONTROLS = bytes(byte for byte in range(32) if byte not in b"\t\n\f\r\x1b")
_BINARY_SHARE = 0.02  # of control characters; compressed data has 0.1, text none
_MAGIC = (
    b"%PDF-", b"\x89PNG\r\n", b"GIF87a", b"GIF89a", b"\xff\xd8\xff", b"PK\x03\x04", b"\x7fELF", _GZIP, _ZSTD, b"BZh9",
    b"\xfd7zXZ\0", b"7z\xbc\xaf\x27\x1c", b"Rar!\x1a\x07", b"OggS", b"ID3", b"RIFF", b"wOFF", b"wOF2",
    b"\xd0\xcf\x11\xe0",
)  # fmt: skip


class Undecodable(ValueError):
    """A body cannot be decoded; the message is the reason, one of a few, to count by."""


class TooLong(ValueError):
    """A decoded body is longer than the limit."""


class Response(NamedTuple):
    """The status of an HTTP response, its headers by names in lower case, and its body as it was sent."""

    status: int
    headers: dict[str, list[str]]
    body: bytes

    @property
    def content_type(self) -> str:
        """Return the type without parameters, in lower case; '' without one."""
        return self._media_type()[0]

    @property
    def charset(self) -> str | None:
        """Return the charset that the headers declare."""
        return self._media_type()[1]

    def _media_type(self) -> tuple[str, str | None]:
        """Return type and charset: of several types the last, with the charset of the ones before that are equal."""
        kind = ""
        charset: str | None = None
        for value in ",".join(self.headers.get("content-type", [])).split(","):
            name = value.partition(";")[0].strip().lower()
            if not _MEDIA_TYPE.fullmatch(name) or name in _UNKNOWN_TYPES:
                continue
            if name != kind:
                charset = None
            declared = _CHARSET.search(value)
            if declared and declared[1].strip():
                charset = declared[1].strip()
            kind = name
        return kind, charset

    def codings(self, name: str) -> list[str]:
        """Return the codings of a header, in lower case and in the order in which they were applied."""
        codings = list[str]()
        for value in self.headers.get(name, []):
            codings += [coding.strip().lower() for coding in value.split(",")]
        return codings


def parse_response(content: bytes) -> Response | None:
    """Return the HTTP response that a record holds; None if it holds none.

    Interim responses (100 Continue) and that of a proxy before the server's are passed over.
    """
    at = 0
    while status := _STATUS.match(content, at):
        blank = _BLANK_LINE.search(content, status.end() - 1)
        end = len(content)
        at = len(content)
        if blank:
            end = blank.start()
            at = blank.end()
        headers = parse_headers(content[status.end() : end])
        is_interim = 100 <= int(status[1]) < 200 or _TUNNEL in status[2].lower()
        if not is_interim or at == len(content):
            return Response(int(status[1]), headers, content[at:])
    return None


def parse_headers(block: bytes) -> dict[str, list[str]]:
    """Return the values of header lines by their names in lower case; a line that begins with a space continues one."""
    headers = dict[str, list[list[str]]]()  # each value as its lines, which may be many
    lines: list[str] = []
    for line in block.decode("utf-8", "replace").splitlines():
        name, colon, value = line.partition(":")
        if line[:1] in (" ", "\t") and lines:
            lines.append(line.strip())
        elif colon and name.strip():
            lines = [value.strip()]
            headers.setdefault(name.strip().lower(), []).append(lines)
    joined = dict[str, list[str]]()
    for header, values in headers.items():
        joined[header] = [" ".join(value).strip() for value in values]
    return joined


def decode_body(response: Response, limit: int) -> tuple[bytes, bool]:
    """Return the body without its codings, and whether its chunks are cut off.

    Raises Undecodable where it is cut off or damaged in a compressed form, TooLong where it is over `limit` bytes.
    """
    body = response.body
    is_cut = False
    transfers = response.codings("transfer-encoding")
    for coding in [*reversed(transfers), *reversed(response.codings("content-encoding"))]:
        if coding == "chunked":
            body, is_cut = _join_chunks(body)
        elif coding in _DECODERS and body:
            body = _DECODERS[coding](body, limit)
    if len(body) > limit:
        raise TooLong
    return body, is_cut


def is_binary(content: bytes) -> bool:
    """Return whether content is no text: an image, a PDF, compressed data. UTF-16 is no text here: decode it first."""
    if content.startswith(_MAGIC):
        return True
    text_bytes = len(content.translate(None, CONTROLS))
    return len(content) - text_bytes > len(content) * _BINARY_SHARE


def _join_chunks(body: bytes) -> tuple[bytes, bool]:
    """Return the content of a chunked body, and whether it is cut off; a body that is not chunked stays as it is.

    Raises Undecodable where it begins as a chunked one and does not go on as one.
    """
    parts = list[bytes]()
    at = 0
    while size := _CHUNK_SIZE.match(body, at):
        length = int(size[1], 16)
        if length == 0:
            return b"".join(parts), False
        end = size.end() + length
        if not parts and end > len(body) and not size[0].endswith(b"\r\n"):  # a line of text, such as ABBA
            return body, False
        parts.append(body[size.end() : end])
        line_end = _CHUNK_END.match(body, end)
        if not line_end:
            raise Undecodable("chunks of the body are damaged")
        at = line_end.end()
    if parts and at < len(body):
        raise Undecodable("chunks of the body are damaged")
    if not parts:
        return body, False
    return b"".join(parts), True


def _gunzip(body: bytes, limit: int) -> bytes:
    if not body.startswith(_GZIP):
        return body
    return _inflate(body, 31, limit)


def _inflate(body: bytes, window_bits: int, limit: int) -> bytes:
    """Decompress all members; what follows them is ignored, as browsers do."""
    parts = list[bytes]()
    room = limit + 1
    while True:
        stream = zlib.decompressobj(window_bits)
        try:
            parts.append(stream.decompress(body, room))
        except zlib.error:
            raise Undecodable("body cannot be decompressed") from None
        room -= len(parts[-1])
        if room <= 0:
            raise TooLong
        if not stream.eof:
            raise Undecodable("body is cut off")
        body = stream.unused_data
        if not (window_bits == 31 and body.startswith(_GZIP)):
            return b"".join(parts)


def _deflate(body: bytes, limit: int) -> bytes:
    """Decompress deflate with the header of zlib or, as many servers send it, without one."""
    window_bits = -15
    if body[0] & 15 == 8 and int.from_bytes(body[:2], "big") % 31 == 0:  # it has a header
        window_bits = 15
    try:
        return _inflate(body, window_bits, limit)
    except Undecodable:
        if is_binary(body):
            raise
        return body


def _unbrotli(body: bytes, limit: int) -> bytes:
    import brotli

    stream = brotli.Decompressor()
    parts = list[bytes]()
    room = limit + 1
    data = body
    try:
        while room > 0 and not stream.is_finished():
            part = stream.process(data, output_buffer_limit=room)
            data = b""
            parts.append(part)
            room -= len(part)
            if not part and stream.can_accept_more_data():
                break
    except brotli.error:
        if is_binary(body):
            raise Undecodable("body cannot be decompressed") from None
        return body
    if room <= 0:
        raise TooLong
    if not stream.is_finished():
        if is_binary(body):
            raise Undecodable("body is cut off")
        return body
    return b"".join(parts)


def _unzstd(body: bytes, limit: int) -> bytes:
    if not body.startswith(_ZSTD):
        return body
    stream = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj()
    parts = list[bytes]()
    size = 0
    try:
        for start in range(0, len(body), _PIECE):
            parts.append(stream.decompress(body[start : start + _PIECE]))
            size += len(parts[-1])
            if size > limit:
                raise TooLong
            if stream.eof:
                return b"".join(parts)
    except zstandard.ZstdError:
        raise Undecodable("body cannot be decompressed") from None
    raise Undecodable("body is cut off")


_DECODERS: dict[str, Callable[[bytes, int], bytes]] = {
    "gzip": _gunzip,
    "x-gzip": _gunzip,
    "deflate": _deflate,
    "br": _unbrotli,
    "zstd": _unzstd,
}
