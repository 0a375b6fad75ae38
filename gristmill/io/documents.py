"""Document, DocKey, CorpusFile and Slice: records of a corpus, their keys, the files they are in, and parts of these.

A corpus is a folder, `ROOT/<source>/**/*.jsonl | .json | .ndjson [.gz|.zst|.bz2|.xz] | .parquet | .arrow`, and
.txt, .csv and .tsv if asked for; the source is the first folder. A document is a record with a string `text`, or
another column that holds the text; its other fields are kept unchanged. Its key is `<path relative to ROOT>@<row>`;
rows of JSON lines are physical lines, counted from 0, blank ones included. readers.py reads documents and
writers.py writes them.
"""

import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec

from gristmill.counts import Counts
from gristmill.errors import InputError, UsageError, require
from gristmill.io.file_formats import CORPUS_SUFFIXES as CORPUS_SUFFIXES
from gristmill.io.file_formats import INDEX_PREFIX as INDEX_PREFIX
from gristmill.io.file_formats import (
    READABLE,
    TEXT_FORMATS,
    name_fault,
    parse_name,
    reject_odd_names,
    reject_unknown_source,
    unknown_suffix,
)
from gristmill.io.files import list_finished
from gristmill.io.text_records import decode_value
from gristmill.storage.files import is_folder, reject_unknown_scheme

KEY_FIELD = "gristmill_key"  # field in which shuffle_holdout stores the original key
PART_FIELD = "gristmill_part"  # field in which apply stores of which document one is a part: <key>#<number>
METADATA = "metadata of Hugging Face datasets"  # reasons why a file is not read, along with those of storage/files.py
CACHE = "cache of Hugging Face datasets"
ODD_NAME = "name that is no key"
ASKED_FOR = {name: f".{name} (see --read_also)" for name in TEXT_FORMATS}
_METADATA_FILES = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
_MAX_ROW_DIGITS = 18  # of a row that 64 bits hold


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
        """Parse `<file>@<row>`, split at the last `@`. Raises UsageError for any other form, or name of no file."""
        file, _, row = text.rpartition("@")
        is_file = file.isprintable() and not file.startswith("/") and file
        if not is_file or not row.isascii() or not row.isdecimal() or len(row) > _MAX_ROW_DIGITS:
            raise UsageError(f"{text[:200]!r} is not a document's key: expected <file>@<row>")
        return cls(file, int(row))

    def __str__(self) -> str:
        return f"{self.file}@{self.row}"

    @property
    def source(self) -> str:
        return source_of(self.file)


def source_of(file: str) -> str:
    """The first folder of a path relative to the corpus root; 'corpus' for a file directly in the root."""
    return file.partition("/")[0] if "/" in file else "corpus"


def stem(name: str) -> str:
    """The file name without its corpus suffix, such as .jsonl.zst; the name itself if it has none."""
    parts = parse_name(name)
    return parts.stem if parts else name


class Document(msgspec.Struct):
    """One document: its text, its key, and the fields of its record, `text_column`, which holds the text, included.

    Fields read from JSON are kept as raw JSON, so that numbers, spacing and order are written back unchanged.
    """

    text: str
    key: DocKey
    fields: dict[str, Any]
    text_column: str = "text"

    def replace_text(self, text: str) -> None:
        """Set the text; a field with the same text keeps its raw JSON."""
        if text != self.text:
            self.text = text
            self.fields[self.text_column] = text

    def rename_text(self, name: str) -> None:
        """Name the field of the text anew. Raises InputError if the record has another field of that name."""
        if name == self.text_column:
            return
        if name in self.fields:
            raise InputError(
                f"{self.key.file} line {self.key.row + 1} has a field {name!r} as well as {self.text_column!r}, whose "
                f"text is to be written as {name!r}: give another name for what is written (--text_column)"
            )
        self.fields = {name if field == self.text_column else field: it for field, it in self.fields.items()}
        self.text_column = name

    @property
    def source(self) -> str:
        return self.key.source

    def value(self, field: str) -> Any:
        """A field's value, decoded where it is raw JSON; None if the record has no such field."""
        stored = self.fields.get(field)
        return decode_value(stored) if isinstance(stored, msgspec.Raw) else stored

    @property
    def own_id(self) -> str | None:
        """The user's own `id` as text, JSON as it stands if it is none; None without one."""
        stored, found = self.fields.get("id"), self.value("id")
        if found is None or isinstance(found, str):
            return found and found.encode(errors="replace").decode()  # a lone surrogate is no Unicode
        return (bytes(stored) if isinstance(stored, msgspec.Raw) else _ENCODER.encode(found)).decode()

    @property
    def original_key(self) -> DocKey:
        """Key in the normalised corpus: the one stored in KEY_FIELD by shuffle_holdout, else `key`.

        Raises InputError if KEY_FIELD does not hold a key.
        """
        stored = self.value(KEY_FIELD)
        try:
            return self.key if stored is None else DocKey.parse(str(stored))
        except UsageError as error:
            where = f"{self.key.file} line {self.key.row + 1}"
            raise InputError(f"{where}, {KEY_FIELD}: {error}. Remove the field, or make the file again") from error

    def to_json(self) -> bytes:
        """The record as one line of JSON in UTF-8, ending in a newline."""
        return _ENCODER.encode_lines((self.fields,))


_ENCODER = msgspec.json.Encoder(enc_hook=str)  # Arrow values without a JSON type are written as strings


class Reading(NamedTuple):
    """How texts are read where they are not plain UTF-8.

    `encoding` is that of text files and of bytes in tables. `message` is the template of a message, such as
    "{role}: {content}\\n", where the text's column has lists of them.
    """

    encoding: str = "utf-8"
    message: str = ""


AS_UTF8 = Reading()


@dataclass(frozen=True)
class CorpusFile:
    """A corpus file: its path, its name relative to the corpus root, its size in bytes, the column with the text."""

    path: Path
    name: str
    size: int
    text_column: str = "text"
    reading: Reading = AS_UTF8

    @property
    def source(self) -> str:
        return source_of(self.name)


Ranges = tuple[tuple[int, int | None], ...]
"""Ranges of bytes of a file, each from a byte up to another, or to the end."""
WHOLE: Ranges = ((0, None),)


class Cut(NamedTuple):
    """Where a slice starts: a byte of a .jsonl, a row group of a .parquet; its first row; the bytes it reads."""

    start: int
    row: int
    ranges: Ranges = WHOLE


ONE_SLICE = [Cut(0, 0)]


class ReadInParts(ABC):
    """A dataclass in a task's arguments that names a file of which no more than some bytes are read."""

    @property
    @abstractmethod
    def ranges(self) -> Ranges:
        """The bytes that are read, of every path in it."""


@dataclass(frozen=True)
class Slice(ReadInParts):
    """Part of a corpus file that one task reads, `start` up to `end`: bytes of a .jsonl, row groups of a .parquet.

    `first_row` is the row in the file of its first record; `size` is its approximate size in bytes; `end` None is the
    end of the file. `ranges` are the bytes that are read. `damage` is why a file is left out, in brief and in full.
    """

    path: Path
    name: str
    first_row: int = 0
    start: int = 0
    end: int | None = None
    size: int = 0
    text_column: str = "text"
    ranges: Ranges = WHOLE
    damage: tuple[str, str] | None = None
    reading: Reading = AS_UTF8

    @property
    def source(self) -> str:
        return source_of(self.name)

    @property
    def label(self) -> str:
        """Name of the slice, unique in its corpus: `<file>+<start>`."""
        return f"{self.name}+{self.start}"


def slices_at(file: CorpusFile, cuts: list[Cut]) -> list[Slice]:
    """The slices of a file that start at `cuts`."""
    ends = [cut.start for cut in cuts[1:]] + [None]
    share, rest = divmod(file.size, len(cuts))
    sizes = [share] * (len(cuts) - 1) + [share + rest]
    return [
        Slice(file.path, file.name, cut.row, cut.start, end, size, file.text_column, cut.ranges, reading=file.reading)
        for cut, end, size in zip(cuts, ends, sizes, strict=True)
    ]


def merge_ranges(ranges: Ranges) -> Ranges:
    """The same bytes in ascending ranges that do not touch; empty ones are left out.

    >>> merge_ranges(((5, 9), (0, 3), (3, 4), (8, None), (2, 2)))
    ((0, 4), (5, None))
    """
    merged: list[tuple[int, int | None]] = []
    for start, end in sorted((pair for pair in ranges if pair[0] != pair[1]), key=lambda pair: pair[0]):
        if merged and (merged[-1][1] is None or start <= merged[-1][1]):
            first, last = merged.pop()
            start, end = first, None if last is None or end is None else max(last, end)
        merged.append((start, end))
    return tuple(merged)


@dataclass(frozen=True)
class UnreadFile:
    """A file in a corpus folder that is not read: its name relative to the corpus root, its size in bytes, and why."""

    name: str
    size: int
    reason: str

    @property
    def source(self) -> str:
        return source_of(self.name)


@dataclass(frozen=True)
class Corpus:
    """All files below a corpus root, each list sorted by name; a hidden folder is one unread file."""

    files: list[CorpusFile]
    unread: list[UnreadFile]

    def count_unread(self) -> Counts:
        """Counts of the files that are not read, per source and reason."""
        counts = Counts({}, [])
        for file in self.unread:
            counts.add_unread_file(file.source, file.reason, file.size)
        return counts


def paths_of(files: Iterable[CorpusFile]) -> list[Path]:
    """The paths of corpus files."""
    return [file.path for file in files]


def list_corpus(
    root: Path,
    prefix: str = "",
    text_column: str = "text",
    read_also: Collection[str] = (),
) -> list[CorpusFile]:
    """The files of scan_corpus that are read."""
    return scan_corpus(root, prefix, text_column, read_also).files


def scan_corpus(
    root: Path,
    prefix: str = "",
    text_column: str = "text",
    read_also: Collection[str] = (),
    skip_odd_names: bool = False,
) -> Corpus:
    """Find every file below `root`, read or not; links are followed, our own state folders are left out.

    A file's name is `prefix` + its path relative to `root`. `text_column` is the column or field that holds the
    text; `read_also` names formats that are read only if asked for: txt (a document a file), csv and tsv. A file whose
    name cannot be used (see file_formats.py) is not read with `skip_odd_names`.

    Raises UsageError if `root` is not a folder, holds no file of a known format or some whose names cannot be used,
    InputError if a file cannot be read, or a stage has not finished writing the folder.
    """
    require(bool(text_column), "--text_column: expected the name of a column or field, such as text")
    require(
        text_column != KEY_FIELD,
        f"--text_column {KEY_FIELD}: shuffle_holdout writes keys of documents there, over the texts: rename the column",
    )
    for name in (read_also,) if isinstance(read_also, str) else read_also:
        require(name in TEXT_FORMATS, f"--read_also {name}: expected one of {', '.join(TEXT_FORMATS)}")
    reject_unknown_scheme(root)
    files, unread, cut = [], [], len(os.path.join(root, "")) if root.parts else 0
    odd: list[tuple[str, str]] = []
    for path, size, found in list_finished(root):
        reason, name = found or _unread_reason(path.name, read_also), prefix + str(path)[cut:]
        if not reason and (fault := name_fault(name)):
            odd.append((name, fault))
            reason = ODD_NAME
        if reason:
            unread.append(UnreadFile(name.encode(errors="backslashreplace").decode(), size, reason))
        else:
            files.append(CorpusFile(path, name, size, text_column))
    if not skip_odd_names:
        reject_odd_names(odd)
    if not files:
        raise UsageError(f"{root} holds no corpus file: expected {READABLE}, in it or below{_list_reasons(unread)}")
    files.sort(key=lambda file: file.name)
    return Corpus(files, sorted(unread, key=lambda file: file.name))


def list_source(folder: Path, source: str, text_column: str = "text") -> list[CorpusFile]:
    """The files of one source that are read, named `<source>/…`, or those of every source if `source` is 'all'.

    `folder` is the source's own folder, as on SlimPajama's command lines, or the corpus root. Raises UsageError for
    a source that is no folder's name, and a folder named `all` of the source 'all', which may be meant as either.
    """
    if not source or source != Path(source).name or source == "..":
        raise UsageError(f"data set {source!r}: expected the name of a folder in the corpus, or all")
    if source == "all" == folder.absolute().name:
        raise UsageError(
            f"{folder} with `all`: that may be the data set `all` or every data set in a folder of that name. Rename "
            "the folder, or give the folder above it: all its data sets, `all` among them, are then read"
        )
    prefix = "" if source == "all" else f"{source}/"
    listed = source_folder(folder, source)
    files = list_corpus(listed, prefix, text_column)
    reject_unknown_source(listed, source, (file.name for file in files))
    return files


def source_folder(folder: Path, source: str) -> Path:
    """The folder that list_source lists: `folder`, or the source's own in it if `folder` is the corpus root."""
    is_root = source != "all" and folder.absolute().name != source and is_folder(folder / source)
    return folder / source if is_root else folder


def _unread_reason(name: str, read_also: Collection[str]) -> str:
    """Why a file of this name is not read; '' if it is."""
    parts = parse_name(name)
    if parts is None:
        return unknown_suffix(name)
    if parts.format in TEXT_FORMATS and parts.format not in read_also:
        return ASKED_FOR[parts.format]
    if name in _METADATA_FILES:
        return METADATA
    return CACHE if parts.format == "arrow" and name.startswith(("cache-", "tmp")) else ""


def _list_reasons(unread: Iterable[UnreadFile]) -> str:
    found = Counter(file.reason for file in unread)
    return f". It holds {', '.join(f'{count:,} {reason}' for reason, count in found.most_common())}" if found else ""
