"""Documents of web archives: the pages of a .warc, whose text is extracted, and the texts of a .wet.

A document is a response with status 200 and a body of HTML or text, or a conversion record, with its url, date, status
and languages as fields; its row counts these. Responses that are none, copies (revisit) and resources are counted by
the reason why they are skipped; warcinfo, request, metadata and continuation records are not counted.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from gristmill.budget import MemoryReservation
from gristmill.errors import GristmillError
from gristmill.io.documents import Extract
from gristmill.io.text_records import BadRecord
from gristmill.io.web.archive import KNOWN_TYPES, DamagedRecord, Record, read_records
from gristmill.io.web.encodings import NoText, decode_page
from gristmill.io.web.extraction import MEMORY_A_BYTE, html_of_xhtml, page_memory, text_of_page
from gristmill.io.web.responses import TooLong, Undecodable, decode_body, parse_response

MAX_PAGE_BYTES = 64 << 20
REPLACED = "replaced_characters"  # field of a page: characters that became U+FFFD, as their bytes were broken
TRUNCATED = "truncated"  # field of a page that the crawler, or the server, cut off: why
_XHTML = "application/xhtml+xml"
_HTML = ("text/html", _XHTML)
_HTTP = ("application/http", "message/http", "")
_BEGINS_WITH_TAG = re.compile(rb"(?:\xef\xbb\xbf|\xff\xfe|\xfe\xff)?[\s\0]*<\0?[a-zA-Z!?]")
_PLAIN = "text/plain"
_FIELDS = {
    "url": "warc-target-uri",
    "date": "warc-date",
    "languages": "warc-identified-content-language",
    TRUNCATED: "warc-truncated",
}
_UNCOUNTED = ("warcinfo", "request", "metadata", "continuation")
_UNREAD = {"revisit": "a revisit record, which repeats a page", "resource": "a resource record"}
_OTHER_TYPE = "neither HTML nor text"


class Skipped(NamedTuple):
    """A record of an archive that is no document, and why: one of a few reasons, to count by; and its address."""

    reason: str
    url: str = ""


class _Page(NamedTuple):
    """A page: its text, how many of its characters were broken, its status, and whether its body was cut off."""

    text: str
    replaced: int = 0
    status: int | None = None
    is_cut: bool = False


def read_archive(
    path: Path, chunks: Iterator[bytes], column: str, extract: Extract = "main"
) -> Iterator[tuple[int, dict[str, Any] | BadRecord | Skipped]]:
    """Yield (row, fields) of every document of an archive, `chunks` of which are decompressed already.

    Raises DamagedFile as read_records does, UsageError where the libraries are missing.
    """
    row = 0
    hold = MemoryReservation()
    for record in read_records(path, chunks, MAX_PAGE_BYTES, hold):
        if isinstance(record, DamagedRecord):
            yield row, BadRecord("damaged record", record.beginning, record.size)
            row += 1
            continue
        if record.type in _UNCOUNTED:
            continue
        fields_or_skipped = _read(record, column, extract, hold, f"{path} record {row + 1}")
        yield row, fields_or_skipped
        row += not isinstance(fields_or_skipped, Skipped)
        del record, fields_or_skipped


def _read(
    record: Record, column: str, extract: Extract, hold: MemoryReservation, where: str
) -> dict[str, Any] | BadRecord | Skipped:
    """Return the document of a record."""
    if record.type not in KNOWN_TYPES or record.type in _UNREAD:
        return Skipped(_UNREAD.get(record.type, "a record of unknown type"), _url(record))
    try:
        page = _page_of(record, extract, hold, where)
    except (NoText, Undecodable) as error:
        return Skipped(str(error), _url(record))
    except TooLong:
        return BadRecord(f"page over {MAX_PAGE_BYTES:,} bytes", _url(record).encode(), record.length)
    except (GristmillError, MemoryError):
        raise
    except Exception as error:  # of a library: one page is not to stop all others
        return BadRecord(f"page that fails with {type(error).__name__}", _url(record).encode(), record.length)
    if page is None:
        return BadRecord("response without HTTP headers", _url(record).encode(), record.length)
    fields: dict[str, Any] = {column: page.text}
    for name, header in _FIELDS.items():
        value = record.get(header)
        if value:
            fields[name] = value
    if "url" in fields:
        fields["url"] = _url(record)
    if page.status is not None:
        fields["status"] = page.status
    if page.is_cut:
        fields.setdefault(TRUNCATED, "body")
    if page.replaced:
        fields[REPLACED] = page.replaced
    return fields


def _page_of(record: Record, extract: Extract, hold: MemoryReservation, where: str) -> _Page | None:
    """Return the page of a record; None for a response without HTTP headers. Raises NoText and TooLong."""
    content_type = record.get("content-type").partition(";")[0].strip().lower()
    if record.type == "conversion":
        if content_type not in ("", _PLAIN):
            raise NoText(_OTHER_TYPE)
        _require_whole(record, hold, where)
        return _Page(*decode_page(record.content, "utf-8", is_html=False))
    if content_type not in _HTTP:  # such as text/dns
        raise NoText("no HTTP response")
    response = parse_response(record.content)
    if response is None and not content_type:
        raise NoText("no HTTP response")
    if response is None:
        return None
    if response.status != 200:
        raise NoText("status other than 200")
    if response.content_type not in ("", *_HTML, _PLAIN):
        raise NoText(_OTHER_TYPE)
    _require_whole(record, hold, where)
    content, is_cut = decode_body(response, MAX_PAGE_BYTES)
    hold.require(page_memory(content), where)
    is_html = response.content_type in _HTML
    if not response.content_type:  # then browsers look at the content
        is_html = _BEGINS_WITH_TAG.match(content) is not None
    text, replaced = decode_page(content, response.charset, is_html, _host(record))
    if is_html:
        if response.content_type == _XHTML:
            text = html_of_xhtml(text)
        text = text_of_page(text, extract)
    return _Page(text, replaced, response.status, is_cut or bool(record.get("warc-segment-number")))


def _require_whole(record: Record, hold: MemoryReservation, where: str) -> None:
    """Reserve the memory for a page. Raises TooLong for one over the limit, UsageError for too little memory."""
    if record.length > MAX_PAGE_BYTES:
        raise TooLong
    hold.require(record.length * MEMORY_A_BYTE, where)


def _url(record: Record) -> str:
    """Return the address of a record; some writers put it in angle brackets."""
    return record.get(_FIELDS["url"]).removeprefix("<").removesuffix(">") or "no URL"


def _host(record: Record) -> str:
    try:
        return urlsplit(_url(record)).hostname or ""
    except ValueError:
        return ""
