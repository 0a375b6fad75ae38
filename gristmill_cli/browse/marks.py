"""Marks of documents that are to be kept or dropped after all."""

from pathlib import Path
from threading import Lock

from gristmill.io.documents import DocKey
from gristmill.storage.files import is_file
from gristmill.storage.local import atomic_write_bytes
from preprocessing.mixing.drops import read_keep_list


class KeepMarks:
    """The marks, `keep` or `drop`, by the document's key; in a file, if there is one."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.words = dict[DocKey, str]()
        self._lock = Lock()
        if path and is_file(path):
            kept, dropped = read_keep_list(path)
            for word, rows_by_file in (("keep", kept), ("drop", dropped)):
                for file, rows in rows_by_file.items():
                    for row in rows.tolist():
                        self.words[DocKey(file, int(row))] = word

    def set(self, key: DocKey, word: str) -> None:
        """Mark a document; a word that is neither `keep` nor `drop` takes its mark away."""
        with self._lock:
            self.words.pop(key, None)
            if word in ("keep", "drop"):
                self.words[key] = word
            if self.path:
                atomic_write_bytes(self.path, self.content)

    @property
    def content(self) -> bytes:
        """Return the list, by key."""
        lines = [f"{word} {key}\n" for key, word in sorted(self.words.items())]
        return "".join(lines).encode("utf-8", "replace")
