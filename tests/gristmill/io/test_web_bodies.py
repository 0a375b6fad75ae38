"""Bodies of HTTP responses: chunks and compression are undone, also where several are, or where none really is."""

import gzip
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random

import brotli
import pytest
import zstandard

from gristmill.counts import Counts
from gristmill.io.documents import Document, Slice
from gristmill.io.readers import read_documents
from gristmill.io.web import records as web_records
from gristmill.io.writers import Rejects
from tests.gristmill.io.test_web_archives import LONG, page, record, response

BODY = page(LONG, "Größe").encode()
TEXT = f"{LONG}\n\nGröße"


def raw_deflate(body: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-15)
    return stream.compress(body) + stream.flush()


def chunked(body: bytes, size: int = 97, end: bytes = b"0\r\n\r\n") -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x;name=value\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + end


def coded(headers: str, body: bytes, content: str = "text/html; charset=utf-8") -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {content}\r\n{headers}\r\n\r\n".encode()
    return record("response", "http://a/coded", head + body, "application/http; msgtype=response")


def read(folder: Path, *archive: bytes) -> tuple[list[Document], dict[str, int]]:
    """The documents of an archive, and how many records went where."""
    path = folder / "a.warc"
    path.write_bytes(b"".join(archive))
    counts = Counts({}, [])
    documents = list(read_documents(Slice(path, "web/a.warc"), counts, Rejects(folder / "out")))
    went = {reason: counts.total(reason).documents for reason in counts.reasons}
    assert went.pop("read") == len(documents) + sum(went.values())
    return documents, went


ENCODED = {
    "Transfer-Encoding: chunked": chunked(BODY),
    "transfer-encoding: Chunked": chunked(BODY, 5000),
    "Content-Encoding: gzip": gzip.compress(BODY),
    "Content-Encoding: x-gzip": gzip.compress(BODY[:40]) + gzip.compress(BODY[40:]) + b"rubbish that is ignored",
    "Content-Encoding: deflate": zlib.compress(BODY),
    "Content-Encoding:  deflate ": raw_deflate(BODY),
    "Content-Encoding: br": brotli.compress(BODY),
    "Content-Encoding: zstd": zstandard.compress(BODY),
    "Content-Encoding: gzip, br": brotli.compress(gzip.compress(BODY)),
    "Content-Encoding: deflate\r\nContent-Encoding: gzip": gzip.compress(zlib.compress(BODY)),
    "Content-Encoding: gzip\r\nTransfer-Encoding: chunked": chunked(gzip.compress(BODY)),
    "Transfer-Encoding: gzip, chunked": chunked(gzip.compress(BODY)),
    "Content-Encoding: identity\r\nContent-Length: 3": BODY,
    "Content-Encoding: UTF-8": BODY,  # no coding, and servers send it
}


@pytest.mark.parametrize("headers", ENCODED)
def test_a_coded_body_is_text(tmp_path: Path, headers: str) -> None:
    documents, went = read(tmp_path, coded(headers, ENCODED[headers]))
    assert [document.text for document in documents] == [TEXT] and went == {}
    assert documents[0].value("truncated") is None


@pytest.mark.parametrize("headers", ENCODED)
def test_a_body_that_was_decoded_before_it_was_stored_is_read_as_it_is(tmp_path: Path, headers: str) -> None:
    documents, went = read(tmp_path, coded(headers, BODY))
    assert [document.text for document in documents] == [TEXT] and went == {}


DAMAGED = {
    "a cut gzip": ("Content-Encoding: gzip", gzip.compress(BODY)[:-40], "body is cut off"),
    "a cut deflate": ("Content-Encoding: deflate", zlib.compress(BODY)[:-20], "body is cut off"),
    "a cut br": ("Content-Encoding: br", brotli.compress(BODY)[:-10], "body is cut off"),
    "a cut zstd": ("Content-Encoding: zstd", zstandard.compress(BODY)[:-10], "body is cut off"),
    "a broken gzip": (
        "Content-Encoding: gzip", gzip.compress(BODY)[:30] + b"\xff" * 9 + gzip.compress(BODY)[39:],
        "body cannot be decompressed",
    ),
    "chunks of wrong lengths": (
        "Transfer-Encoding: chunked", chunked(BODY).replace(b"61;", b"5c;", 2), "chunks of the body are damaged",
    ),
    "chunks that end in something else": (
        "Transfer-Encoding: chunked", chunked(BODY[:97], end=b"zz\r\n") + BODY[97:], "chunks of the body are damaged",
    ),
    "a coding that nobody knows": ("Content-Encoding: sdch", zlib.compress(BODY), "binary data declared as text"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_body_that_cannot_be_decoded_is_counted_by_reason(tmp_path: Path, name: str) -> None:
    headers, body, reason = DAMAGED[name]
    documents, went = read(tmp_path, coded(headers, body), response("http://a/next", BODY))
    assert [document.text for document in documents] == [TEXT]
    assert went == {f"skipped: {reason}": 1}


def test_chunks_that_are_cut_off_are_kept_as_a_browser_shows_them(tmp_path: Path) -> None:
    documents, went = read(tmp_path, coded("Transfer-Encoding: chunked", chunked(BODY, end=b"")[:-5]))
    assert LONG in documents[0].text and went == {}
    assert documents[0].value("truncated") == "body"


BOMBS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress, "deflate": zlib.compress, "br": brotli.compress, "zstd": zstandard.compress,
    "gzip, gzip": lambda body: gzip.compress(gzip.compress(body)),
}  # fmt: skip


@pytest.mark.parametrize("coding", BOMBS)
def test_what_a_body_may_become_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, coding: str) -> None:
    monkeypatch.setattr(web_records, "MAX_PAGE_BYTES", 10_000)
    at_limit = b"<p>" + b"m" * 9_997
    pack = BOMBS[coding]
    archive = [coded(f"Content-Encoding: {coding}", pack(body)) for body in (at_limit, at_limit + b"m", b"m" * 10**7)]
    documents, went = read(tmp_path, *archive)
    assert [len(document.text) for document in documents] == [9_997]
    assert went == {"malformed: page over 10,000 bytes": 2}
    rejected = (tmp_path / "out.malformed").read_text()
    assert rejected.count("http://a/coded") == 2


BINARY = [b"%PDF-1.4\n1 0 obj <text> endobj " * 9, b"\x89PNG\r\n\x1a\n" + b"\0\1\2" * 99, bytes(range(256)) * 9]


@pytest.mark.parametrize("body", BINARY)
@pytest.mark.parametrize("content", ["text/html", "text/plain; charset=utf-8", "application/xhtml+xml"])
def test_binary_data_under_the_type_of_a_text_is_counted(tmp_path: Path, body: bytes, content: str) -> None:
    documents, went = read(tmp_path, response("http://a/b", body, content), response("http://a/next", BODY))
    assert len(documents) == 1 and went == {"skipped: binary data declared as text": 1}


def test_random_bytes_are_binary_whatever_they_are_declared_as(tmp_path: Path) -> None:
    labels = ["utf-8", "utf-16le", "utf-16be", "gbk", "big5", "shift_jis", "euc-kr", "windows-1252", "koi8-r", "none"]
    contents = [Random(number).randbytes(3000) for number in range(5)]
    archive = [response(label, content, f"text/html; charset={label}") for label in labels for content in contents]
    documents, went = read(tmp_path, *archive)
    assert not documents and went == {"skipped: binary data declared as text": 50}


def test_a_page_with_a_few_control_characters_is_a_page(tmp_path: Path) -> None:
    stray = BODY.replace(b"mill", b"m\x0bi\x00ll", 1)
    documents, went = read(tmp_path, response("http://a/stray", stray))
    assert "grinds the grain" in documents[0].text and went == {}


def test_headers_are_read_as_browsers_read_them(tmp_path: Path) -> None:
    head = (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/2 200\nCONTENT-TYPE:\n text/html;\n\tCharset='windows-1251'\nX-No-Colon\n\n"
    )
    block = head + page("мельница").encode("cp1251")
    documents, _ = read(tmp_path, record("response", "http://a", block, "application/http"))
    assert documents[0].text == "мельница"
