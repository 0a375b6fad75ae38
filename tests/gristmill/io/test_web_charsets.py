"""Charsets of pages are those of browsers: labels, order, what Python's codecs lack, and U+FFFD for broken bytes."""

from pathlib import Path

import pytest
import webencodings
from webencodings.labels import LABELS

from gristmill.io.readers import read_corpus
from gristmill.io.web.charsets import codec_of, decode_text
from gristmill.io.web.encodings import NoText, decode_page, meta_charset
from tests.gristmill.io.test_web_archives import LONG, page, response
from tests.gristmill.io.test_web_bodies import read

OF_BROWSERS = {  # bytes in a labelled encoding, and what the Encoding Standard makes of them
    "iso-8859-1": (b"don\x92t \x80 \x81", "don\u2019t \u20ac \x81"),
    "ascii": (b"caf\xe9", "café"),
    "gb2312": ("朱镕基".encode("gbk") + b" \x80\xa3\xa0", "朱镕基 €\u3000"),
    "gbk": ("\U00020087㐂".encode("gb18030"), "\U00020087㐂"),
    "euc-kr": ("똠방각하".encode("cp949"), "똠방각하"),
    "ks_c_5601-1987": ("펩시".encode("cp949"), "펩시"),
    "shift_jis": ("①髙﨑～".encode("cp932"), "①髙﨑～"),
    "euc-jp": (b"\xad\xa1\xf9\xa1\xa1\xc1\x8e\xb1\x8f\xb0\xa1", "①纊～ｱ丂"),
    "iso-2022-jp": (b"\x1b$B-!J4\x1b(B \x1b(I1\x1b(J\\\x1b(B\\", "①粉 ｱ¥\\"),
    "big5": (b"\xa7\xda\x87\x65\xa1\xc2\xa2\x46", "我囻\u00af\uffe0"),
    "windows-1255": (b"\xca\xe0", "\u05baא"),
    "iso-8859-11": (b"\xa1\x81", "ก\x81"),
    "koi8-u": (b"\xae\xbe\xc1", "ўЎа"),
    "x-mac-cyrillic": (b"\xe0\xff", "а€"),
    "x-user-defined": (b"a\x80\xff", "a\uf780\uf7ff"),
    "unicode": ("мука".encode("utf-16-le"), "мука"),
}


@pytest.mark.parametrize("label", OF_BROWSERS)
def test_bytes_are_decoded_as_browsers_decode_them(label: str) -> None:
    content, expected = OF_BROWSERS[label]
    codec = codec_of(label)
    assert codec is not None
    assert decode_text(content, codec) == (expected, 0)


BROKEN = {
    "utf-8": (b"caf\xc3 \xff\xe2\x82", "caf\ufffd \ufffd\ufffd"),
    "gbk": (b"\x81\xff\xb7\xdb \x81 \x81\x30a", "\ufffd粉 \ufffd \ufffd0a"),
    "big5": (b"\x81\xfe\xa7\xda\xa7<b>", "\ufffd我\ufffd<b>"),
    "euc-kr": (b"\xc8\xff\xb0\xa1\xb0", "\ufffd가\ufffd"),
    "shift_jis": (b"\x81\xff\x95\xb2\xa0\xfd\x81 ", "\ufffd粉\ufffd\ufffd\ufffd "),
    "euc-jp": (b"\x8f\xa1\x80\xca\xb4\x8e\xff\xa9\xa1", "\ufffd粉\ufffd\ufffd"),
    "iso-2022-jp": (b"\x1b$BJ4\x1b(B\xff\x0e\x1b(Z", "粉\ufffd\ufffd\ufffd(Z"),
    "windows-1253": (b"\xaa\xe1", "\ufffdα"),
    "utf-16": (b"a\0\0\xd8b\0c", "a\ufffdb\ufffd"),
}


@pytest.mark.parametrize("label", BROKEN)
def test_a_broken_byte_is_one_character_and_counted(label: str) -> None:
    content, expected = BROKEN[label]
    codec = codec_of(label)
    assert codec is not None
    assert decode_text(content, codec) == (expected, expected.count("\ufffd"))


def test_labels_are_those_of_the_standard() -> None:
    refused = {"hz-gb-2312", "iso-2022-kr", "csiso2022kr"}  # decoded when webencodings was written
    for label, name in LABELS.items():
        codec = codec_of(f"\t{label.upper()} ")
        assert codec == "replacement" if label in refused else codec is not None, label
        assert codec == codec_of(name), label  # whatever the name, it is one encoding
    assert codec_of("utf-7") is codec_of("latin-of-a-kind") is codec_of("") is None


def test_single_bytes_are_those_of_an_independent_table() -> None:
    names = {name for name in LABELS.values() if name.startswith(("windows", "iso-8859", "koi8-r", "ibm", "mac"))}
    assert len(names) > 20
    for name in sorted(names):
        codec = codec_of(name)
        assert codec is not None
        for byte in range(256):
            reference, _ = webencodings.decode(bytes([byte]), name)
            text, _ = decode_text(bytes([byte]), codec)
            is_later = reference == "\ufffd" and text != reference  # of Python's tables, and not of the standard's
            assert text == reference or (is_later and (byte < 0xA0 or (name, byte) == ("windows-1255", 0xCA)))


METAS = {
    b'<meta charset="gb2312">': "gb2312",
    b"<META CHARSET = 'big5' />": "big5",
    b'<meta content="text/html; charset=euc-jp" http-equiv="Content-Type">': "euc-jp",
    b"<!-- <meta charset=big5> --><p title='<meta charset=gbk>'><meta name=a charset=koi8-r>": "koi8-r",
    b'<script>"<meta charset=big5>"</script><title><meta charset=gbk></title><meta charset=euc-kr>': "euc-kr",
    b'<meta name="description" content="charset=big5"><meta charset="no such"><meta charset=gbk>': "gbk",
    b'<?xml version="1.0" encoding="windows-1251"?><html>': "windows-1251",
    b"<!doctype html><title>" + b"x" * 5000 + b"</title><meta charset=gbk>": "gbk",  # browsers look further than 1,024
    b"<p>no <meta, no charset</p>": None,
    b"<!-- <meta charset=big5>": None,
    b"": None,
}


@pytest.mark.parametrize("head", METAS)
def test_a_charset_is_found_in_a_page(head: bytes) -> None:
    assert meta_charset(head) == METAS[head]


JAPANESE = "粉屋は村で穀物を挽いていた。川は古い水車のそばを流れ、子供たちはその近くで遊んでいた。"
RUSSIAN = "Мельник молол зерно в деревне, пока река бежала мимо старого колеса."


def test_the_order_is_that_of_browsers() -> None:
    meta = "<meta charset=koi8-r>"
    text = f"{meta}<p>{RUSSIAN}</p>"
    assert decode_page(text.encode("cp1251"), "windows-1251", True)[0] == text  # HTTP before <meta>
    assert decode_page(text.encode("koi8-r"), None, True)[0] == text
    assert decode_page(text.encode("koi8-r"), "no such", True)[0] == text  # an unknown label is none
    assert decode_page(text.encode("utf-8-sig"), "windows-1251", True)[0] == text  # a mark before all
    for codec in ("utf-16-le", "utf-16-be"):
        assert decode_page(("\ufeff" + text).encode(codec), "windows-1251", True)[0] == text
    assert decode_page(b"<meta charset=utf-16><p>caf\xc3\xa9", None, True)[0].endswith("café")  # ASCII as it was read
    assert decode_page(b"<meta charset=x-user-defined><p>caf\xe9", None, True)[0].endswith("café")
    assert decode_page(text.encode("cp1251"), None, False)[0] == text  # in plain text a <meta> says nothing


@pytest.mark.parametrize("cut", [1, 2])
@pytest.mark.parametrize("declared", ["utf-8", "UTF8", None, "iso-8859-1"])
def test_utf_8_that_is_cut_within_a_character_stays_utf_8(declared: str | None, cut: int) -> None:
    for text in ("Le café où l'été fut très agréable, déjà à Orléans, fut cré€", RUSSIAN + "粉", JAPANESE):
        content = f"<p>{text}".encode()[:-cut]
        found, replaced = decode_page(content, declared, True)
        assert found[:-1] == f"<p>{text}"[: len(found) - 1] and replaced == found.count("\ufffd") == 1
    middle = ("é" * 200).encode()[:-1] + b"\xffx" + ("é" * 200).encode()
    assert decode_page(middle, declared, True)[1] > 0 and "Ã" not in decode_page(middle, declared, True)[0]


@pytest.mark.parametrize("codec", ["cp932", "euc-jp", "iso-2022-jp"])
def test_a_charset_is_detected_in_the_middle_of_a_long_page(codec: str) -> None:
    text = "<p>grain " * 40_000 + JAPANESE + "<p>flour " * 40_000
    assert decode_page(text.encode(codec), None, True) == (text, 0)


def test_the_country_of_a_site_helps_detection() -> None:
    content = "Malý mlýn".encode("cp1250")
    assert decode_page(content, None, True, "mlyn.cz")[0] == "Malý mlýn"


@pytest.mark.parametrize("codec", ["utf-16-le", "utf-16-be"])
def test_utf_16_without_a_mark_is_seen_by_its_zeros(codec: str) -> None:
    text = page(LONG, RUSSIAN, JAPANESE)
    assert decode_page(text.encode(codec), None, True) == (text, 0)


@pytest.mark.parametrize("declared", ["hz-gb-2312", "iso-2022-kr"])
def test_an_encoding_that_browsers_refuse_is_no_text(declared: str, tmp_path: Path) -> None:
    with pytest.raises(NoText, match="encoding that browsers do not read"):
        decode_page(b"<p>~{VPND~}", declared, True)
    documents, went = read(tmp_path, response("http://a", b"<p>~{VPND~}", f"text/html; charset={declared}"))
    assert not documents and went == {"skipped: encoding that browsers do not read": 1}


def test_a_page_in_a_file_says_itself_what_it_is_in(tmp_path: Path) -> None:
    contents = {
        "a.html": page(LONG, RUSSIAN).replace("<head>", "<head><meta charset=koi8-r>").encode("koi8-r"),
        "b.html": page(LONG, JAPANESE).encode("iso-2022-jp"),
        "c.html": page(LONG, RUSSIAN).encode("utf-16-le"),
        "d.html": f"<p>{LONG}</p><p>{RUSSIAN}".encode()[:-2],
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    found = list(read_corpus(tmp_path, read_also=("html",)))
    ends = [RUSSIAN, JAPANESE, RUSSIAN, RUSSIAN[:-2] + "\ufffd"]
    assert [document.text for document in found] == [f"{LONG}\n\n{end}" for end in ends]
    assert [document.value("replaced_characters") for document in found] == [None, None, None, 1]
