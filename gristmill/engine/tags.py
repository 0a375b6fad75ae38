"""Content tags: the SHA-256 that the stage which wrote a file recorded, else the file's size and modification time."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from gristmill.engine.records import Ledger, OutputRecord
from gristmill.io.unfinished import STATE_DIR


@dataclass
class FileTags:
    """Content tags of files, by absolute path; each folder is listed once and each ledger is read once."""

    _stats: dict[Path, dict[str, os.stat_result]] = field(default_factory=dict)
    _records: dict[Path, dict[Path, OutputRecord]] = field(default_factory=dict)
    _hashed: dict[Path, str] = field(default_factory=dict)

    def stat(self, path: Path) -> os.stat_result | None:
        """The file's status, from one listing of its folder; None if there is no such file."""
        if path.parent not in self._stats:
            self._stats[path.parent] = _list_folder(path.parent)
        return self._stats[path.parent].get(path.name)

    def forget(self, folders: Iterable[Path]) -> None:
        """Drop the listings of folders that have been written to."""
        for folder in folders:
            self._stats.pop(folder, None)

    def of(self, path: Path) -> str:
        """The tag of a file; 'missing' if there is none."""
        path = path.absolute()
        found, record = self.stat(path), self._record(path)
        if found is None:
            return "missing"
        if path in self._hashed:
            return self._hashed[path]
        if record and matches(found, record):
            return record.sha256
        return f"{found.st_size} bytes of {found.st_mtime_ns}"

    def touched(self, paths: Iterable[Path]) -> list[Path]:
        """Those of `paths` that have the recorded size and another modification time: only their hash tells more."""
        return [path for path in dict.fromkeys(path.absolute() for path in paths) if self._is_touched(path)]

    def set_hash(self, path: Path, sha256: str) -> None:
        """Set the SHA-256 of a touched file."""
        self._hashed[path] = sha256

    def _is_touched(self, path: Path) -> bool:
        if path in self._hashed:
            return False
        found, record = self.stat(path), self._record(path)
        return bool(found and record and found.st_size == record.size and not matches(found, record))

    def _record(self, path: Path) -> OutputRecord | None:
        """The record of the file by the stage that wrote it; its ledger is in a parent folder."""
        for folder in path.parents:
            if folder not in self._records:
                ledgers = Ledger.all_in(folder / STATE_DIR)
                self._records[folder] = {name: found for ledger in ledgers for name, found in ledger.outputs().items()}
            if path in self._records[folder]:
                return self._records[folder][path]
        return None


def matches(found: os.stat_result, record: OutputRecord) -> bool:
    """Whether a file has the size and the modification time that its record gives."""
    return (found.st_size, found.st_mtime_ns) == (record.size, record.mtime_ns)


def _list_folder(folder: Path) -> dict[str, os.stat_result]:
    try:
        with os.scandir(folder) as entries:
            return {entry.name: entry.stat() for entry in entries if entry.is_file()}
    except OSError:
        return {}
