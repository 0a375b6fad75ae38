"""Document, DocKey and CorpusFile: the records of a corpus, their keys, and the files they are in.

A corpus is a folder, `ROOT/<source>/**/*.jsonl[.gz|.zst] | .parquet | .arrow`; the source is the
first folder. A document is a record with a string `text`; its other fields are kept unchanged. Its
key is `<path relative to ROOT>@<row>`; rows are physical lines, counted from 0, blank ones included.
readers.py reads documents and writers.py writes them.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec

from gristmill.errors import UsageError, wrap_read_errors
from gristmill.io.files import walk
from gristmill.io.formats.json_fields import decode_value
from gristmill.io.unfinished import reject_unfinished

JSONL_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
TABLE_SUFFIXES = (".parquet", ".arrow")
CORPUS_SUFFIXES = JSONL_SUFFIXES + TABLE_SUFFIXES
KEY_FIELD = "gristmill_key"  # field in which shuffle_holdout stores the original key
_PAIR_SEPARATOR = re.compile(r"@\d+ :: ")  # between the two keys of a line in duplicate_pairs.txt


class DocKey(NamedTuple):
    """Key of a document: its file, relative to the corpus root, and its row in that file, from 0.

    >>> DocKey.parse("book/a@b.jsonl@12")
    DocKey(file='book/a@b.jsonl', row=12)
    >>> str(DocKey("book/a.jsonl", 3)), DocKey("book/a.jsonl", 3).source
    ('book/a.jsonl@3', 'book')
    """

    file: str
    row: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `<file>@<row>`, split at the last `@`. Raises UsageError for any other form."""
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
    """The first folder of a path relative to the corpus root; 'corpus' for a file directly in the root."""
    first, slash, _ = file.partition("/")
    return first if slash else "corpus"


def stem(name: str) -> str:
    """The file name without its corpus suffix (one of CORPUS_SUFFIXES)."""
    return next((name.removesuffix(suffix) for suffix in CORPUS_SUFFIXES if name.endswith(suffix)), name)


class Document(msgspec.Struct):
    """One document: its text, its key, and the fields of its record, `text` included.

    Fields read from JSON are kept as raw JSON, so that numbers, spacing and order are written back unchanged.
    """

    text: str
    key: DocKey
    fields: dict[str, Any]

    def replace_text(self, text: str) -> None:
        """Set the text; a field with the same text keeps its raw JSON."""
        if text != self.text:
            self.text = text
            self.fields["text"] = text

    def value(self, field: str) -> Any:
        """A field's value, decoded where it is raw JSON; None if the record has no such field."""
        stored = self.fields.get(field)
        return decode_value(stored) if isinstance(stored, msgspec.Raw) else stored

    @property
    def original_key(self) -> DocKey:
        """Key in the normalised corpus: the one stored in KEY_FIELD by shuffle_holdout, else `key`.

        Raises UsageError if KEY_FIELD does not hold a key.
        """
        stored = self.value(KEY_FIELD)
        return self.key if stored is None else DocKey.parse(str(stored))

    def to_json(self) -> bytes:
        """The record as one line of JSON in UTF-8, ending in a newline."""
        return _ENCODER.encode(self.fields) + b"\n"


_ENCODER = msgspec.json.Encoder(enc_hook=str)  # Arrow values without a JSON type are written as strings


@dataclass(frozen=True)
class CorpusFile:
    """A corpus file: its path, its name relative to the corpus root, and its size in bytes."""

    path: Path
    name: str
    size: int

    @property
    def source(self) -> str:
        return source_of(self.name)


def list_corpus(root: Path, prefix: str = "") -> list[CorpusFile]:
    """List the corpus files below `root`, sorted by name: `prefix` + path relative to `root`.

    Raises UsageError if `root` is not a folder or holds no file of a known format, InputError
    if a file cannot be read, or a stage has not finished writing the folder.
    """
    if not root.is_dir():
        wanted = "a folder, and it is a file" if root.exists() else "a folder, and there is none"
        raise UsageError(f"{root}: wanted {wanted} of that name. Check the path")
    reject_unfinished(root)
    paths = [path for path in walk(root) if path.name.endswith(CORPUS_SUFFIXES) and not _is_cache(path)]
    if not paths:
        raise UsageError(
            f"{root} holds no corpus file: wanted {', '.join('*' + s for s in CORPUS_SUFFIXES)} in it or below"
        )
    files = [CorpusFile(path, prefix + _relative_name(path, root), _size(path)) for path in paths]
    return sorted(files, key=lambda file: file.name)


def list_source(folder: Path, source: str) -> list[CorpusFile]:
    """List the files of one source, named `<source>/…`, or those of every source if `source` is 'all'.

    `folder` is the source's own folder, as on SlimPajama's command lines, or the corpus root. Raises UsageError for
    a folder named `all` of the source 'all', which may be meant as either.
    """
    if source == "all" == folder.absolute().name:
        raise UsageError(
            f"{folder} with `all`: that may be the data set `all` or every data set in a folder of that name. Rename "
            "the folder, or give the folder above it: all its data sets, `all` among them, are then read"
        )
    return list_corpus(source_folder(folder, source), "" if source == "all" else f"{source}/")


def source_folder(folder: Path, source: str) -> Path:
    """The folder that list_source lists: `folder`, or the source's own in it if `folder` is the corpus root."""
    is_root = source != "all" and folder.absolute().name != source and (folder / source).is_dir()
    return folder / source if is_root else folder


def _size(path: Path) -> int:
    with wrap_read_errors(path):  # the path may be a dangling link
        return path.stat().st_size


def _relative_name(path: Path, root: Path) -> str:
    name = path.relative_to(root).as_posix()
    if not name.isprintable() or _PAIR_SEPARATOR.search(name):
        raise UsageError(
            f"the file name {name!r} cannot be part of a key: wanted printable characters without '@<number> :: '; "
            "rename it"
        )
    return name


def _is_cache(path: Path) -> bool:
    """Whether a file is a cache that Hugging Face datasets saved next to the data; it repeats the data."""
    return path.suffix == ".arrow" and path.name.startswith(("cache-", "tmp"))
