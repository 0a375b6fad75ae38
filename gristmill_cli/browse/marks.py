"""Marks of documents that are to be kept or dropped after all."""

from pathlib import Path
from threading import Lock

from gristmill.io.documents import DocKey
from gristmill.storage.files import is_file
from gristmill.storage.local import atomic_write_bytes
from preprocessing.mixing.keep_list import KeepList


class KeepMarks:
    """The marks, `keep` or `drop`, by the document's key; in a file, if there is one, whose texts stay."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.words = dict[DocKey, str]()
        self._text_lines: tuple[str, ...] = ()
        self._lock = Lock()
        if path and is_file(path):
            listed = KeepList.read(path)
            self._text_lines = listed.text_lines
            for word, rows_by_file in (("keep", listed.kept), ("drop", listed.dropped)):
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
        """Return the list: texts as they were listed, then keys in order."""
        lines = [f"{line}\n" for line in self._text_lines]
        lines += [f"{word} {key}\n" for key, word in sorted(self.words.items())]
        return "".join(lines).encode("utf-8", "replace")
