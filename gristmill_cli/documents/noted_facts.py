"""NotedFacts: the facts of single documents in the folders of facts of a run."""

from pathlib import Path
from typing import Any

from gristmill.engine.execution.staging import local_copies
from gristmill.io.documents import DocKey
from gristmill.io.facts import INDEX_FILE, FactsFile, are_about, read_index
from gristmill.steps import FORM_CHARACTERS
from gristmill.storage.files import is_file
from gristmill_cli.documents.table_cache import TableCache
from preprocessing.steps.text_digest import TEXT_DIGEST

_FACTS = ("file", "row", FORM_CHARACTERS, "form_bytes", *TEXT_DIGEST)


class NotedFacts:
    """Finds the facts of documents; the list of the files of a folder is read once."""

    def __init__(self, tables: TableCache) -> None:
        self._tables = tables
        self._files = dict[Path, list[FactsFile]]()

    def files(self, folder: Path) -> list[FactsFile]:
        """Return the files of facts in a folder; none if there is no list of them."""
        if folder not in self._files:
            if not is_file(folder / INDEX_FILE):
                return []
            with local_copies([folder / INDEX_FILE]) as (index,):
                self._files[folder] = read_index(index)
        return self._files[folder]

    def of_document(self, folder: Path, key: DocKey) -> dict[str, Any] | None:
        """Return the facts of a document that was written; None if there are none, or none of its text."""
        for file in self.files(folder):
            if are_about(file.slices, key.file, key.row):
                rows = self._tables.select(folder / file.path, _FACTS, {"file": key.file, "row": key.row})
                if rows and TEXT_DIGEST[0] in rows[0]:
                    return rows[0]
                return None
        return None
