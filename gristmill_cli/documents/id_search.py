"""Search of the raw corpus for ids, urls and pieces of text, among documents and records that are none."""

import json
import tempfile
import unicodedata
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from gristmill.counts import Counts
from gristmill.engine.execution.staging import local_copies
from gristmill.errors import DamagedFile
from gristmill.io.corpus import web_libraries
from gristmill.io.documents import ONE_SLICE, DocKey, Document, slices_at
from gristmill.io.readers import read_documents
from gristmill.io.writers import Rejects
from gristmill_cli.run_check import scan_inputs
from gristmill_cli.run_config import RunConfig


class IdSearch(Rejects):
    """Notes where ids and urls are, in documents and in records that are no documents; writes nothing."""

    def __init__(self, output: Path, names: frozenset[str]) -> None:
        super().__init__(output)
        self._names = names  # ids and urls to look for
        self._quoted = {name: {json.dumps(name), json.dumps(name, ensure_ascii=False)} for name in names}
        self._file = ""
        self._row = 0
        self.documents = defaultdict[str, list[DocKey]](list)
        self.malformed = defaultdict[str, list[DocKey]](list)
        self.skipped = defaultdict[str, list[tuple[DocKey, str]]](list)

    def of(self, file: str) -> Self:
        """Return this, for the records of a file."""
        self._file = file
        return self

    def look_at(self, document: Document) -> None:
        """Note a document if its id or url is among the names."""
        for name in {document.own_id, str(document.value("url") or "")}:
            if name is not None and name in self._names:
                self.documents[name].append(document.key)

    def note(self, row: int, reason: str, size: int, url: str = "") -> None:  # noqa: ARG002
        self._row = row
        if url in self._names:
            self.skipped[url].append((DocKey(self._file, row), reason))

    def add(self, file: str, line: int, reason: str, record: bytes | dict[str, Any]) -> None:  # noqa: ARG002
        """Note a malformed record in which an id is a value, as far as it can be read."""
        key = DocKey(self._file, self._row)
        if isinstance(record, bytes):
            text = record.decode(errors="replace")
            for name, spellings in self._quoted.items():
                if text == name or any(spelling in text for spelling in spellings):
                    self.malformed[name].append(key)
            return
        for name in {str(record.get("id")), str(record.get("url"))}:
            if name in self._names:
                self.malformed[name].append(key)


def search_ids(config: RunConfig, ids: frozenset[str]) -> IdSearch:
    """Read the raw corpus, and return where these ids and urls are."""
    with tempfile.TemporaryDirectory() as folder:
        search = IdSearch(Path(folder) / "malformed", ids)
        for document in _raw_documents(config, search):
            search.look_at(document)
    return search


def search_text(config: RunConfig, piece: str) -> list[DocKey]:
    """Read the raw corpus, and return the keys of the documents with a piece of text, however it is broken into lines.

    The corpus may have other spaces than the piece, and another normal form.
    """
    piece_on_one_line = _on_one_line(piece)
    with tempfile.TemporaryDirectory() as folder:
        search = IdSearch(Path(folder) / "malformed", frozenset())
        keys = list[DocKey]()
        for document in _raw_documents(config, search):
            if piece_on_one_line in _on_one_line(document.text):
                keys.append(document.key)
    return keys


def _raw_documents(config: RunConfig, search: IdSearch) -> Iterator[Document]:
    """Yield the documents of the raw corpus; `search` notes the other records."""
    files = scan_inputs(config, config.corpus).files
    web_libraries(files)  # raises if they are missing
    for file in files:
        with local_copies([file.path]) as (copy,), suppress(DamagedFile):  # the run left it out, too
            (part,) = slices_at(replace(file, path=copy), ONE_SLICE)
            yield from read_documents(part, Counts({}, []), search.of(file.name))


def _on_one_line(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())
