"""Search for ids and urls among documents, and among records that are none."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any, Self

from gristmill.io.documents import DocKey, Document
from gristmill.io.writers import Rejects


class IdSearch(Rejects):
    """Notes where ids and urls are, in documents and in records that are no documents; writes nothing."""

    def __init__(self, output: Path, wanted: frozenset[str]) -> None:
        super().__init__(output)
        self._wanted = wanted
        self._quoted = {name: {json.dumps(name), json.dumps(name, ensure_ascii=False)} for name in wanted}
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
        """Note a document if its id or url is one of those."""
        for name in {document.own_id, str(document.value("url"))}:
            if name is not None and name in self._wanted:
                self.documents[name].append(document.key)

    def note(self, row: int, reason: str, size: int, url: str = "") -> None:  # noqa: ARG002
        self._row = row
        if url in self._wanted:
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
            if name in self._wanted:
                self.malformed[name].append(key)
