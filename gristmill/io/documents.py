"""Document and DocKey, and the files of a corpus (reading.py reads them, writing.py writes them).

A corpus is a folder, `ROOT/<source>/**/*.jsonl[.gz|.zst] | .parquet | .arrow`; the source is the
first folder. A document is a record with a string `text` and anything else, which stays as it is.
Its key is `<path relative to ROOT>@<row>`, rows counted from 0 by physical line.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec

from gristmill.errors import UsageError, reading
from gristmill.io.files import walk

JSONL = (".jsonl", ".jsonl.gz", ".jsonl.zst")
TABLES = (".parquet", ".arrow")
SUFFIXES = JSONL + TABLES
ORIGIN = "gristmill_key"  # the field that carries a document's key once it has left its file
_LIKE_A_PAIR = re.compile(r"@\d+ :: ")  # as lines of duplicate_pairs.txt are


class DocKey(NamedTuple):
    """Where a document stands: a file, relative to the corpus, and a row in it.

    >>> DocKey.parse("book/a@b.jsonl@12")
    DocKey(file='book/a@b.jsonl', row=12)
    >>> str(DocKey("book/a.jsonl", 3)), DocKey("book/a.jsonl", 3).source
    ('book/a.jsonl@3', 'book')
    """

    file: str
    row: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """The key that `str` wrote; the last `@` splits it."""
        file, _, row = text.rpartition("@")
        if not file or not row.isdecimal():
            raise UsageError(f"{text!r} is not a document's key: wanted <file>@<row>")
        return cls(file, int(row))

    def __str__(self) -> str:
        return f"{self.file}@{self.row}"

    @property
    def source(self) -> str:
        return source_of(self.file)


def source_of(file: str) -> str:
    """The first folder of a path relative to the corpus; 'corpus' for a file that stands in none."""
    first, slash, _ = file.partition("/")
    return first if slash else "corpus"


def stem(name: str) -> str:
    """A file name without its corpus suffix."""
    return next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), name)


class Document(msgspec.Struct):
    """One document: its text, its key, and its record as it stood (`text` among the fields).

    `fields` hold raw JSON where the file was JSON, so that numbers, spacing and order survive.
    """

    text: str
    key: DocKey
    fields: dict[str, Any]

    def replace_text(self, text: str) -> None:
        if text != self.text:
            self.text = text
            self.fields["text"] = text

    @property
    def origin(self) -> DocKey:
        """The key it had in the normalised corpus, carried along since it was mixed."""
        carried = self.fields.get(ORIGIN)
        if carried is None:
            return self.key
        return DocKey.parse(str(msgspec.json.decode(carried) if isinstance(carried, msgspec.Raw) else carried))

    def to_json(self) -> bytes:
        """The record as one JSON line, newline included."""
        return _ENCODER.encode(self.fields) + b"\n"


_ENCODER = msgspec.json.Encoder(enc_hook=str)  # what JSON cannot say (of Arrow's types) is written as text


@dataclass(frozen=True)
class CorpusFile:
    """A file of a corpus: where it is, and its name relative to the corpus root."""

    path: Path
    name: str
    size: int

    @property
    def source(self) -> str:
        return source_of(self.name)


def list_corpus(root: Path, prefix: str = "") -> list[CorpusFile]:
    """Every corpus file below `root`, sorted by its name: `prefix` and its path relative to `root`.

    Raises UsageError where there is no folder, or no file of a known format in it.
    """
    if not root.is_dir():
        wanted = "a folder, and it is a file" if root.exists() else "a folder, and there is none"
        raise UsageError(f"{root}: wanted {wanted} of that name. Check the path")
    paths = [path for path in walk(root) if path.name.endswith(SUFFIXES) and not _is_cache(path)]
    if not paths:
        raise UsageError(f"{root} holds no corpus file: wanted {', '.join('*' + s for s in SUFFIXES)} in it or below")
    files = [CorpusFile(path, prefix + _relative_name(path, root), _size(path)) for path in paths]
    return sorted(files, key=lambda file: file.name)


def list_source(folder: Path, source: str) -> list[CorpusFile]:
    """The files of one source, named `<source>/…`, or with 'all' those of every source below `folder`.

    `folder` is the source's own (SlimPajama's command lines give that) or the corpus root.
    """
    if source == "all":
        return list_corpus(folder)
    is_root = folder.absolute().name != source and (folder / source).is_dir()
    return list_corpus(folder / source if is_root else folder, f"{source}/")


def _size(path: Path) -> int:
    with reading(path):  # a link may lead nowhere
        return path.stat().st_size


def _relative_name(path: Path, root: Path) -> str:
    name = path.relative_to(root).as_posix()
    if not name.isprintable() or _LIKE_A_PAIR.search(name):
        raise UsageError(f"the file name {name!r} holds what cannot be written in a key or a pair of keys: rename it")
    return name


def _is_cache(path: Path) -> bool:
    """Beside a saved Hugging Face data set lie caches of operations on it, which are not its data."""
    return path.suffix == ".arrow" and path.name.startswith(("cache-", "tmp"))
