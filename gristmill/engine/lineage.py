"""Lineage, one step deep: whether the files that a stage reads are what the stages that wrote them recorded.

The content tag of a file is the SHA-256 that its producer recorded, else its size and modification time.
"""

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from gristmill.engine.ledger import Ledger, OutputRecord
from gristmill.errors import InputError
from gristmill.io.files import REJECTS_SUFFIX, STATE_DIR
from gristmill.paths import is_top, name_of
from gristmill.storage.files import FileInfo, hash_file, list_level
from gristmill.storage.listings import Level, list_kept_again

MISSING = "missing"  # the tag of a file that is not there
_SIZE_AND_TIME = " bytes of "  # between the two in a tag
Listed = Mapping[Path, Sequence[Path] | None]  # the files that were found in input folders; None: not listed


class Producer:
    """A stage that wrote files: its ledger as it was when it was read first."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    @cached_property
    def outputs(self) -> dict[str, OutputRecord]:
        """The record of every file that the stage wrote, or claimed (size -1), by absolute path."""
        return self.ledger.outputs()

    def below(self, folder: str) -> Iterator[str]:
        """The files in a folder, at any depth, that the stage wrote, without hidden ones and malformed records."""
        top = f"{folder.rstrip('/')}/"
        for name, record in self.outputs.items():
            is_below = record.size >= 0 and name.startswith(top)
            if is_below and "/." not in name[len(top) - 1 :] and not name.endswith(REJECTS_SUFFIX):
                yield name


@dataclass
class FileTags:
    """Content tags of files; each folder is listed once and each ledger is read once. Paths within are absolute.

    `own` has the records of the outputs of the stage that asks, whose ledger is the file `own_ledger`.
    """

    own: dict[str, OutputRecord] = field(default_factory=dict)
    own_ledger: Path | None = None
    _levels: dict[str, Level] = field(default_factory=dict)  # by folder
    _producers: dict[str, list[Producer]] = field(default_factory=dict)  # by folder: of it and its parents
    _hashed: dict[str, str] = field(default_factory=dict)

    def stat(self, path: Path | str) -> FileInfo | None:
        """The file's size and version, from one listing of its folder; None if there is no such file."""
        folder, _, file = name_of(path).rpartition("/")
        return self._level(folder or "/")[1].get(file)

    def folders_in(self, folder: str) -> list[str]:
        """The names of the folders directly in a folder, without hidden ones."""
        return [name for name in self._level(folder)[0] if name[0] != "."]

    def forget(self, folders: Iterable[Path]) -> None:
        """Drop the listings of folders that have been written to."""
        for folder in folders:
            self._levels.pop(name_of(folder), None)

    def of(self, path: Path | str) -> str:
        """The tag of a file; MISSING if there is none."""
        name = name_of(path)
        found = self.stat(name)
        if found is None:
            return MISSING
        if name in self._hashed:
            return self._hashed[name]
        record = self._record(name)
        if record and matches(found, record):
            return record.sha256
        return f"{found.size}{_SIZE_AND_TIME}{found.e_tag or found.mtime_ns}"

    def touched(self, paths: Iterable[Path | str]) -> list[Path]:
        """Return the paths that have the recorded size and another modification time: only their hash tells more."""
        names = dict.fromkeys(map(name_of, paths))
        return [Path(name) for name in names if self._is_touched(name)]

    def set_hash(self, path: Path, sha256: str) -> None:
        """Set the SHA-256 of a touched file."""
        self._hashed[str(path)] = sha256

    def differs(self, path: Path) -> bool:
        """Whether a file is not what the stages that wrote it recorded, or is gone; call `touched` before."""
        name = name_of(path)
        records = [record for record in self._records(name) if record.size >= 0]
        found = self.stat(name) if records else None
        if not records or any(found and matches(found, record) for record in records):
            return False
        return self._hashed.get(name, "") not in (record.sha256 for record in records)

    def producers(self, folder: str) -> list[Producer]:
        """The stages that keep their ledgers in a folder or a parent of it."""
        if folder not in self._producers:
            parent = folder if is_top(folder) else os.path.dirname(folder)  # noqa: PTH120
            has_none = folder in self._levels and STATE_DIR not in self._levels[folder][0]  # which needs no request
            here = [] if has_none else Ledger.all_in(Path(folder, STATE_DIR))
            found = [Producer(ledger) for ledger in here if ledger.file != self.own_ledger]
            self._producers[folder] = found + (self.producers(parent) if parent != folder else [])
        return self._producers[folder]

    def _level(self, folder: str) -> Level:
        if folder not in self._levels:
            self._levels[folder] = list_level(Path(folder))
        return self._levels[folder]

    def _is_touched(self, name: str) -> bool:
        if name in self._hashed or not (found := self.stat(name)) or not (record := self._record(name)):
            return False
        return found.size == record.size and not matches(found, record)

    def _record(self, name: str) -> OutputRecord | None:
        """The record of the file by the stage that wrote it, the one that fits best if several stages did."""
        records = self._records(name)
        if len(records) > 1 and (found := self.stat(name)):
            records.sort(key=lambda record: (matches(found, record), record.size == found.size), reverse=True)
        return records[0] if records else None

    def _records(self, name: str) -> list[OutputRecord]:
        """The records of a file by stages whose ledgers are in a parent folder, or by this one."""
        above = self.producers(name.rpartition("/")[0] or "/")
        found = [producer.outputs[name] for producer in above if name in producer.outputs]
        return [*found, self.own[name]] if name in self.own else found


def is_hash(tag: str) -> bool:
    """Whether a tag is a SHA-256, not the size and time of a file that no stage wrote."""
    return _SIZE_AND_TIME not in tag


def matches(found: FileInfo, record: OutputRecord) -> bool:
    """Whether a file has the size, and the modification time or ETag, that its record gives."""
    return found == FileInfo(record.size, record.mtime_ns, record.e_tag)


def writer_of(path: Path | str) -> str:
    """The stage that wrote a file, by a ledger in a parent folder; '' for a raw file."""
    name = name_of(path)
    producers = FileTags().producers(name.rpartition("/")[0] or "/")
    named = (producer.ledger.stage for producer in producers if name in producer.outputs)
    return next(named, "the stage before" if producers else "")


def missing_input(path: Path | str, more: str = "") -> InputError:
    """The error for a file that a stage wrote and that is gone; `more`: how many others are."""
    stage = writer_of(path) or "the stage before"
    return InputError(
        f"{path}, which {stage} wrote, is missing{more}. Run {stage} again, which writes it, then this command again. "
        f"(If you removed it on purpose, copy its folder without {STATE_DIR} to another place and give that copy.)"
    )


def changed_input(path: Path | str) -> InputError:
    """The error for a file that is not what the stage that wrote it recorded."""
    stage = writer_of(path) or "the stage before"
    return InputError(
        f"{path} is not what {stage} wrote: it was changed or damaged since. Remove it, run {stage} again, which "
        f"writes it, then this command again. (If the change is intended, copy its folder without {STATE_DIR} to "
        "another place and give that copy.)"
    )


def reject_incomplete(folder: Path, paths: Iterable[Path], tags: FileTags) -> None:
    """Raise InputError if the files `paths`, found in an input folder, are not those that stages wrote there.

    One is missing if a ledger names it: in the folder or above it, directly in a folder of it, or above a file that was
    found. One is foreign if no ledger names it, and one that is in its folder, or in a parent, names others.
    """
    top = name_of(folder)
    found = set(map(name_of, paths))
    inside = (os.path.join(top, name) for name in tags.folders_in(top))  # of which all files may be missing
    holders = sorted({top, *inside, *map(os.path.dirname, found)})
    producers = list(dict.fromkeys(producer for holder in holders for producer in tags.producers(holder)))
    missing = sorted({
        name for each in producers for name in each.below(top) if name not in found and not tags.stat(name)
    })  # fmt: skip
    if missing:
        raise missing_input(missing[0], f" (and {len(missing) - 1:,} more)" if missing[1:] else "")
    owned = {producer: next(iter(found & producer.outputs.keys()), "") for producer in producers}
    for name in sorted(found):
        above = tags.producers(os.path.dirname(name))  # noqa: PTH120
        if not any(name in producer.outputs for producer in above):
            for producer in (producer for producer in above if owned[producer]):
                ledger = producer.ledger.file
                stage = producer.ledger.stage
                raise InputError(
                    f"{name} is in the output of {stage}, which did not write it, or its ledger {ledger} is damaged. "
                    f"Run {stage} again, and then the same command. (If it is to be read with the other files, copy "
                    f"{folder} without {STATE_DIR} to another place, and give that; else move it away.)"
                )


def reject_changed(paths: Sequence[Path], tags: FileTags, own: Ledger) -> None:
    """Raise InputError if one of the inputs `paths` is not what the stage that wrote it left there.

    Files that look so are looked at again: another process writes a file first, and its record just after.
    """
    for wait in (0.0, 0.2):
        paths = [path for path in paths if tags.differs(path)]
        if not paths:
            return
        time.sleep(wait)
        list_kept_again()
        tags = FileTags(own=own.outputs())
        for path in tags.touched(paths):
            tags.set_hash(path, hash_file(path))
    for path in filter(tags.differs, paths):
        raise changed_input(path) if tags.stat(path) else missing_input(path)
