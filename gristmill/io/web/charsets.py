"""Decode bytes as browsers do, by the WHATWG Encoding Standard: its labels, its encodings, U+FFFD for what is broken.

Python's codecs are close to the encodings of the standard. What differs is here: bytes 80 to 9F that the Windows code
pages leave open, some characters of Big5, GB18030, KOI8-U and EUC-JP, and how far a broken pair of bytes reaches.
198 rare pairs of Big5, most of them of the Hong Kong supplement of 2008, are missing and become U+FFFD.
"""

import codecs
import re
from collections.abc import Callable
from functools import cache, partial

UTF_8 = "utf-8"
UTF_16 = ("utf-16-le", "utf-16-be")
WESTERN = "cp1252"
REPLACEMENT = "replacement"  # encodings that no browser decodes, as they can hide scripts
USER_DEFINED = "x-user-defined"
_BROKEN = "\ufffd"
_SPACES = "\t\n\f\r "
_OTHER_LABELS = {  # that resiliparse does not know
    **dict.fromkeys(
        ("replacement", "hz-gb-2312", "iso-2022-kr", "csiso2022kr", "iso-2022-cn", "iso-2022-cn-ext"), REPLACEMENT
    ),
    **dict.fromkeys(("x-mac-cyrillic", "x-mac-ukrainian"), "mac_cyrillic"),
    "x-user-defined": USER_DEFINED,
}
_WIDER = {  # the codec of Python that is nearest to an encoding of the standard
    "iso8859-11": "cp874",
    "gbk": "gb18030",
    "shift_jis": "cp932",
    "euc_kr": "cp949",
    "big5": "big5hkscs",
}
_CHANGED: dict[str, dict[int, int | str]] = {  # characters of Python's codec, and the standard's in their place
    "koi8-u": {0x255D: 0x45E, 0x256C: 0x40E},
    "cp932": {0xF8F0: _BROKEN, 0xF8F1: _BROKEN, 0xF8F2: _BROKEN, 0xF8F3: _BROKEN},
    "euc_jp": {0x301C: 0xFF5E, 0x2016: 0x2225, 0x2212: 0xFF0D, 0xA2: 0xFFE0, 0xA3: 0xFFE1, 0xAC: 0xFFE2},
    "big5hkscs": {
        0x2022: 0x2027, 0xFF64: 0xFE51, 0x203E: 0xAF, 0x223C: 0xFF5E, 0x2641: 0x2295, 0x2609: 0x2299, 0xA5: 0xFFE5,
        0xA2: 0xFFE0, 0xA3: 0xFFE1,
    },
    "gb18030": {
        0xE5E5: 0x3000, 0xE78D: 0xFE10, 0xE78E: 0xFE12, 0xE78F: 0xFE11, 0xE790: 0xFE13, 0xE791: 0xFE14, 0xE792: 0xFE15,
        0xE793: 0xFE16, 0xE794: 0xFE17, 0xE795: 0xFE18, 0xE796: 0xFE19, 0xE7C7: 0x1E3F, 0xE81E: 0x9FB4, 0xE826: 0x9FB5,
        0xE82B: 0x9FB6, 0xE82C: 0x9FB7, 0xE832: 0x9FB8, 0xE843: 0x9FB9, 0xE854: 0x9FBA, 0xE864: 0x9FBB,
    },
}  # fmt: skip
_SINGLE_BYTES = {("gb18030", 0x80): "\u20ac", ("cp1255", 0xCA): "\u05ba"}
_ESCAPE = re.compile(rb"(\x1b(?:\([BJI]|\$[@B]))")
_SHIFTS = {0x0E: _BROKEN, 0x0F: _BROKEN, 0x1B: _BROKEN}  # no text of ISO-2022-JP
_ROMAN = _SHIFTS | {0x5C: "\xa5", 0x7E: "\u203e"}
_TO_EUC = bytes([*range(0x21), *range(0xA1, 0xFF), 0x7F, *[0xFF] * 0x80])  # of each byte from 0 to 0xFF
_KATAKANA = dict.fromkeys(range(256), _BROKEN) | {byte: 0xFF61 - 0x21 + byte for byte in range(0x21, 0x60)}


@cache
def codec_of(label: str) -> str | None:
    """Return the codec to decode with for a label of the WHATWG table; None for a label that is not in it.

    >>> [codec_of(label) for label in (" ISO-8859-1", "gb2312", "shift_jis", "utf8", "hz-gb-2312", "utf-7")]
    ['cp1252', 'gb18030', 'cp932', 'utf-8', 'replacement', None]
    """
    from resiliparse.parse.encoding import map_encoding_to_html5

    name = label.strip(_SPACES).lower()
    if name in _OTHER_LABELS:
        return _OTHER_LABELS[name]
    known = map_encoding_to_html5(name, fallback_utf8=False)
    if not known:
        return None
    return _WIDER.get(known, known)


def decode_text(content: bytes, codec: str) -> tuple[str, int]:
    """Return the text of bytes, and how many characters of it are U+FFFD in place of bytes that were broken.

    >>> decode_text(b"don\\x92t", "cp1252"), decode_text(b"caf\\xc3", "utf-8")
    (('don\u2019t', 0), ('caf\ufffd', 1))
    """
    if codec == REPLACEMENT:
        return _BROKEN, 1
    if codec == USER_DEFINED:
        return content.decode("latin-1").translate({byte: 0xF700 + byte for byte in range(128, 256)}), 0
    if codec == "iso2022_jp":
        text = _decode_iso_2022_jp(content)
        return text, text.count(_BROKEN)
    try:
        text = content.decode(codec)
        is_whole = True
    except UnicodeDecodeError:
        text = content.decode(codec, _handler(codec))
        is_whole = False
    if codec in _CHANGED:
        text = text.translate(_CHANGED[codec])
    is_counted = not is_whole or codec == "cp932"
    return text, text.count(_BROKEN) if is_counted else 0


@cache
def _handler(codec: str) -> str:
    """Return the name of the handler of errors of a codec."""
    if codec == UTF_8 or codec in UTF_16:
        return "replace"
    name = f"gristmill.{codec}"
    codecs.register_error(name, partial(_replace, codec))
    return name


def _replace(codec: str, error: UnicodeError) -> tuple[str, int]:
    """Return the text for the bytes at which a codec failed, and where to continue, as the standard has it."""
    assert isinstance(error, UnicodeDecodeError)
    content = error.object
    start = error.start
    byte = content[start]
    known = _SINGLE_BYTES.get((codec, byte))
    if known:
        return known, start + 1
    if codec in _PAIRS:
        return _PAIRS[codec](content, start)
    if codec.startswith("cp") and byte < 0xA0:  # a control character, as in Latin-1
        return chr(byte), start + 1
    return _BROKEN, start + 1


def _after_pair(content: bytes, start: int) -> tuple[str, int]:
    """Return the broken character and where to go on: after both bytes of a pair unless the second is ASCII."""
    is_lead = 0x81 <= content[start] <= 0xFE
    takes_second = is_lead and start + 1 < len(content) and content[start + 1] >= 0x80
    return _BROKEN, start + 1 + takes_second


def _after_gb18030(content: bytes, start: int) -> tuple[str, int]:
    character = content[start : start + 4]
    if not 0x81 <= character[0] <= 0xFE or not 0x30 <= (character[1:2] or b"\0")[0] <= 0x39:
        return _after_pair(content, start)
    is_cut = len(character) < 4 and all(0x81 <= byte <= 0xFE for byte in character[2:])
    is_whole = len(character) == 4 and 0x81 <= character[2] <= 0xFE and 0x30 <= character[3] <= 0x39
    return _BROKEN, start + len(character) if is_cut or is_whole else start + 1


def _after_euc_jp(content: bytes, start: int) -> tuple[str, int]:
    """Also the characters of NEC and IBM, which Python's EUC-JP lacks, by its codec for Shift_JIS."""
    lead = content[start]
    if lead == 0x8F:
        following = content[start + 1 : start + 3]
        if not following or following[0] < 0x80:
            return _BROKEN, start + 1
        takes_third = following[0] >= 0xA1 and len(following) > 1 and following[1] >= 0x80
        return _BROKEN, start + 2 + takes_third
    if lead != 0x8E and not 0xA1 <= lead <= 0xFE:
        return _BROKEN, start + 1
    pair = content[start : start + 2]
    if lead != 0x8E and len(pair) == 2 and 0xA1 <= pair[1] <= 0xFE:
        return _jis_character(pair[0] - 0xA1, pair[1] - 0xA1), start + 2
    return _after_pair(content, start)


def _jis_character(row: int, cell: int) -> str:
    first = row // 2 + (0x81 if row < 62 else 0xC1)
    if row % 2:
        second = cell + 0x9F
    elif cell < 0x3F:
        second = cell + 0x40
    else:
        second = cell + 0x41
    return bytes((first, second)).decode("cp932", "replace")[0]


def _decode_iso_2022_jp(content: bytes) -> str:
    """Decode ISO-2022-JP, whose escape sequences choose among four sets of characters."""
    mode = b"\x1b(B"
    parts = list[str]()
    for number, piece in enumerate(_ESCAPE.split(content)):
        if number % 2:
            mode = piece
        elif mode in (b"\x1b$B", b"\x1b$@"):
            parts.append(decode_text(piece.translate(_TO_EUC), "euc_jp")[0])
        elif mode == b"\x1b(I":
            parts.append(piece.decode("latin-1").translate(_KATAKANA))
        else:
            parts.append(piece.decode("ascii", "replace").translate(_ROMAN if mode == b"\x1b(J" else _SHIFTS))
    return "".join(parts)


_PAIRS: dict[str, Callable[[bytes, int], tuple[str, int]]] = {
    "gb18030": _after_gb18030,
    "euc_jp": _after_euc_jp,
    **dict.fromkeys(("cp932", "cp949", "big5hkscs"), _after_pair),
}
