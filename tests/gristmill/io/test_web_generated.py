"""200 records of generated archives, encodings by codings by damage: each is what a browser shows, or has a reason.

warcio writes the archives and undoes the codings, webencodings decodes, and Python's html.parser takes the tags off:
none of them has code in common with what is tested.
"""

import gzip
import io
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from typing import NamedTuple

import brotli
import pytest
import webencodings
import zstandard
from warcio.archiveiterator import ArchiveIterator
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from gristmill.counts import Counts
from gristmill.io.documents import Slice
from gristmill.io.readers import read_documents
from gristmill.io.writers import Rejects
from tests.gristmill.io.test_web_bodies import chunked, raw_deflate

RECORDS = 200
FRENCH = "Le meunier a moulu le blé près du vieux café où l'été fut très agréable, déjà à Orléans."
RUSSIAN = "Мельник молол зерно в деревне, пока река бежала мимо старого колеса, и дети играли рядом."
GREEK = "Ο μυλωνάς άλεθε το σιτάρι στο χωριό, και το ποτάμι κυλούσε δίπλα στον παλιό τροχό."
POLISH = "Młynarz mełł zboże we wsi, a rzeka płynęła obok starego koła, gdzie bawiły się dzieci."
CHINESE = "磨坊主在村里磨谷物，河水流过旧水车，孩子们在附近玩耍。"
TAIWANESE = "磨坊主在村裡磨穀物，河水流過舊水車，孩子們在附近玩耍。"
JAPANESE = "粉屋は村で穀物を挽いていた。川は古い水車のそばを流れ、子供たちはその近くで遊んでいた。"
KOREAN = "방앗간 주인이 마을에서 곡식을 빻고 있었고 강물은 낡은 물레방아 옆을 흘렀다."
TEXTS = [  # of a page, the labels it may be declared with, and Python's codec for its bytes
    *[(text, ["utf-8", "UTF8"], "utf-8") for text in (FRENCH, RUSSIAN, CHINESE, JAPANESE, KOREAN)],
    (FRENCH, ["iso-8859-1", "latin1", "us-ascii", "windows-1252"], "cp1252"),
    (FRENCH, ["iso-8859-15"], "iso8859-15"),
    (RUSSIAN, ["windows-1251", "cp1251"], "cp1251"),
    (RUSSIAN, ["koi8-r", "KOI"], "koi8-r"),
    (RUSSIAN, ["iso-8859-5"], "iso8859-5"),
    (GREEK, ["iso-8859-7", "greek"], "iso8859-7"),
    (POLISH, ["iso-8859-2", "latin2"], "iso8859-2"),
    (POLISH, ["windows-1250"], "cp1250"),
    (CHINESE, ["gb2312", "gbk", "GB18030", "x-gbk"], "gbk"),
    (TAIWANESE, ["big5", "cn-big5"], "big5"),
    (JAPANESE, ["shift_jis", "x-sjis", "Windows-31J"], "shift_jis"),
    (JAPANESE, ["euc-jp", "x-euc-jp"], "euc_jp"),
    (JAPANESE, ["iso-2022-jp"], "iso2022_jp"),
    (KOREAN, ["euc-kr", "ks_c_5601-1987", "windows-949"], "cp949"),
    (RUSSIAN, ["utf-16le", "utf-16"], "utf-16-le"),
    (JAPANESE, ["utf-16be"], "utf-16-be"),
]
ENCODERS = {
    "gzip": gzip.compress, "deflate": zlib.compress, "raw deflate": raw_deflate, "br": brotli.compress,
    "zstd": zstandard.compress,
}  # fmt: skip
CODINGS = ["", "chunked", *ENCODERS, "gzip chunked", "br chunked", "plain as gzip", "plain as chunked"]
DAMAGE = ["none"] * 8 + ["cut page", "broken byte", "cut body", "damaged header", "binary", "status", "type"]


class Sample(NamedTuple):
    """A record: its address, its HTTP status, headers and body, and what is to become of it."""

    url: str
    status: str
    headers: list[tuple[str, str]]
    body: bytes
    damage: str
    reason: str | None
    text: str | None


class Tags(HTMLParser):
    """The text of a page without its head."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = list[str]()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.parts.append("\n" if tag == "p" else "")

    def handle_data(self, data: str) -> None:
        self.parts.append(data)


def shown(page: str) -> str:
    """The text that a browser shows of a page."""
    parser = Tags()
    body = page.partition("</head>")[2]
    parser.feed(re.sub(r"</?[a-z][^>]*$", "", body))  # browsers drop a tag that is cut off
    parser.close()
    return re.sub(r"\s+", " ", "".join(parser.parts)).strip()


def sample(number: int, chance: Random) -> Sample:
    text, labels, codec = chance.choice(TEXTS)
    label = chance.choice(labels)
    damage = chance.choice(DAMAGE)
    declared_in = chance.choice(["http", "meta", "both"])
    if codec.startswith("utf-16"):
        declared_in = chance.choice(["http", "mark"])
    meta = "" if declared_in in ("http", "mark") else f"<meta charset='{label}'>"
    page = f"<!doctype html><html><head>{meta}<title>t</title></head><body>"
    page += "".join(f"<p>{text} <b>{i}</b> &amp; {number}</p>" for i in range(chance.randrange(1, 30)))
    content = page.encode(codec)
    if damage == "cut page":
        content = content[: len(content) - chance.randrange(1, 9)]
    elif damage == "broken byte" and not codec.startswith(("utf-16", "iso")):
        at = content.rindex(b" &amp;")
        content = content[:at] + b"\xff" + content[at:]
    expected, _ = webencodings.decode(content, "utf-8" if codec == "utf-8" else label)
    text_shown = shown(expected)
    if declared_in == "mark":
        content = "\ufeff".encode(codec) + content
    if damage == "binary":
        content = chance.choice([b"%PDF-1.7\n", b"\x89PNG\r\n\x1a\n", b""]) + chance.randbytes(3000)
    kind = "image/webp" if damage == "type" else "text/html"
    charset = f"; charset={label}" if declared_in in ("http", "both") else ""
    headers = [("Content-Type", kind + charset)]
    coding = chance.choice(CODINGS)
    body = code(coding, content, headers)
    reason = {
        "damaged header": "malformed: damaged record", "binary": "skipped: binary data declared as text",
        "status": "skipped: status other than 200", "type": "skipped: neither HTML nor text",
    }.get(damage)  # fmt: skip
    if damage == "cut body" and (coding in (*ENCODERS, "gzip chunked", "br chunked")):
        body = body[: len(body) * 2 // 3]
        reason = "skipped: body is cut off"
    status = chance.choice(["404 Not Found", "301 Moved"]) if damage == "status" else "200 OK"
    return Sample(f"http://site/{number}", status, headers, body, damage, reason, None if reason else text_shown)


def code(coding: str, content: bytes, headers: list[tuple[str, str]]) -> bytes:
    """The body as it is sent; its headers are appended."""
    first, _, rest = coding.partition(" ")
    if coding in ("plain as gzip", "plain as chunked"):
        headers.append(("Content-Encoding", "gzip") if coding.endswith("gzip") else ("Transfer-Encoding", "chunked"))
        return content
    if coding in ENCODERS or rest == "chunked":
        name = "deflate" if coding == "raw deflate" else first
        headers.append(("Content-Encoding", name))
        content = ENCODERS[coding if coding in ENCODERS else first](content)
    if "chunked" in coding:
        headers.append(("Transfer-Encoding", "chunked"))
        content = chunked(content, 700)
    return content


def written(samples: list[Sample], is_packed: bool) -> bytes:
    """The archive of the samples, written by warcio, with their headers damaged where that is the damage."""
    pieces = list[bytes]()
    for one in samples:
        stored = io.BytesIO()
        http = StatusAndHeaders(one.status, one.headers, protocol="HTTP/1.1")
        writer = WARCWriter(stored, gzip=False)
        payload = io.BytesIO(one.body)
        writer.write_record(writer.create_warc_record(one.url, "response", payload=payload, http_headers=http))
        content = stored.getvalue()
        if one.damage == "damaged header":
            content = content.replace(b"\r\nContent-Length: ", b"\r\nContent-Length: ?", 1)
        pieces.append(gzip.compress(content) if is_packed else content)
    return b"".join(pieces)


def of_warcio(archive: bytes) -> Iterator[tuple[str, str]]:
    """The address and the text of the pages of an archive without damage, as warcio and webencodings find them."""
    for record in ArchiveIterator(io.BytesIO(archive)):
        content = record.content_stream().read()
        label = re.search(r"charset='?([\w-]+)", str(record.http_headers) + content[:200].decode("latin-1"))
        page, _ = webencodings.decode(content, label[1] if label else "utf-16le")
        yield record.rec_headers.get_header("WARC-Target-URI"), shown(page)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # warcio leaves temporary files open
@pytest.mark.parametrize("name", ["a.warc", "a.warc.gz"])
def test_every_record_is_what_a_browser_shows_or_has_a_reason(tmp_path: Path, name: str) -> None:
    chance = Random(name)
    samples = [sample(number, chance) for number in range(RECORDS)]
    (tmp_path / name).write_bytes(written(samples, name.endswith(".gz")))
    counts = Counts({}, [])
    documents = read_documents(Slice(tmp_path / name, f"web/{name}"), counts, Rejects(tmp_path / "out"))
    texts = {document.value("url"): re.sub(r"\s+", " ", document.text).strip() for document in documents}
    assert texts == {one.url: one.text for one in samples if one.text is not None}
    reasons = Counter(one.reason for one in samples if one.reason)
    assert len(reasons) == 5 and len(texts) > 100  # all shapes are there
    assert {reason: counts.total(reason).documents for reason in counts.reasons if reason != "read"} == reasons
    assert counts.total("read").documents == RECORDS == len(texts) + reasons.total()
    unknown = {("Content-Encoding", "zstd"), ("Content-Encoding", "br")}  # to this warcio with this brotli
    whole = [one for one in samples if one.damage == "none" and not unknown & {*one.headers}]
    assert len(whole) > 50
    for url, text in of_warcio(written(whole, is_packed=True)):
        assert texts[url] == text
