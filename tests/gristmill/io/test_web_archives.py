"""Web archives: pages become documents with their url, date and status; what is damaged is named."""

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from gristmill.engine.options import RunOptions
from gristmill.errors import DamagedFile
from gristmill.io.documents import Document
from gristmill.io.readers import read_corpus
from gristmill.io.web import records as web_records
from preprocessing.normalize_text import normalize_text

DATE = "2026-11-26T12:00:00Z"
MENU = "<nav><ul><li><a href='/'>Home</a></li><li><a href='/b'>All our products</a></li></ul></nav>"


def record(kind: str, url: str, block: bytes, content: str) -> bytes:
    head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: {url}\r\nWARC-Date: {DATE}\r\n"
    head += f"WARC-Record-ID: <urn:uuid:{url}>\r\nContent-Type: {content}\r\nContent-Length: {len(block)}\r\n\r\n"
    return head.encode() + block + b"\r\n\r\n"


def response(url: str, body: bytes, content: str = "text/html; charset=utf-8", status: int = 200) -> bytes:
    http = f"HTTP/1.1 {status} Any\r\nContent-Type: {content}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    return record("response", url, http + body, "application/http; msgtype=response")


def page(*paragraphs: str) -> str:
    text = "".join(f"<p>{paragraph}</p>" for paragraph in paragraphs)
    return f"<html><head><title>T</title><script>var x</script></head><body>{MENU}<main>{text}</main></body></html>"


LONG = "The mill grinds the grain that the farmers bring, and the water turns its wheel all day long."
ARCHIVE = [
    record("warcinfo", "", b"software: test\r\n", "application/warc-fields"),
    record("request", "http://a/0", b"GET / HTTP/1.1\r\n\r\n", "application/http; msgtype=request"),
    response("http://a/0", page(LONG, "Größe").encode()),
    response("http://a/image", b"\x89PNG" * 99, "image/png"),
    response("http://a/gone", page("not found").encode(), status=404),
    response("http://a/latin", page(LONG, "Größe").encode("latin-1"), "text/html; charset=iso-8859-1"),
    response("http://a/lies", page(LONG, "Größe").encode(), "text/html; charset=iso-8859-1"),
    response("http://a/plain", b"plain  text\nas it is", "text/plain"),
    response("http://a/empty", b"", "text/html"),
]
WET = [
    record("warcinfo", "", b"software: test\r\n", "application/warc-fields"),
    record("conversion", "http://a/0", "ein Text\nin zwei Zeilen ü".encode(), "text/plain"),
    record("conversion", "http://a/1", b"another", "text/plain"),
]


def gzipped(records: list[bytes]) -> bytes:
    return b"".join(map(gzip.compress, records))  # a member a record, as crawlers write them


def read(root: Path) -> list[Document]:
    return list(read_corpus(root))


@pytest.mark.parametrize(
    ("name", "pack"),
    [("a.warc", b"".join), ("a.warc.gz", gzipped), ("a.warc.zst", lambda found: zstandard.compress(b"".join(found)))],
)
def test_pages_are_documents(tmp_path: Path, name: str, pack: Callable[[list[bytes]], bytes]) -> None:
    (tmp_path / name).write_bytes(pack(ARCHIVE))
    found = read(tmp_path)
    urls = ["http://a/0", "http://a/latin", "http://a/lies", "http://a/plain", "http://a/empty"]
    assert [document.value("url") for document in found] == urls
    assert [str(document.key) for document in found] == [f"{name}@{row}" for row in range(5)]
    assert all(document.value("date") == DATE and document.value("status") == 200 for document in found)
    for document in found[:3]:
        assert document.text == f"{LONG}\n\nGröße"  # whatever charset is declared; without the menu
    assert [document.text for document in found[3:]] == ["plain  text\nas it is", ""]


def test_texts_of_a_crawl_are_documents_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "crawl.warc.wet.gz").write_bytes(gzipped(WET))
    assert [(d.text, d.value("url")) for d in read(tmp_path)] == [
        ("ein Text\nin zwei Zeilen ü", "http://a/0"), ("another", "http://a/1"),
    ]  # fmt: skip


def test_an_archive_is_normalised_with_its_fields(tmp_path: Path) -> None:
    (tmp_path / "in/web").mkdir(parents=True)
    (tmp_path / "in/web/a.warc.gz").write_bytes(gzipped(ARCHIVE))
    counts = normalize_text(tmp_path / "in", tmp_path / "out", options=RunOptions(workers=1, quiet=True))
    assert {reason: counts.total(reason).documents for reason in counts.reasons} == {
        "read": 7, "written": 5, "skipped: neither HTML nor text": 1, "skipped: status other than 200": 1,
    }  # fmt: skip
    assert counts.documents_read() == 5
    first = read(tmp_path / "out")[0]
    assert (str(first.key), first.value("url"), first.value("status")) == ("web/a.jsonl.zst@0", "http://a/0", 200)


@pytest.mark.parametrize("cut", [100, 250])
def test_a_record_that_is_cut_off_is_named(tmp_path: Path, cut: int) -> None:
    whole = b"".join(ARCHIVE[2:3] * 3)
    assert len(whole) > 1500
    (tmp_path / "a.warc").write_bytes(whole[: len(whole) - cut])
    with pytest.raises(DamagedFile, match=r"a\.warc: damaged in record 3 \(cut off after .* bytes\)"):
        read(tmp_path)
    (tmp_path / "a.warc").unlink()
    (tmp_path / "b.warc.gz").write_bytes(gzipped(ARCHIVE)[:-cut])
    with pytest.raises(DamagedFile, match=r"b\.warc\.gz: the compressed data is truncated or corrupt"):
        read(tmp_path)


@pytest.mark.parametrize("content", [b"rubbish\n" * 99, b"\r\n\r\n"])
def test_what_is_no_archive_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.warc").write_bytes(content)
    with pytest.raises(DamagedFile, match=r"a\.warc: expected records of a web archive"):
        read(tmp_path)


def test_pages_that_are_too_long_or_without_http_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_records, "MAX_PAGE_BYTES", 2000)
    bare = record("response", "http://a/bare", b"any", "application/http; msgtype=response")
    name = record("response", "dns:a", b"any", "text/dns")
    (tmp_path / "a.warc").write_bytes(b"".join([response("http://a/long", b"x" * 3000), ARCHIVE[2], bare, name]))
    options = RunOptions(workers=1, quiet=True, max_malformed=1.0)
    counts = normalize_text(tmp_path, tmp_path.with_name("out"), options=options)
    reasons = {reason: counts.total(reason).documents for reason in counts.reasons}
    assert reasons == {
        "read": 4, "written": 1, "malformed: page over 2,000 bytes": 1, "malformed: response without HTTP headers": 1,
        "skipped: no HTTP response": 1,
    }  # fmt: skip


def test_a_charset_that_lies_is_replaced_and_counted(tmp_path: Path) -> None:
    lies = response(
        "http://a/bad", page(LONG, "Gr\u00f6\u00dfe").encode("cp1252"), "text/html; charset=ascii-of-a-kind"
    )
    worse = response("http://a/worse", b"<p>" + LONG.encode() + b" \x81\xff\xfe", "text/html; charset=utf-8")
    (tmp_path / "a.warc").write_bytes(ARCHIVE[2] + lies + worse)
    found = read(tmp_path)
    assert [document.value("replaced_characters") for document in found] == [None, None, 3]
    assert found[2].text.count("\ufffd") == 3
