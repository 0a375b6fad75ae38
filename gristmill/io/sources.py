"""Sources of a corpus that differ in their folders, formats and text fields, as a table of a run's TOML names them."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from gristmill.errors import UsageError, require
from gristmill.io.documents import Corpus, CorpusFile, Reading, UnreadFile, scan_corpus
from gristmill.io.file_formats import (
    FILE_FORMATS,
    LINE_FORMATS,
    TABLE_FORMATS,
    TEXT_FORMATS,
    WEB_FORMATS,
    name_fault,
    parse_name,
)
from gristmill.io.text_records import fields_named
from gristmill.paths import is_remote
from gristmill.storage.files import file_info, is_file

FORMATS = (LINE_FORMATS[0], *TABLE_FORMATS, *WEB_FORMATS, *TEXT_FORMATS)


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
        weight: Epochs of the source in the mix.
    """

    path: str = ""
    column: str = ""
    template: str = ""
    message: str = ""
    format: str = ""
    encoding: str = ""
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
        require(self.format in ("", *FORMATS), f"{where} format {self.format!r}: expected one of {', '.join(FORMATS)}")

    @property
    def reading(self) -> Reading:
        """How its texts are read."""
        return Reading(self.encoding or "utf-8", self.message)

    def folder(self, root: Path, name: str) -> Path:
        """Its folder, or file."""
        own = Path(self.path or name)
        return own if is_remote(own) else root / own


def scan_sources(
    root: Path, sources: Mapping[str, Source], text_column: str = "text", skip_odd_names: bool = False
) -> list[tuple[Path, Corpus]]:
    """The folder and the files of each source, named `NAME/…`; other folders in `root` are not looked at.

    `text_column` is the field of the text where a source names none. Raises as scan_corpus, and UsageError for a source
    that Source.check refuses.
    """
    found = []
    for name, source in sorted(sources.items()):
        source.check(name)
        place, column = source.folder(root, name), source.template or source.column or text_column
        if is_file(place):
            found.append((place.parent, Corpus([replace(_only_file(place, name, column), reading=source.reading)], [])))
        else:
            read_also = (source.format,) if source.format in TEXT_FORMATS else ()
            listed = scan_corpus(place, f"{name}/", column, read_also, skip_odd_names=skip_odd_names)
            chosen = _of_format(listed, source.format, place)
            files = [replace(file, reading=source.reading) for file in chosen.files]
            found.append((place, replace(chosen, files=files)))
    return found


def _is_encoding(name: str, any_text: bool) -> bool:
    """Whether texts can be read in an encoding; with `any_text` also in one whose ASCII is not ASCII's, as UTF-16."""
    try:
        if any_text:
            return "a".encode(name).decode(name) == "a"  # of no bytes Python would not look the name up
        return bytes(range(128)).decode(name) == bytes(range(128)).decode()
    except (LookupError, UnicodeError, ValueError):
        return False


def join_corpora(found: Iterable[tuple[Path, Corpus]]) -> Corpus:
    """All files of several folders as one corpus."""
    parts = [corpus for _, corpus in found]
    files = sorted((file for part in parts for file in part.files), key=lambda file: file.name)
    return Corpus(files, sorted((file for part in parts for file in part.unread), key=lambda file: file.name))


def _only_file(path: Path, source: str, column: str) -> CorpusFile:
    name, info = f"{source}/{path.name}", file_info(path)
    require(
        parse_name(name) is not None, f"[sources.{source}] path {path}: expected a folder, or a *.jsonl or the like"
    )
    require(not (fault := name_fault(name)), f"[sources.{source}] path {path}: {fault}")
    assert info is not None
    return CorpusFile(path, name, info.size, column)


def _of_format(corpus: Corpus, format: str, place: Path) -> Corpus:
    """The files of one format; the others are not read."""
    if not format:
        return corpus
    formats = {file.name: parts.format for file in corpus.files if (parts := parse_name(file.name))}
    chosen = LINE_FORMATS if format == FORMATS[0] else (format,)
    files = [file for file in corpus.files if formats[file.name] in chosen]
    others = [UnreadFile(it.name, it.size, f"not {format}") for it in corpus.files if formats[it.name] not in chosen]
    if not files:
        raise UsageError(
            f"{place} holds no file of the format {format}, only {', '.join(sorted(set(formats.values())))}"
        )
    return replace(corpus, files=files, unread=[*corpus.unread, *others])
