"""Formats of corpus files, by name and by first bytes; names that can be parts of keys."""

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from gristmill.errors import DamagedFile, UsageError

LINE_FORMATS = ("jsonl", "json", "ndjson")
TABLE_FORMATS = ("parquet", "arrow")
WEB_FORMATS = ("warc", "wet")
FILE_FORMATS = ("txt", "md", "html")  # a file is a document
TEXT_FORMATS = (*FILE_FORMATS, "csv", "tsv")  # read only if asked for: such files may also be notes and metadata
_COMPRESSIONS = {".gz": "gz", ".zst": "zst", ".zstd": "zst", ".bz2": "bz2", ".xz": "xz"}
_SUFFIX = re.compile(r"\.[a-z][a-z0-9]{0,9}")
JSONL_SUFFIXES = tuple(f".{name}{end}" for name in LINE_FORMATS for end in ("", *_COMPRESSIONS))
_WEB_SUFFIXES = tuple(f".{name}{end}" for name in WEB_FORMATS for end in ("", *_COMPRESSIONS))
CORPUS_SUFFIXES = JSONL_SUFFIXES + tuple(f".{name}" for name in TABLE_FORMATS) + _WEB_SUFFIXES
READABLE = (
    "*.jsonl, *.ndjson or *.json (one record a line), *.warc or *.wet, also .gz, .zst, .bz2 or .xz; *.parquet; *.arrow"
)
INDEX_PREFIX = "index:"  # of the file names of an index, a corpus deduplicated before; no corpus file has it
_MAX_FILE_BYTES = 200  # of a file's own name: outputs add suffixes
_NAMED = 8  # folders that an error lists
_PAIR_SEPARATOR = re.compile(r"@\d+ :: ")  # between the two keys of a line in duplicate_pairs.txt
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


class CorpusName(NamedTuple):
    """A file name in its parts: `stem`, the `format` (such as jsonl) and the `compression` (gz, zst, bz2, xz or '')."""

    stem: str
    format: str
    compression: str


def parse_name(name: str) -> CorpusName | None:
    """The parts of a file name; None if its suffix is not that of a known format.

    >>> parse_name("book/a.JSONL.zstd")
    CorpusName(stem='book/a', format='jsonl', compression='zst')
    >>> parse_name("a.b.parquet").stem, parse_name("a.parquet.gz"), parse_name("a.gz")
    ('a.b', None, None)
    """
    compression = compression_of(name)
    rest = name.rpartition(".")[0] if compression else name
    stem, dot, suffix = rest.rpartition(".")
    known = LINE_FORMATS + TEXT_FORMATS + WEB_FORMATS + (() if compression else TABLE_FORMATS)
    return CorpusName(stem, suffix.lower(), compression) if dot and suffix.lower() in known else None


def compression_of(name: str) -> str:
    """The compression that the last suffix of a name stands for; '' if none."""
    return _COMPRESSIONS.get("." + name.rpartition(".")[2].lower(), "")


def unknown_suffix(name: str) -> str:
    """The suffix of a file of unknown format in lower case, with the one before it if it is a compression.

    >>> [unknown_suffix(name) for name in ("a.MD", "a.tar.gz", "data.gz", "LICENSE", "part.0001")]
    ['.md', '.tar.gz', '.gz', 'no suffix', 'no suffix']
    """
    stem, dot, last = name.rpartition("/")[2].lower().rpartition(".")
    before = "." + stem.rpartition(".")[2] if "." in stem and compression_of(name) else ""
    suffix = "".join(part for part in (before, dot + last) if _SUFFIX.fullmatch(part))
    return suffix if stem and suffix else "no suffix"


def table_name(name: str) -> str:
    """Name of the Parquet file that is written for a corpus file.

    >>> table_name("b/a.jsonl.zst")
    'b/a.parquet'
    """
    parts = parse_name(name)
    assert parts is not None, name
    return f"{parts.stem}.parquet"


def normal_name(name: str, zst: bool = False) -> str:
    """Name of the file of JSON lines that is written for a corpus file: `.jsonl`, `.jsonl.gz` or `.jsonl.zst`.

    Uncompressed lines and .gz stay so, unless `zst`; all other formats and compressions become .jsonl.zst.

    >>> [normal_name(name) for name in ("b/a.JSON", "a.ndjson.gz", "a.jsonl.bz2", "a.parquet", "a.csv")]
    ['b/a.jsonl', 'a.jsonl.gz', 'a.jsonl.zst', 'a.jsonl.zst', 'a.jsonl.zst']
    """
    parts = parse_name(name)
    assert parts is not None, name
    if not zst and parts.format in LINE_FORMATS and parts.compression in ("", "gz"):
        return f"{parts.stem}.jsonl.gz" if parts.compression else f"{parts.stem}.jsonl"
    return f"{parts.stem}.jsonl.zst"


def name_fault(name: str) -> str:
    """Why the name of a corpus file, relative to its root, cannot be part of a key, which is text in a line; else ''.

    >>> name_fault("book/a.jsonl"), name_fault("index:a/b.jsonl")
    ('', "it begins with 'index:', as documents of an index do")
    """
    if not name.isprintable():
        return "it has characters that cannot be printed"
    if _PAIR_SEPARATOR.search(name):
        return "it holds '@<number> :: ', which divides pairs of keys"
    if name.startswith(INDEX_PREFIX):
        return f"it begins with {INDEX_PREFIX!r}, as documents of an index do"
    if len(name.rpartition("/")[2].encode()) > _MAX_FILE_BYTES:
        return f"it is longer than {_MAX_FILE_BYTES} bytes, and outputs add some"
    return ""


def reject_odd_names(faults: Sequence[tuple[str, str]]) -> None:
    """Raise UsageError if there are names that cannot be parts of keys: (name, fault) of each."""
    if faults:
        shown = [f"{name!r} ({fault})" for name, fault in faults[:_NAMED]]
        more = f" and {len(faults) - _NAMED:,} more" if len(faults) > _NAMED else ""
        raise UsageError(
            f"{len(faults):,} file name{'s' * (len(faults) > 1)} cannot be part of a key: {', '.join(shown)}{more}. "
            "Rename them, or leave these files out by --skip_odd_names"
        )


def reject_unknown_source(root: Path, source: str, names: Iterable[str]) -> None:
    """Raise UsageError if a folder of another name than `source` holds all files in folders, as a corpus root does.

    With a file of its own it is taken as the source's; `names` are those of its files, `<source>/…`.
    """
    if source in ("all", root.absolute().name):
        return
    paths = [name.split("/") for name in names]
    if all(len(path) > 2 for path in paths):
        folders = sorted({path[1] for path in paths})
        more = f" and {len(folders) - _NAMED:,} more" if len(folders) > _NAMED else ""
        raise UsageError(
            f"data set {source!r}: {root} has another name, and no folder of this one: it holds "
            f"{', '.join(folders[:_NAMED])}{more}. Give the name of one of these, or all"
        )


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
