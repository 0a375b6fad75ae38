"""What a file is by its first bytes, whatever its name says: a compression, a table, a pointer, a page of a server."""

import re
from contextlib import suppress
from pathlib import Path

from gristmill.errors import DamagedFile
from gristmill.io.corpus_names import TEXT_FORMATS, compression_of, parse_name

FIRST = 64  # bytes that are looked at
_COMPRESSED = {
    "gz": re.compile(rb"\x1f\x8b"),
    "zst": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),  # the second begins a frame to skip
    "bz2": re.compile(rb"BZh[1-9]1AY&SY"),
    "xz": re.compile(rb"\xfd7zXZ\0"),
}
_JSON = re.compile(rb"(?:\xef\xbb\xbf)?\s*[{\[]")  # as no compressed stream and no table begins
_PAGE = "HTML page"
_STAND_INS = {  # what a file is: how it begins, and what to do
    "pointer of Git LFS": (rb"version https://git-lfs", "and not the file itself: fetch it with git lfs pull"),
    _PAGE: (rb"(?i)\s*(?:<!doctype html|<html)", "as a server sends for a file that it does not give: fetch it again"),
    "Parquet file": (rb"PAR1", "whatever its name says: name it .parquet"),
    "Arrow file": (rb"ARROW1\0\0", "whatever its name says: name it .arrow"),
}


def compression_in(name: str, first: bytes) -> str:
    """The compression of a file by its first bytes, or else by its name; '' for none.

    >>> compression_in("a.jsonl", bytes.fromhex("1f8b08")), compression_in("a.jsonl.gz", b'{"text": 1}')
    ('gz', '')
    >>> compression_in("a.jsonl.gz", b"rubbish"), compression_in("a.jsonl", b"rubbish")
    ('gz', '')
    """
    for compression, magic in _COMPRESSED.items():
        if magic.match(first):
            return compression
    return "" if _JSON.match(first) else compression_of(name)


def is_compressed(path: Path) -> bool:
    """Whether a local file is compressed, by its first bytes or its name."""
    with path.open("rb") as file:
        return bool(compression_in(path.name, file.read(FIRST)))


def reject_stand_in(path: Path, first: bytes) -> None:
    """Raise DamagedFile where a file of text is, by its first bytes, something in its place."""
    parts = parse_name(path.name)
    is_text = parts is not None and parts.format in TEXT_FORMATS
    for fault, (pattern, what) in _STAND_INS.items():
        if re.match(pattern, first) and not (is_text and fault == _PAGE):
            raise _named(path, fault, what)


def reject_stand_in_for_table(path: Path) -> None:
    """As reject_stand_in, of a .parquet or .arrow file that cannot be read as one."""
    first = b""
    with suppress(OSError), path.open("rb") as file:
        first = file.read(FIRST)
    for fault, (pattern, what) in _STAND_INS.items():
        if re.match(pattern, first) and not what.endswith(path.suffix):
            raise _named(path, fault, what)
    if _JSON.match(first):
        raise _named(path, "JSON", "and no table: name it .jsonl")


def _named(path: Path, fault: str, what: str) -> DamagedFile:
    article = "an" if fault[0] in "AH" else "a"
    kind = fault if fault == "JSON" else f"{article} {fault}"
    return DamagedFile(path, fault, f"this is {kind}, {what}, or remove it to continue without it.")
