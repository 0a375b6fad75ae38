"""Records of web archives: the pages of a .warc, whose text is extracted, and the texts of a .wet.

A document is a response record with an HTML or text body and status 200, or a conversion record, with its url, date,
status and languages as fields; its row counts these. All else in an archive is no document: requests, metadata,
images, redirections. Text is extracted by resiliparse, without the boilerplate of a page. A body that is UTF-8 is taken
as that, whatever it declares; another in the charset that HTTP declares, or that the page or its bytes suggest.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from gristmill.budget import MemoryReservation
from gristmill.errors import DamagedFile, GristmillError, UsageError
from gristmill.io.text_records import BadRecord

MAX_PAGE_BYTES = 64 << 20
REPLACED = "replaced_characters"  # field of a page whose charset lies: characters that became U+FFFD
PAGE_MEMORY_A_BYTE = 24  # of a page, its tree and its text
_TYPES = ("text/html", "application/xhtml+xml", "text/plain")
_FIELDS = {"url": "WARC-Target-URI", "date": "WARC-Date", "languages": "WARC-Identified-Content-Language"}


def read_archive(path: Path, chunks: Iterator[bytes], column: str) -> Iterator[tuple[int, dict[str, Any] | BadRecord]]:
    """Yield (row, fields) of every document of an archive, `chunks` of which are decompressed already.

    Raises DamagedFile for a record that is cut off, UsageError where the libraries are missing.
    """
    try:
        from fastwarc.warc import ArchiveIterator, WarcRecordType
    except ImportError as error:
        raise UsageError(f"{path}: to read web archives: pip install 'gristmill[web]'") from error
    kinds, row, hold = WarcRecordType.response | WarcRecordType.conversion, 0, MemoryReservation()
    stream: Any = _Stream(chunks)
    records = iter(ArchiveIterator(stream, record_types=kinds, parse_http=True))
    while (record := _next(path, records, row)) is not None:
        is_page, length = record.record_type == WarcRecordType.response, record.content_length
        if is_page and record.http_headers is None:
            yield row, BadRecord("response without HTTP headers", _url(record).encode(), length)
        elif is_page and not _is_document(record):
            continue
        elif length > MAX_PAGE_BYTES:
            yield row, BadRecord(f"page over {MAX_PAGE_BYTES:,} bytes", _url(record).encode(), length)
        else:
            hold.require(length * PAGE_MEMORY_A_BYTE, f"{path} record {row + 1}")
            content = record.reader.read()
            if len(content) < length:
                raise _damaged(path, row, f"{_url(record)} is cut off after {len(content):,} of {length:,} bytes")
            text, replaced = _text_of(record, content) if is_page else _decoded(content, None)
            yield row, {column: text, **_fields(record), **({REPLACED: replaced} if replaced else {})}
            hold.release()
        row += 1


def _next(path: Path, records: Iterator[Any], row: int) -> Any:
    """The next record, or None. Raises DamagedFile where there is none that can be read, and no end."""
    try:
        return next(records, None)
    except OSError as error:
        if isinstance(error, GristmillError) or error.errno is not None:
            raise
        raise _damaged(path, row, str(error)) from error


def _damaged(path: Path, row: int, fault: str) -> DamagedFile:
    detail = "It is unknown how much is lost: fetch the file again, or remove it to continue without it."
    return DamagedFile(path, "damaged archive", f"damaged in record {row + 1:,} ({fault}). {detail}")


def _is_document(record: Any) -> bool:
    is_text = (record.http_content_type or "text/html").lower() in _TYPES
    return is_text and record.http_headers.status_code == 200


def _text_of(record: Any, content: bytes) -> tuple[str, int]:
    """The text of a page, and how many characters of the page were replaced."""
    text, replaced = _decoded(content, record.http_charset)
    is_plain = (record.http_content_type or "").lower() == "text/plain"
    return text if is_plain else text_of_page(text), replaced


def text_of_page(page: str) -> str:
    """The text of an HTML page, without its boilerplate. UsageError where the library is missing."""
    try:
        from resiliparse.extract.html2text import extract_plain_text
    except ImportError as error:
        raise UsageError("to read HTML pages: pip install 'gristmill[web]'") from error
    found: str = extract_plain_text(page, main_content=True, alt_texts=False)
    return found


def _decoded(content: bytes, declared: str | None) -> tuple[str, int]:
    """The text, and how many characters of it stand for bytes that the charset does not have."""
    from resiliparse.parse.encoding import bytes_to_str, detect_encoding

    try:
        return content.decode(), 0
    except UnicodeDecodeError:
        pass
    for charset in (declared, detect_encoding(content)):
        with suppress(LookupError):  # a name that is none
            text: str = bytes_to_str(content, charset or "", errors="replace")
            return text, text.count("\ufffd")
    text = content.decode(errors="replace")
    return text, text.count("\ufffd")


def _fields(record: Any) -> dict[str, Any]:
    found: dict[str, Any] = {name: record.headers.get(header) for name, header in _FIELDS.items()}
    if record.http_headers is not None:
        found["status"] = record.http_headers.status_code
    return {name: value for name, value in found.items() if value is not None}


def _url(record: Any) -> str:
    return record.headers.get("WARC-Target-URI") or "no URL"


class _Stream:
    """Chunks of bytes as what FastWARC reads: it asks for bytes, and for its place by seek."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._left, self._place = chunks, memoryview(b""), 0

    def read(self, size: int = 1 << 16) -> bytes:
        if not self._left:
            self._left = memoryview(next(self._chunks, b""))
        found, self._left = bytes(self._left[:size]), self._left[size:]
        self._place += len(found)
        return found

    def seek(self, _offset: int, _whence: int = 0) -> int:
        return self._place

    def tell(self) -> int:
        return self._place
