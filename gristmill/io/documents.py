"""Document, DocKey, CorpusFile and Slice: records of a corpus, their keys, the files they are in, and parts of these.

A corpus is a folder, `ROOT/<source>/**/*.jsonl | .json | .ndjson [.gz|.zst|.bz2|.xz] | .parquet | .arrow`, and
.txt, .csv and .tsv if asked for; the source is the first folder. A document is a record with a string `text`, or
another column that holds the text; its other fields are kept unchanged. Its key is `<path relative to ROOT>@<row>`;
rows of JSON lines are physical lines, counted from 0, blank ones included. The format of a file follows from its name.
corpus.py finds the files, readers.py reads documents and writers.py writes them.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, get_args

import msgspec

from gristmill.errors import InputError, UsageError
from gristmill.io.text_records import decode_value

KEY_FIELD = "gristmill_key"  # field in which shuffle_holdout stores the original key
PART_FIELD = "gristmill_part"  # field in which apply stores of which document one is a part: <key>#<number>
_MAX_ROW_DIGITS = 18  # of a row that 64 bits hold
Extract = Literal["main", "all"]  # of a web page: its text without menus and footers, or all of it
EXTRACTS: tuple[str, ...] = get_args(Extract)
LINE_FORMATS = ("jsonl", "json", "ndjson")
TABLE_FORMATS = ("parquet", "arrow")
WEB_FORMATS = ("warc", "wet")
FILE_FORMATS = ("txt", "md", "html")  # a file is a document
TEXT_FORMATS = (*FILE_FORMATS, "csv", "tsv")  # read only if asked for: such files may also be notes and metadata
_COMPRESSIONS = {".gz": "gz", ".zst": "zst", ".zstd": "zst", ".bz2": "bz2", ".xz": "xz"}
_SUFFIX = re.compile(r"\.[a-z][a-z0-9]{0,9}")


def _suffixes_of(formats: Iterable[str]) -> tuple[str, ...]:
    """Return the suffixes of files of these formats, each alone and with each compression."""
    suffixes = list[str]()
    for name in formats:
        suffixes += [f".{name}", *(f".{name}{end}" for end in _COMPRESSIONS)]
    return tuple(suffixes)


JSONL_SUFFIXES = _suffixes_of(LINE_FORMATS)
CORPUS_SUFFIXES = (*JSONL_SUFFIXES, *(f".{name}" for name in TABLE_FORMATS), *_suffixes_of(WEB_FORMATS))
READABLE = (
    "*.jsonl, *.ndjson or *.json (one record per line), *.warc or *.wet, also .gz, .zst, .bz2 or .xz; *.parquet; "
    "*.arrow"
)
INDEX_PREFIX = "index:"  # of the file names of an index, a corpus deduplicated before; no corpus file has it


class CorpusName(NamedTuple):
    """A file name in its parts: `stem`, the `format` (such as jsonl) and the `compression` (gz, zst, bz2, xz or '')."""

    stem: str
    format: str
    compression: str


def parse_name(name: str) -> CorpusName | None:
    """Return the parts of a file name; None if its suffix is not that of a known format.

    >>> parse_name("book/a.JSONL.zstd")
    CorpusName(stem='book/a', format='jsonl', compression='zst')
    >>> parse_name("a.b.parquet").stem, parse_name("a.parquet.gz"), parse_name("a.gz")
    ('a.b', None, None)
    """
    compression = compression_of(name)
    without_compression = name.rpartition(".")[0] if compression else name
    stem, dot, suffix = without_compression.rpartition(".")
    format = suffix.lower()
    is_known = format in (*LINE_FORMATS, *TEXT_FORMATS, *WEB_FORMATS)
    is_known = is_known or (format in TABLE_FORMATS and not compression)
    if not dot or not is_known:
        return None
    return CorpusName(stem, format, compression)


def compression_of(name: str) -> str:
    """Return the compression that the last suffix of a name says; '' if none."""
    suffix = name.rpartition(".")[2].lower()
    return _COMPRESSIONS.get(f".{suffix}", "")


def unknown_suffix(name: str) -> str:
    """Return the suffix of a file of unknown format in lower case, with the one before it if it is a compression.

    >>> [unknown_suffix(name) for name in ("a.MD", "a.tar.gz", "data.gz", "LICENSE", "part.0001")]
    ['.md', '.tar.gz', '.gz', 'without suffix', 'without suffix']
    """
    stem, dot, last = name.rpartition("/")[2].lower().rpartition(".")
    suffixes = [f"{dot}{last}"]
    if "." in stem and compression_of(name):
        suffixes.insert(0, f".{stem.rpartition('.')[2]}")
    suffix = "".join(filter(_SUFFIX.fullmatch, suffixes))
    if not stem or not suffix:
        return "without suffix"
    return suffix


def table_name(name: str) -> str:
    """Return the name of the Parquet file that is written for a corpus file.

    >>> table_name("b/a.jsonl.zst")
    'b/a.parquet'
    """
    return f"{stem(name)}.parquet"


def normal_name(name: str, zst: bool = False) -> str:
    """Return the name of the JSON lines that are written for a corpus file: `.jsonl`, `.jsonl.gz` or `.jsonl.zst`.

    Uncompressed lines and .gz stay so, unless `zst`; all other formats and compressions become .jsonl.zst.

    >>> [normal_name(name) for name in ("b/a.JSON", "a.ndjson.gz", "a.jsonl.bz2", "a.parquet", "a.csv")]
    ['b/a.jsonl', 'a.jsonl.gz', 'a.jsonl.zst', 'a.jsonl.zst', 'a.jsonl.zst']
    """
    parts = parse_name(name)
    assert parts is not None, name
    if not zst and parts.format in LINE_FORMATS and parts.compression in ("", "gz"):
        if parts.compression:
            return f"{parts.stem}.jsonl.gz"
        return f"{parts.stem}.jsonl"
    return f"{parts.stem}.jsonl.zst"


def name_in_run(name: str) -> str:
    """Return the name in a run of the documents of a corpus file; the name itself if its format is unknown.

    >>> name_in_run("b/a.JSON"), name_in_run("b/a.jsonl.zst"), name_in_run("b/a")
    ('b/a.jsonl.zst', 'b/a.jsonl.zst', 'b/a')
    """
    return normal_name(name, zst=True) if parse_name(name) else name


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


def label_of(source: str, band: str) -> str:
    """Return the name of a source of tokens: a folder of the corpus, or a band of its score, SOURCE/BAND.

    >>> label_of("web", "high"), label_of("web", "")
    ('web/high', 'web')
    """
    if not band:
        return source
    return f"{source}/{band}"


def folder_of(label: str) -> str:
    """Return the folder of the corpus that a source of tokens is of.

    >>> folder_of("web/high"), folder_of("web")
    ('web', 'web')
    """
    return label.partition("/")[0]


def source_of(file: str) -> str:
    """Return the first folder of a path relative to the corpus root; 'corpus' for a file directly in the root."""
    source, slash, _ = file.partition("/")
    if not slash:
        return "corpus"
    return source


def stem(name: str) -> str:
    """Return the file name without its corpus suffix, such as .jsonl.zst; the name itself if it has none."""
    parts = parse_name(name)
    if parts is None:
        return name
    return parts.stem


class Document(msgspec.Struct):
    """One document: its text, its key, and the fields of its record, `text_column`, which holds the text, included.

    `read_bytes` is the size in UTF-8 of the text that was read.

    Fields read from JSON are kept as raw JSON, so that numbers, spacing and order are written back unchanged.
    """

    text: str
    key: DocKey
    fields: dict[str, Any]
    text_column: str = "text"
    read_bytes: int = 0

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
        renamed = dict[str, Any]()  # in the same order
        for field, value in self.fields.items():
            if field == self.text_column:
                field = name
            renamed[field] = value
        self.fields = renamed
        self.text_column = name

    @property
    def source(self) -> str:
        return self.key.source

    def value(self, field: str) -> Any:
        """Return a field's value, decoded where it is raw JSON; None if the record has no such field."""
        stored = self.fields.get(field)
        if isinstance(stored, msgspec.Raw):
            return decode_value(stored)
        return stored

    @property
    def own_id(self) -> str | None:
        """Return the user's own `id` as text, JSON as written if it is none; None without one."""
        value = self.value("id")
        if value is None:
            return None
        if isinstance(value, str):
            return value.encode(errors="replace").decode()  # a lone surrogate is no Unicode
        stored = self.fields["id"]
        if isinstance(stored, msgspec.Raw):
            return bytes(stored).decode()
        return _ENCODER.encode(value).decode()

    @property
    def original_key(self) -> DocKey:
        """Return the key in the normalised corpus: the one stored in KEY_FIELD by shuffle_holdout, else `key`.

        Raises InputError if KEY_FIELD does not hold a key.
        """
        stored = self.value(KEY_FIELD)
        if stored is None:
            return self.key
        try:
            return DocKey.parse(str(stored))
        except UsageError as error:
            where = f"{self.key.file} line {self.key.row + 1}"
            raise InputError(f"{where}, {KEY_FIELD}: {error}. Remove the field, or make the file again") from error

    def to_json(self) -> bytes:
        """Return the record as one line of JSON in UTF-8, ending in a newline."""
        return _ENCODER.encode_lines((self.fields,))


_ENCODER = msgspec.json.Encoder(enc_hook=str)  # Arrow values without a JSON type are written as strings


class Reading(NamedTuple):
    """How texts are read where they are not plain UTF-8.

    `encoding` is that of text files and of bytes in tables. `message` is the template of a message, such as
    "{role}: {content}\\n", where the text's column has lists of them. `extract` is which text of a web page is read.
    """

    encoding: str = "utf-8"
    message: str = ""
    extract: Extract = "main"


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


class SliceStart(NamedTuple):
    """Where a slice starts: a byte of a .jsonl, a row group of a .parquet; its first row; the bytes it reads."""

    start: int
    row: int
    ranges: Ranges = WHOLE


ONE_SLICE = [SliceStart(0, 0)]


class ReadInParts(ABC):
    """A dataclass in a task's arguments that names a file of which no more than some bytes are read."""

    @property
    @abstractmethod
    def ranges(self) -> Ranges:
        """Return the bytes that are read, of every path in it."""


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
        """Return the name of the slice, unique in its corpus: `<file>+<start>`."""
        return f"{self.name}+{self.start}"


def slices_at(file: CorpusFile, cuts: list[SliceStart]) -> list[Slice]:
    """Return the slices of a file that start at `cuts`."""
    share, rest = divmod(file.size, len(cuts))
    slices = list[Slice]()
    for cut, following in zip_longest(cuts, cuts[1:]):
        end: int | None = None
        size = share + rest
        if following:
            end = following.start
            size = share
        slices.append(
            Slice(
                file.path,
                file.name,
                first_row=cut.row,
                start=cut.start,
                end=end,
                size=size,
                text_column=file.text_column,
                ranges=cut.ranges,
                reading=file.reading,
            )
        )
    return slices


def merge_ranges(ranges: Ranges) -> Ranges:
    """Merge byte ranges into ascending ones that do not touch; empty ones are left out.

    >>> merge_ranges(((5, 9), (0, 3), (3, 4), (8, None), (2, 2)))
    ((0, 4), (5, None))
    """
    filled = [(start, end) for start, end in ranges if start != end]
    merged: list[tuple[int, int | None]] = []
    for start, end in sorted(filled, key=lambda pair: pair[0]):
        if merged and (merged[-1][1] is None or start <= merged[-1][1]):
            first, last = merged.pop()
            start = first
            end = None if last is None or end is None else max(last, end)
        merged.append((start, end))
    return tuple(merged)


def paths_of(files: Iterable[CorpusFile]) -> list[Path]:
    """Return the paths of corpus files."""
    return [file.path for file in files]


def rows_of(documents: Iterable[Document]) -> list[int]:
    """Return the row of each document in its file."""
    return [document.key.row for document in documents]


def read_sizes_of(documents: Iterable[Document]) -> list[int]:
    """Return the bytes that each document was read from."""
    return [document.read_bytes for document in documents]


def sources_of(files: Iterable[CorpusFile]) -> set[str]:
    """Return the sources of corpus files."""
    return {file.source for file in files}


def names_of(slices: Iterable[Slice]) -> tuple[str, ...]:
    """Return the names of the files that slices are of, in order."""
    return tuple(dict.fromkeys(part.name for part in slices))


def total_size(files: Iterable[CorpusFile | Slice]) -> int:
    """Return the bytes of corpus files, or of slices of them."""
    return sum(file.size for file in files)
