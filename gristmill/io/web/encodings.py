"""Find the encoding of a page as browsers do: byte order mark, HTTP, <meta>, then detection over all of its bytes.

There is one exception. Bytes that are UTF-8 are taken as UTF-8 even where another encoding is declared, which servers
do by default: a browser shows mojibake there.
"""

import codecs
import re

from gristmill.io.web.charsets import REPLACEMENT, USER_DEFINED, UTF_8, UTF_16, WESTERN, codec_of, decode_text
from gristmill.io.web.responses import is_binary

_MARKS = ((codecs.BOM_UTF8, UTF_8), (codecs.BOM_UTF16_LE, UTF_16[0]), (codecs.BOM_UTF16_BE, UTF_16[1]))
_MAX_HEAD_BYTES = 1 << 20  # that are searched for a <meta>
_ANYWHERE_BYTES = 1 << 16  # within which a <meta> need not be in the head
_HEAD_TAGS = frozenset(
    f"<{end}{name}".encode()
    for name in ("html", "head", "script", "noscript", "style", "link", "meta", "object", "title", "base")
    for end in ("", "/")
)
_SAMPLE_BYTES = 4096  # in which zeros show UTF-16
# shares of zeros among the bytes of even and of odd places of UTF-16
_ZEROS = 0.2
_NO_ZEROS = 0.02
_SURE = 8  # characters in UTF-8 that no text in another encoding has by chance
_LONE_SHARE = 0.01  # of characters of UTF-16 that are half a pair: random bytes have 0.03
_BROKEN_SHARE = 0.05  # of the characters of UTF-8 that may be broken
_TAG = re.compile(rb"<!--|</?[a-zA-Z][^\s/>]*|<[!/?]")
_ATTRIBUTE = re.compile(rb"""[\s/]*([^\s/>=][^\s/>=]*)\s*(?:=\s*(?:"([^"]*)"|'([^']*)'|([^\s>]*)))?""")
_CONTENT_CHARSET = re.compile(rb"""(?i)charset\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s;"']+))""")
_XML_ENCODING = re.compile(rb"""<\?xml\s[^>]*?encoding\s*=\s*["']([^"'>]*)["']""")
_RAW_TEXT = {  # elements with no tags in them, and where they end
    name: re.compile(b"(?i)</" + name) for name in (b"script", b"style", b"title", b"textarea")
}


class NoText(ValueError):
    """Content is no text; the message is the reason, one of a few, to count by."""


def decode_page(content: bytes, declared: str | None, is_html: bool, host: str = "") -> tuple[str, int]:
    """Return the text of a page, and the number of its characters that are U+FFFD in place of broken bytes.

    `declared` is the charset of the HTTP header; the country of `host` is a hint for the detection. Raises NoText for
    binary data, and an encoding that no browser reads.
    """
    codec, start = _find_codec(content, declared, is_html, host)
    if codec == REPLACEMENT:
        raise NoText("encoding that browsers do not read")
    text, replaced = decode_text(content[start:], codec)
    is_utf16 = codec in UTF_16
    sample = text.encode() if is_utf16 else content
    if is_binary(sample) or (is_utf16 and replaced > len(text) * _LONE_SHARE):
        raise NoText("binary data declared as text")
    return text, replaced


def _find_codec(content: bytes, declared: str | None, is_html: bool, host: str) -> tuple[str, int]:
    """Return the codec, and where the text begins: after a byte order mark."""
    for mark, marked in _MARKS:
        if content.startswith(mark):
            return marked, len(mark)
    codec = _declared_codec(content, declared, is_html)
    if not codec:
        return _detect(content, host), 0
    if codec in UTF_16:  # utf-16 is little-endian to browsers, whatever the bytes
        codec = _utf16_by_zeros(content[:_SAMPLE_BYTES]) or codec
    is_utf8 = codec != UTF_8 and _is_utf8_after_all(content, codec)
    return UTF_8 if is_utf8 else codec, 0


def _declared_codec(content: bytes, declared: str | None, is_html: bool) -> str | None:
    codec = codec_of(declared) if declared else None
    if codec or not is_html:
        return codec
    label = meta_charset(content[:_MAX_HEAD_BYTES])
    codec = codec_of(label) if label else None
    if codec in UTF_16:
        return UTF_8  # the <meta> was read as ASCII
    return WESTERN if codec == USER_DEFINED else codec


def _is_utf8_after_all(content: bytes, codec: str) -> bool:
    """Return whether content that is declared in another encoding is UTF-8."""
    if codec == REPLACEMENT:
        return False
    if codec in UTF_16:
        return b"<" in content and b"\0" not in content  # a tag has zeros in UTF-16
    characters, broken = _count_utf8(content)
    if codec == WESTERN and characters and not broken:
        return True
    return characters >= _SURE and broken <= characters * _BROKEN_SHARE


def _count_utf8(content: bytes) -> tuple[int, int]:
    """Return how many characters of UTF-8 beyond ASCII there are, and how many are broken, without a cut last one."""
    if content.isascii():
        return 0, 0
    text, _ = codecs.utf_8_decode(content, "replace", False)
    broken = text.count("\ufffd")
    beyond = len(re.findall(r"[^\0-\x7f]", text))
    return beyond - broken, broken


def _detect(content: bytes, host: str) -> str:
    """Return the codec of content about which nothing is declared."""
    if codec := _utf16_by_zeros(content[:_SAMPLE_BYTES]):
        return codec
    if not (content.isascii() and b"\x1b" in content):  # ISO-2022-JP is ASCII with escapes
        characters, broken = _count_utf8(content)
        if broken <= characters * _BROKEN_SHARE:
            return UTF_8
    return _guess(content, host)


def _utf16_by_zeros(sample: bytes) -> str | None:
    half = len(sample) // 2
    even = sample[::2].count(0)
    odd = sample[1::2].count(0)
    if odd >= _ZEROS * half and even <= _NO_ZEROS * half and odd:
        return UTF_16[0]
    if even >= _ZEROS * half and odd <= _NO_ZEROS * half and even:
        return UTF_16[1]
    return None


def _guess(content: bytes, host: str) -> str:
    """Return the codec that Firefox's detector finds in all of the bytes."""
    from chardetng_py import EncodingDetector

    detector = EncodingDetector()
    detector.feed(content, last=True)
    country = host.rpartition(".")[2]
    tld = country.encode() if country.isascii() and country.isalpha() and country.islower() else None
    return codec_of(detector.guess(tld=tld, allow_utf8=False)) or WESTERN


def meta_charset(head: bytes) -> str | None:
    """Return the charset that a <meta> in the beginning of a page declares, or its XML declaration; None for neither.

    >>> meta_charset(b'<!-- <meta charset=big5> --><meta http-equiv="Content-Type" content="text/html; charset=gbk">')
    'gbk'
    """
    at = 0
    while tag := _TAG.search(head, at):
        at = tag.end()
        opening = tag[0].lower()
        if at > _ANYWHERE_BYTES and opening[1:2] not in (b"!", b"?") and opening not in _HEAD_TAGS:
            break
        if opening == b"<!--":
            end = head.find(b"-->", tag.start() + 2)
            at = end + 3 if end >= 0 else len(head)
        elif opening[1:2] in (b"!", b"/", b"?"):
            end = head.find(b">", at)
            at = end + 1 if end >= 0 else len(head)
        else:
            attributes, at = _attributes(head, at)
            if opening == b"<meta" and (label := _charset_of(attributes)):
                return label
            if opening[1:] in _RAW_TEXT:
                closing = _RAW_TEXT[opening[1:]].search(head, at)
                at = closing.start() if closing else len(head)
    declaration = _XML_ENCODING.match(head.lstrip())
    return declaration[1].decode("latin-1") if declaration else None


def _attributes(head: bytes, at: int) -> tuple[dict[bytes, bytes], int]:
    """Return the attributes of the tag whose name ends at `at`, and where they end."""
    attributes = dict[bytes, bytes]()
    while match := _ATTRIBUTE.match(head, at):
        value = next(filter(None, match.groups()[1:]), b"")
        attributes.setdefault(match[1].lower(), value)
        at = match.end()
    return attributes, at


def _charset_of(attributes: dict[bytes, bytes]) -> str | None:
    if b"charset" in attributes:
        label = attributes[b"charset"].decode("latin-1")
        return _known_label(label)
    if attributes.get(b"http-equiv", b"").strip().lower() != b"content-type":
        return None
    match = _CONTENT_CHARSET.search(attributes.get(b"content", b""))
    if not match:
        return None
    label = next(filter(None, match.groups()), b"").decode("latin-1")
    return _known_label(label)


def _known_label(label: str) -> str | None:
    if not codec_of(label):
        return None
    return label
