"""Content tags: the SHA-256 that the stage which wrote a file recorded, else the file's size and modification time."""

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gristmill.engine.records import Ledger, OutputRecord
from gristmill.engine.task import FileSet
from gristmill.errors import InputError
from gristmill.io.files import STATE_DIR
from gristmill.storage.files import FileInfo, hash_file, is_folder, list_folder
from gristmill.storage.names import name_of
from gristmill.urls import is_top


@dataclass
class FileTags:
    """Content tags of files; each folder is listed once and each ledger is read once. Paths within are absolute.

    `own` has the records of a stage's outputs, as some may be in a folder that is not below its ledger's; that is the
    file `own_ledger`, which is not read again.
    """

    own: dict[str, OutputRecord] = field(default_factory=dict)
    own_ledger: Path | None = None
    _stats: dict[str, dict[str, FileInfo]] = field(default_factory=dict)  # by folder and name
    _records: dict[str, list[dict[str, OutputRecord]]] = field(default_factory=dict)  # by folder: of it and its parents
    _hashed: dict[str, str] = field(default_factory=dict)

    def stat(self, path: Path | str) -> FileInfo | None:
        """The file's size and version, from one listing of its folder; None if there is no such file."""
        folder, name = os.path.split(name_of(path))
        if folder not in self._stats:
            self._stats[folder] = list_folder(Path(folder))
        return self._stats[folder].get(name)

    def states(self, found: Iterable[Path | FileSet]) -> dict[Path, FileInfo]:
        """Sizes and versions of single files that exist, as they were listed."""
        return {path: info for path in found if isinstance(path, Path) and (info := self.stat(path))}

    def forget(self, folders: Iterable[Path]) -> None:
        """Drop the listings of folders that have been written to."""
        for folder in folders:
            self._stats.pop(name_of(folder), None)

    def of(self, path: Path) -> str:
        """The tag of a file; 'missing' if there is none."""
        name = name_of(path)
        found = self.stat(name)
        if found is None:
            return "missing"
        if name in self._hashed:
            return self._hashed[name]
        record = self._record(name)
        if record and matches(found, record):
            return record.sha256
        return f"{found.size} bytes of {found.e_tag or found.mtime_ns}"

    def touched(self, paths: Iterable[Path]) -> list[Path]:
        """Those of `paths` that have the recorded size and another modification time: only their hash tells more."""
        names = dict.fromkeys(name_of(path) for path in paths)
        return [Path(name) for name in names if self._is_touched(name)]

    def set_hash(self, path: Path, sha256: str) -> None:
        """Set the SHA-256 of a touched file."""
        self._hashed[str(path)] = sha256

    def differs(self, path: Path) -> bool:
        """Whether a file is there, and is none that a stage of ours wrote under this name; call `touched` before."""
        name = name_of(path)
        found, records = self.stat(name), [record for record in self._all_records(name) if record.size >= 0]
        if found is None or not records or any(matches(found, record) for record in records):
            return False
        return self._hashed.get(name, "") not in (record.sha256 for record in records)

    def _is_touched(self, name: str) -> bool:
        found, record = self.stat(name), self._record(name)
        is_hashed = name in self._hashed
        return bool(found and record and found.size == record.size and not matches(found, record) and not is_hashed)

    def _record(self, name: str) -> OutputRecord | None:
        """The record of the file by the stage that wrote it, the one that fits best if several stages did."""
        found, records = self.stat(name), self._all_records(name)
        if found and len(records) > 1:
            records.sort(key=lambda record: (matches(found, record), record.size == found.size), reverse=True)
        return records[0] if records else None

    def _all_records(self, name: str) -> list[OutputRecord]:
        """The records of a file by stages whose ledgers are in a parent folder, or by this one."""
        folder = os.path.dirname(name)  # noqa: PTH120
        if folder not in self._records:
            self._records[folder] = self._read_records(folder)
        return [records[name] for records in (*self._records[folder], self.own) if name in records]

    def _read_records(self, folder: str) -> list[dict[str, OutputRecord]]:
        """The records in `.gristmill` of a folder, and those of its parents, where there are any."""
        parent = os.path.dirname(folder)  # noqa: PTH120
        if is_top(folder):
            parent = folder
        if parent not in self._records and parent != folder:
            self._records[parent] = self._read_records(parent)
        ledgers = (ledger for ledger in Ledger.all_in(Path(folder, STATE_DIR)) if ledger.file != self.own_ledger)
        return [ledger.outputs() for ledger in ledgers] + self._records.get(parent, [])


def reject_damaged(paths: Sequence[Path], tags: FileTags, own: Ledger) -> None:
    """Raise InputError if one of the inputs `paths` is not what the stage that wrote it left there.

    Files that look so are looked at again: another process writes a file first, and its record just after.
    """
    for wait in (0.0, 0.2):
        paths = [path for path in paths if tags.differs(path)]
        if not paths:
            return
        time.sleep(wait)
        tags = FileTags(own=own.outputs())
        for path in tags.touched(paths):
            tags.set_hash(path, hash_file(path))
    for path in filter(tags.differs, paths):
        stage = writer_of(path)
        raise InputError(
            f"{path} is not what {stage} wrote: it was changed or damaged since. Run {stage} again, which writes it "
            f"anew, and then the same command. (If it is right as it is, copy its folder without {STATE_DIR} to "
            "another place, and give that.)"
        )


def matches(found: FileInfo, record: OutputRecord) -> bool:
    """Whether a file has the size, and the modification time or ETag, that its record gives."""
    return found == (record.size, record.mtime_ns, record.e_tag)


def writer_of(path: Path) -> str:
    """The stage that wrote a file, by a ledger in a parent folder; '' for a raw file.

    A folder whose state folder holds no ledger is the second output of a stage: the ledger is in the first.
    """
    name, is_second = name_of(path), None
    for folder in Path(name).parents:
        state = folder / STATE_DIR
        ledgers = Ledger.all_in(state)
        for ledger in ledgers:
            if name in ledger.outputs():
                return ledger.file.stem.partition("-")[0]
        if is_second is None and (ledgers or is_folder(state)):
            is_second = not ledgers
        if is_top(folder):
            break
    return "the stage before" if is_second else ""
