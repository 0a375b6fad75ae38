"""The files of a corpus: which files in a folder are read and which are not, and sources that a run's TOML names."""

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import msgspec

from gristmill.counts import Counts
from gristmill.errors import UsageError, require
from gristmill.io.documents import (
    EXTRACTS,
    FILE_FORMATS,
    INDEX_PREFIX,
    KEY_FIELD,
    LINE_FORMATS,
    READABLE,
    TABLE_FORMATS,
    TEXT_FORMATS,
    WEB_FORMATS,
    CorpusFile,
    Extract,
    Reading,
    parse_name,
    source_of,
    unknown_suffix,
)
from gristmill.io.files import list_finished
from gristmill.io.text_records import fields_named
from gristmill.paths import below
from gristmill.storage.files import file_info, is_file, is_folder, reject_unknown_scheme

METADATA = "metadata of Hugging Face datasets"  # reasons why a file is not read, along with those of storage/files.py
CACHE = "cache of Hugging Face datasets"
ODD_NAME = "name that is no key"
_EMPTY = "empty"  # of a file that is read, and has no document
ASKED_FOR = {name: f".{name} (see --read_also)" for name in TEXT_FORMATS}
ARC = {suffix: f"{suffix}, which is not WARC" for suffix in (".arc", ".arc.gz")}  # the format before
_METADATA_FILES = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
_MAX_FILE_BYTES = 200  # of a file's own name: outputs add suffixes
_NAMED = 8  # folders that an error lists
_PAIR_SEPARATOR = re.compile(r"@\d+ :: ")  # between the two keys of a line in duplicate_pairs.txt
FORMATS = (LINE_FORMATS[0], *TABLE_FORMATS, *WEB_FORMATS, *TEXT_FORMATS)


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
        """Return counts of the files that are not read, or in which nothing is, per source and reason."""
        counts = Counts({}, [])
        for file in self.unread:
            counts.add_unread_file(file.source, file.reason, file.size)
        for readable in self.files:
            name = parse_name(readable.name)
            is_valid = name is not None and not name.compression and name.format not in TABLE_FORMATS
            if not readable.size and is_valid:  # others are damaged
                counts.add_unread_file(readable.source, _EMPTY, 0)
        return counts


def list_corpus(
    root: Path,
    prefix: str = "",
    text_column: str = "text",
    read_also: Collection[str] = (),
) -> list[CorpusFile]:
    """Return the files of scan_corpus that are read."""
    return scan_corpus(root, prefix, text_column, read_also).files


def scan_corpus(
    root: Path,
    prefix: str = "",
    text_column: str = "text",
    read_also: Collection[str] = (),
    skip_odd_names: bool = False,
    extract: Extract = "main",
) -> Corpus:
    """Find every file below `root`, read or not; links are followed, our own state folders are left out.

    A file's name is `prefix` + its path relative to `root`. `text_column` is the column or field that holds the
    text; `read_also` names formats that are read only if asked for: txt (a document a file), csv and tsv; `extract` is
    which text of web pages is read. A file whose name cannot be used (see name_fault) is not read with
    `skip_odd_names`.

    Raises UsageError if `root` is not a folder, holds no file of a known format or some whose names cannot be used,
    InputError if a file cannot be read, or a stage has not finished writing the folder.
    """
    require(bool(text_column), "--text_column: expected the name of a column or field, such as text")
    require(
        text_column != KEY_FIELD,
        f"--text_column {KEY_FIELD}: shuffle_holdout would overwrite the texts with keys of documents: rename the "
        "column",
    )
    if isinstance(read_also, str):
        read_also = (read_also,)
    for name in read_also:
        require(name in TEXT_FORMATS, f"--read_also {name}: expected one of {', '.join(TEXT_FORMATS)}")
    require(extract in EXTRACTS, f"--extract {extract}: expected one of {', '.join(EXTRACTS)}")
    reject_unknown_scheme(root)
    files = list[CorpusFile]()
    unread = list[UnreadFile]()
    odd = list[str]()
    cut = len(os.path.join(root, "")) if root.parts else 0
    for path, size, why_not_listed in list_finished(root):
        reason = why_not_listed or _unread_reason(path.name, read_also)
        name = prefix + str(path)[cut:]
        if not reason:
            fault = name_fault(name)
            if fault:
                odd.append(f"{name!r} ({fault})")
                reason = ODD_NAME
        if reason:
            unread.append(UnreadFile(name.encode(errors="backslashreplace").decode(), size, reason))
        else:
            files.append(CorpusFile(path, name, size, text_column, Reading(extract=extract)))
    if odd and not skip_odd_names:
        raise UsageError(
            f"{len(odd):,} file name{'s' * (len(odd) > 1)} cannot be part of a key: {_some(odd)}. Rename them, or "
            "leave these files out with --skip_odd_names"
        )
    if not files:
        raise UsageError(f"{root} holds no corpus file: expected {READABLE}, in it or below{_list_reasons(unread)}")
    files.sort(key=lambda file: file.name)
    return Corpus(files, sorted(unread, key=lambda file: file.name))


def list_source(folder: Path, source: str, text_column: str = "text") -> list[CorpusFile]:
    """Return the files of one source that are read, named `<source>/…`; 'all': of all sources.

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
    prefix = f"{source}/"
    if source == "all":
        prefix = ""
    listed = source_folder(folder, source)
    files = list_corpus(listed, prefix, text_column)
    below = [file.name.split("/")[1:] for file in files]
    if source not in ("all", listed.absolute().name) and all(len(path) > 1 for path in below):
        raise UsageError(  # with a file of its own it is taken as the source's
            f"data set {source!r}: {listed} has another name, and no folder of this one: it holds "
            f"{_some(sorted({path[0] for path in below}))}. Give the name of one of these, or all"
        )
    return files


def source_folder(folder: Path, source: str) -> Path:
    """Return the folder that list_source lists: `folder`, or the source's own in it if `folder` is the corpus root."""
    if source != "all" and folder.absolute().name != source and is_folder(folder / source):
        return folder / source
    return folder


def _unread_reason(name: str, read_also: Collection[str]) -> str:
    """Return why a file of this name is not read; '' if it is."""
    parts = parse_name(name)
    if parts is None:
        suffix = unknown_suffix(name)
        return ARC.get(suffix, suffix)
    if parts.format in TEXT_FORMATS and parts.format not in read_also:
        return ASKED_FOR[parts.format]
    if name in _METADATA_FILES:
        return METADATA
    if parts.format == "arrow" and name.startswith(("cache-", "tmp")):
        return CACHE
    return ""


def _list_reasons(unread: Iterable[UnreadFile]) -> str:
    """Return in words how many files are not read for which reasons; '' if all are read."""
    reasons = Counter(file.reason for file in unread)
    if not reasons:
        return ""
    counted = ", ".join(f"{count:,} {reason}" for reason, count in reasons.most_common())
    return f". It holds {counted}"


def name_fault(name: str) -> str:
    """Return why the name of a corpus file, relative to its root, cannot be part of a key, text in a line; else ''.

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


def _some(names: Sequence[str]) -> str:
    """Return the first names for a message, and how many more there are."""
    text = ", ".join(names[:_NAMED])
    if len(names) > _NAMED:
        text += f" and {len(names) - _NAMED:,} more"
    return text


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table [sources.NAME]; what it leaves out is as without the table.

    Attributes:
        path: Folder or file; a relative one is in CORPUS, and by default it is CORPUS/NAME.
        column: The field that holds the text, or one in another: meta.text.
        template: Or a text made of several: "{title}\\n\\n{meta.body}".
        message: Where the column holds a chat, a list of messages, the text of one: "{role}: {content}\\n".
        format: The only format to read, one of FORMATS; jsonl is .json and .ndjson, too.
        encoding: Of text files and of bytes in tables, such as cp1252; by default UTF-8. What is not in it is counted
            as malformed. Of lines and tables, it must have ASCII as ASCII does.
        extract: Text to take from HTML pages, in files and web archives: the main text, without menus, or all of it.
        weight: Epochs of the source in the mix.
    """

    path: str = ""
    column: str = ""
    template: str = ""
    message: str = ""
    format: str = ""
    encoding: str = ""
    extract: Extract = "main"
    weight: float | None = None

    def check(self, name: str) -> None:
        """Raise UsageError for values that do not go together; `name` is the source's."""
        where = f"[sources.{name}]"
        require(
            name not in ("", ".", "..") and "/" not in name and not name.startswith("."),
            f"{where}: expected the name of a folder that is not hidden, as it begins the keys of its documents",
        )
        require(not (self.column and self.template), f"{where} has a column and a template: give one of them")
        require(
            not self.template or fields_named(self.template) != [self.template],
            f"{where} template {self.template!r}: expected names of fields in braces, such as {{title}}",
        )
        require(
            not self.message or ("{" in self.message and not self.template),
            f"{where} message {self.message!r}: expected names of a message's fields in braces, such as "
            "'{role}: {content}\\n', and no template with it; try a column",
        )
        require(
            _is_encoding(self.encoding or "utf-8", any_text=self.format in FILE_FORMATS),
            f"{where} encoding {self.encoding!r}: expected one of text that Python knows and, unless a file is a "
            'document (format txt, md or html), that has ASCII as it is; try cp1252, or format = "txt"',
        )
        require(
            not self.encoding or self.format not in WEB_FORMATS,
            f"{where} encoding has no effect on web archives, whose pages have charsets of their own: leave it out",
        )
        require(self.extract in EXTRACTS, f"{where} extract {self.extract!r}: expected one of {', '.join(EXTRACTS)}")
        require(self.format in ("", *FORMATS), f"{where} format {self.format!r}: expected one of {', '.join(FORMATS)}")

    @property
    def reading(self) -> Reading:
        """Return how its texts are read."""
        return Reading(self.encoding or "utf-8", self.message, self.extract)

    def folder(self, root: Path, name: str) -> Path:
        """Return its folder, or file."""
        return below(root, Path(self.path or name))


def scan_sources(
    root: Path, sources: Mapping[str, Source], text_column: str = "text", skip_odd_names: bool = False
) -> list[tuple[Path, Corpus]]:
    """Return the folder and the files of each source, named `NAME/…`; other folders in `root` are not looked at.

    `text_column` is the field of the text where a source names none. Raises as scan_corpus, and UsageError for a source
    that Source.check refuses.
    """
    corpora = list[tuple[Path, Corpus]]()
    for name, source in sorted(sources.items()):
        source.check(name)
        path = source.folder(root, name)
        column = source.template or source.column or text_column
        if is_file(path):
            folder = path.parent
            corpus = Corpus([_only_file(path, name, column)], [])
        else:
            folder = path
            read_also = (source.format,) if source.format in TEXT_FORMATS else ()
            listed = scan_corpus(path, f"{name}/", column, read_also, skip_odd_names=skip_odd_names)
            corpus = _of_format(listed, source.format, path)
        files = [replace(file, reading=source.reading) for file in corpus.files]
        corpora.append((folder, replace(corpus, files=files)))
    return corpora


def _is_encoding(name: str, any_text: bool) -> bool:
    """Return whether texts can be read in an encoding; with `any_text` also in one without ASCII, such as UTF-16."""
    try:
        if any_text:
            return "a".encode(name).decode(name) == "a"  # of no bytes Python would not look the name up
        return bytes(range(128)).decode(name) == bytes(range(128)).decode()
    except (LookupError, UnicodeError, ValueError):
        return False


def join_corpora(corpora: Iterable[tuple[Path, Corpus]]) -> Corpus:
    """Return all files of several folders as one corpus."""
    files = list[CorpusFile]()
    unread = list[UnreadFile]()
    for _, corpus in corpora:
        files += corpus.files
        unread += corpus.unread
    files.sort(key=lambda file: file.name)
    unread.sort(key=lambda file: file.name)
    return Corpus(files, unread)


def _only_file(path: Path, source: str, column: str) -> CorpusFile:
    """Return a source's only file. UsageError if it cannot be read, or named."""
    name = f"{source}/{path.name}"
    info = file_info(path)
    is_readable = parse_name(name) is not None
    require(is_readable, f"[sources.{source}] path {path}: expected a folder, or a *.jsonl or the like")
    fault = name_fault(name)
    require(not fault, f"[sources.{source}] path {path}: {fault}")
    assert info is not None
    return CorpusFile(path, name, info.size, column)


def _of_format(corpus: Corpus, format: str, folder: Path) -> Corpus:
    """Return the files of one format; the others are not read."""
    if not format:
        return corpus
    chosen_formats: tuple[str, ...] = (format,)
    if format == FORMATS[0]:
        chosen_formats = LINE_FORMATS
    files = list[CorpusFile]()
    unread = list(corpus.unread)
    formats = set[str]()
    for file in corpus.files:
        parts = parse_name(file.name)
        assert parts is not None  # it is read
        formats.add(parts.format)
        if parts.format in chosen_formats:
            files.append(file)
        else:
            unread.append(UnreadFile(file.name, file.size, f"not {format}"))
    if not files:
        raise UsageError(f"{folder} holds no file of the format {format}, only {', '.join(sorted(formats))}")
    return replace(corpus, files=files, unread=unread)


def web_libraries(files: Iterable[CorpusFile]) -> tuple[str, ...]:
    """Return the distributions that decide the texts of files: none, or those that read web pages.

    Raises UsageError if they are needed and not installed.
    """
    formats = set[str]()
    for file in files:
        parts = parse_name(file.name)
        if parts:
            formats.add(parts.format)
    if not formats & {*WEB_FORMATS, "html"}:
        return ()
    if any(find_spec(name) is None for name in ("brotli", "chardetng_py", "resiliparse")):
        raise UsageError(
            "the corpus holds web archives or pages (.warc, .wet, .html): to read them, pip install 'gristmill[web]'"
        )
    return ("resiliparse", "chardetng-py")
