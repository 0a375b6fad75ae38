"""Search for an id or url among records that are no documents."""

import json
from pathlib import Path
from typing import Any, Self

from gristmill.io.documents import DocKey
from gristmill.io.writers import Rejects


class IdSearch(Rejects):
    """Looks for an id or url in records that are no documents; writes nothing."""

    def __init__(self, output: Path, wanted: str) -> None:
        super().__init__(output)
        self._wanted = wanted
        self._quoted = {json.dumps(wanted), json.dumps(wanted, ensure_ascii=False)}
        self._file = ""
        self._row = 0
        self.malformed: list[DocKey] = []
        self.skipped: list[tuple[DocKey, str]] = []

    def of(self, file: str) -> Self:
        """Return this, for the records of a file."""
        self._file = file
        return self

    def note(self, row: int, reason: str, size: int, url: str = "") -> None:  # noqa: ARG002
        self._row = row
        if url == self._wanted:
            self.skipped.append((DocKey(self._file, row), reason))

    def add(self, file: str, line: int, reason: str, record: bytes | dict[str, Any]) -> None:  # noqa: ARG002
        """Note a malformed record in which the id is a value, as far as it can be read."""
        if isinstance(record, bytes):
            text = record.decode(errors="replace")
            is_wanted = text == self._wanted or any(quoted in text for quoted in self._quoted)
        else:
            is_wanted = self._wanted in map(str, (record.get("id"), record.get("url")))
        if is_wanted:
            self.malformed.append(DocKey(self._file, self._row))
