"""Names of corpus files: the format and the compression that a suffix stands for, in upper or lower case."""

import re
from typing import NamedTuple

LINE_FORMATS = ("jsonl", "json", "ndjson")
TABLE_FORMATS = ("parquet", "arrow")
TEXT_FORMATS = ("txt", "csv", "tsv")  # read only if asked for: such files may also be notes and metadata
_COMPRESSIONS = {".gz": "gz", ".zst": "zst", ".zstd": "zst", ".bz2": "bz2", ".xz": "xz"}

_SUFFIX = re.compile(r"\.[a-z][a-z0-9]{0,9}")

JSONL_SUFFIXES = tuple(f".{name}{end}" for name in LINE_FORMATS for end in ("", *_COMPRESSIONS))
CORPUS_SUFFIXES = JSONL_SUFFIXES + tuple(f".{name}" for name in TABLE_FORMATS)
READABLE = "*.jsonl, *.ndjson or *.json (one record a line), also .gz, .zst, .bz2 or .xz; *.parquet; *.arrow"


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
    known = LINE_FORMATS + TEXT_FORMATS + (() if compression else TABLE_FORMATS)
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
