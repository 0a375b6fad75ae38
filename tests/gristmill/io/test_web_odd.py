"""Odd records that browsers and crawlers take in their stride: status lines, types, chunks, charsets, XHTML, zstd."""

from pathlib import Path

import pytest
import zstandard

from gristmill.io.readers import read_corpus
from gristmill.io.web.encodings import decode_page, meta_charset
from gristmill.io.web.extraction import text_of_page
from gristmill.io.web.responses import Response, decode_body, parse_headers, parse_response
from tests.gristmill.io.test_web_archives import LONG, page, record, response
from tests.gristmill.io.test_web_bodies import coded, read

BODY = page(LONG, "Größe").encode()
TEXT = f"{LONG}\n\nGröße"
HTML = b"Content-Type: text/html; charset=utf-8\r\n"
RUSSIAN = "Мельник молол зерно в деревне, пока река бежала мимо старого колеса."


def stored(http: bytes, body: bytes = BODY, content: str = "application/http") -> bytes:
    return record("response", "http://a/odd", http + body, content)


STATUS_LINES = [
    "HTTP/2 200", "HTTP/3 200 ", "http/1.1 200 OK", "HTTP/1.1\t200 OK", "\r\nHTTP/1.1 200 OK", "HTTP 200 OK",
    "ICY 200 OK",
    "HTTP/1.1 200 Connection established\r\n\r\nHTTP/1.1 200 OK",
    "HTTP/1.1 200 Connection Established\r\nVia: a proxy\r\n\r\nHTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK",
]  # fmt: skip


@pytest.mark.parametrize("line", STATUS_LINES)
def test_status_lines(line: str, tmp_path: Path) -> None:
    documents, went = read(tmp_path, stored(line.encode() + b"\r\n" + HTML + b"\r\n"))
    assert [document.text for document in documents] == [TEXT] and not went


def test_a_connection_without_a_response_is_a_page_of_its_own() -> None:
    found = parse_response(b"HTTP/1.1 200 Connection established\r\n\r\n")
    assert found == Response(200, {}, b"")


TYPES = {
    "Content-Type:\r\n text/html;\r\n\tcharset=koi8-r": ("text/html", "koi8-r"),
    "Content-Type: text/html; charset=koi8-r\r\nContent-Type: text/html": ("text/html", "koi8-r"),
    "Content-Type: text/html; charset=koi8-r\r\nContent-Type: */*": ("text/html", "koi8-r"),
    "Content-Type: text/html; charset=gbk, text/html; charset=koi8-r": ("text/html", "koi8-r"),
    "Content-Type: text/plain; charset=gbk\r\nContent-Type: text/html": ("text/html", None),
    "Content-Type: text/html, image/png": ("image/png", None),
    "Content-Type : TEXT/HTML ; Charset='koi8-r'": ("text/html", "koi8-r"),
    'Content-Type: text/html; charset="koi8-r': ("text/html", "koi8-r"),
    "Content-Type: text/html; charset=": ("text/html", None),
    "Content-Type: html": ("", None),
    "Content-Type: text/html charset=utf-8": ("", None),
    "Content-Type: unknown/unknown": ("", None),
    "X: y": ("", None),
}


@pytest.mark.parametrize("headers", TYPES)
def test_types_and_charsets(headers: str) -> None:
    found = parse_response(f"HTTP/1.1 200 OK\r\n{headers}\r\n\r\n".encode())
    assert found is not None and (found.content_type, found.charset) == TYPES[headers]


def test_a_header_of_many_lines_is_one_value() -> None:
    found = parse_headers(b"A:\r\n b\r\n\tc\r\nD: e\r\na: f\r\nnothing\r\n" + b" g\r\n" * 3)
    assert found == {"a": ["b c", "f g g g"], "d": ["e"]}


def test_without_a_type_the_content_decides(tmp_path: Path) -> None:
    plain = b"line one\n  line two < three\n"
    http = b"HTTP/1.1 200 OK\r\n\r\n"
    bodies = (BODY, b"\xef\xbb\xbf\n" + BODY, ("\ufeff" + page(LONG, "Größe")).encode("utf-16-le"), plain)
    found, went = read(tmp_path, *(stored(http, body) for body in bodies), stored(http, b"%PDF-1.7 and more"))
    assert [document.text for document in found] == [TEXT, TEXT, TEXT, plain.decode()]
    assert went == {"skipped: binary data declared as text": 1}


def test_records_that_do_not_say_that_they_hold_http(tmp_path: Path) -> None:
    bare = stored(b"HTTP/1.1 200 OK\r\n" + HTML + b"\r\n").replace(b"Content-Type: application/http\r\n", b"")
    message = stored(b"HTTP/1.1 200 OK\r\n" + HTML + b"\r\n", content="message/http")
    folded = bare.replace(b"WARC-Type: response", b"WARC-Type:\r\n response")
    dns = record("response", "dns:a", b"1.2.3.4", "").replace(b"Content-Type: \r\n", b"")
    found, went = read(tmp_path, bare, message, folded, dns)
    assert [document.text for document in found] == [TEXT] * 3 and went == {"skipped: no HTTP response": 1}


CHUNKED = {
    b"5\nab\ncd\n3\nefg\n0\n\n": (b"ab\ncdefg", False),
    b"5\r\nabcde\n3\r\nfgh\n0\r\n\r\n": (b"abcdefgh", False),
    b"00000000000005 \r\nabcde\r\n0\r\nX: y\r\n\r\nmore": (b"abcde", False),
    b"5\r\nabcde\r\n8\r\nabc": (b"abcdeabc", True),
    b"ABBA\nis a line of text\n": (b"ABBA\nis a line of text\n", False),
}


@pytest.mark.parametrize("body", CHUNKED)
def test_chunks(body: bytes) -> None:
    assert decode_body(Response(200, {"transfer-encoding": ["chunked"]}, body), 1000) == CHUNKED[body]


def test_the_first_segment_of_a_record_is_marked_as_cut(tmp_path: Path) -> None:
    whole = response("http://a/odd", BODY)
    (document,), _ = read(tmp_path, whole.replace(b"WARC-Type: ", b"WARC-Segment-Number: 1\r\nWARC-Type: "))
    assert document.value("truncated") == "body"
    assert read(tmp_path, whole)[0][0].value("truncated") is None


@pytest.mark.parametrize("order", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("label", ["utf-16", "utf-16le", "utf-16be"])
def test_zeros_decide_on_the_order_of_bytes_of_utf_16(order: str, label: str) -> None:
    text = page(LONG, RUSSIAN)
    assert decode_page(text.encode(order), label, True) == (text, 0)


@pytest.mark.parametrize("order", ["utf-32-le", "utf-32-be"])
def test_utf_32_is_no_text_to_browsers(order: str, tmp_path: Path) -> None:
    content = ("\ufeff" + page(LONG, RUSSIAN)).encode(order)
    assert read(tmp_path, response("http://a/odd", content)) == ([], {"skipped: binary data declared as text": 1})


def test_a_charset_is_found_at_the_end_of_a_long_head() -> None:
    style = b"<html><head><style>" + b"p {} " * 20_000 + b"</STYLE>"
    assert meta_charset(style + b"<link a=b><meta charset=koi8-r></head>") == "koi8-r"
    assert meta_charset(style + b"<p><meta charset=koi8-r>") is None  # no longer in the head


XHTML = """<?xml version="1.0"?><html xmlns="http://www.w3.org/1999/xhtml"><head><title/><script src="a"/></head>
<body><a id='x'/><p>One<br/>two</p><div class="b" /><textarea/><p>three <![CDATA[<b> & four]]></p></body></html>"""


def test_empty_elements_of_xhtml_end(tmp_path: Path) -> None:
    found, _ = read(tmp_path, response("http://a/odd", XHTML.encode(), "application/xhtml+xml"))
    assert found[0].text == "One\ntwo\n\nthree <b> & four"


@pytest.mark.parametrize("tag", ["<div><a>x</a>", "<DIV>x ", "<figure><pre>x</pre>"])
def test_a_page_that_is_nested_too_deeply_is_taken_whole(tag: str) -> None:
    """To judge each of nested elements by its content takes time with the square of their number."""
    deep = f"<body><nav>Menu</nav>{tag * 20_000}{LONG}"
    text = text_of_page(deep)
    assert text == text_of_page(deep, "all") and text.startswith("Menu\n") and text.endswith(LONG)
    assert "Menu" not in text_of_page(f"<body><nav>Menu</nav>{'<div>' * 500}{LONG}")


def test_zstd_with_a_dictionary_in_the_file(tmp_path: Path) -> None:
    """As archives of Archive Team are, by the specification of .warc.zst."""
    samples = [response(f"http://a/{number}", BODY + b"%d " % number * 20) for number in range(300)]
    dictionary = zstandard.train_dictionary(4096, samples)
    frames = b"".join(zstandard.ZstdCompressor(dict_data=dictionary).compress(sample) for sample in samples[:3])
    for content in (dictionary.as_bytes(), zstandard.compress(dictionary.as_bytes())):
        head = b"\x5d\x2a\x4d\x18" + len(content).to_bytes(4, "little") + content
        plain = zstandard.compress(samples[3])  # a frame that needs no dictionary
        (tmp_path / "a.warc.zst").write_bytes(head + frames + plain)
        assert len(list(read_corpus(tmp_path))) == 4


def test_a_coding_is_not_looked_for_where_none_is_declared(tmp_path: Path) -> None:
    documents, _ = read(tmp_path, coded("Transfer-Encoding: identity", b"5\r\nabcde\r\n", "text/plain"))
    assert documents[0].text == "5\r\nabcde\r\n"
