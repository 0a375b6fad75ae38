"""Lineage, one step deep: whether the files that a stage reads are what the stages that wrote them recorded.

The content tag of a file is the SHA-256 that its producer recorded, else its size and modification time.
"""

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from gristmill.engine.staleness.ledger import Ledger
from gristmill.engine.staleness.records import OutputRecord
from gristmill.errors import InputError
from gristmill.io.files import REJECTS_SUFFIX, STATE_DIR
from gristmill.paths import is_top, name_of
from gristmill.storage.files import FileInfo, hash_file, list_level, list_tree
from gristmill.storage.listings import Level, Tree, list_kept_again

MISSING = "missing"  # the tag of a file that is not there
_MANY_FOLDERS = 8  # of a bucket; more are listed at once
_SIZE_AND_TIME = " bytes of "  # between the two in a tag
Listed = Mapping[Path, Sequence[Path] | None]  # the files that were found in input folders; None: not listed


class Producer:
    """A stage that wrote files: its ledger as it was when it was read first."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    @cached_property
    def outputs(self) -> dict[str, OutputRecord]:
        """Return the record of every file that the stage wrote, or was about to write (size -1), by absolute path."""
        return self.ledger.outputs()

    def below(self, folder: str) -> Iterator[str]:
        """Yield the files below a folder that the stage wrote, without hidden ones and malformed records."""
        prefix = f"{folder.rstrip('/')}/"
        for name, record in self.outputs.items():
            if record.size < 0 or not name.startswith(prefix):
                continue
            is_hidden = "/." in name[len(prefix) - 1 :]
            if not is_hidden and not name.endswith(REJECTS_SUFFIX):
                yield name


@dataclass
class FileTags:
    """Content tags of files; each folder is listed once and each ledger is read once. Paths within are absolute.

    `own` has the records of the outputs of the stage that asks, whose ledger is the file `own_ledger`.
    """

    own: dict[str, OutputRecord] = field(default_factory=dict)
    own_ledger: Path | None = None
    _levels: dict[str, Level] = field(default_factory=dict)  # by folder
    _trees: dict[str, Tree] = field(default_factory=dict)  # by folder
    _producers: dict[str, list[Producer]] = field(default_factory=dict)  # by folder: of it and its parents
    _hashed: dict[str, str] = field(default_factory=dict)

    def stat(self, path: Path | str) -> FileInfo | None:
        """Return the file's size and version, from one listing of its folder; None if there is no such file."""
        folder, _, file = name_of(path).rpartition("/")
        _, files = self._level(folder or "/")
        return files.get(file)

    def folders_in(self, folder: str) -> list[str]:
        """Return the names of the folders directly in a folder, without hidden ones."""
        folders, _ = self._level(folder)
        return [name for name in folders if not name.startswith(".")]

    def list_whole(self, folder: str) -> None:
        """List a folder in a bucket with all folders below it, of which each would else take a request."""
        if self._tree_above(folder) is None:
            tree = list_tree(Path(folder))
            if tree is not None:
                self._trees[folder] = tree

    def list_together(self, paths: Iterable[Path], tops: Sequence[Path]) -> None:
        """List folders of a bucket below `tops` at once, where many of them have some of the files `paths`.

        Each folder by itself would take a request.
        """
        folders_below: dict[str, set[str]] = {name_of(top): set() for top in tops}
        for name in map(name_of, paths):
            for top, folders in folders_below.items():
                if name.startswith(f"{top}/"):
                    folders.add(name.rpartition("/")[0])
                    break
        for folders in folders_below.values():
            if len(folders) > _MANY_FOLDERS:
                self.list_whole(os.path.commonpath(folders))

    def forget(self, folders: Iterable[Path]) -> None:
        """Drop the listings of folders that have been written to."""
        for folder in folders:
            name = name_of(folder)
            self._levels.pop(name, None)
            listed = self._tree_above(name)
            while listed is not None:
                del self._trees[listed]
                listed = self._tree_above(name)

    def of(self, path: Path | str) -> str:
        """Return the tag of a file; MISSING if there is none."""
        name = name_of(path)
        info = self.stat(name)
        if info is None:
            return MISSING
        if name in self._hashed:
            return self._hashed[name]
        record = self._record(name)
        if record and matches(info, record):
            return record.sha256
        return f"{info.size}{_SIZE_AND_TIME}{info.e_tag or info.mtime_ns}"

    def touched(self, paths: Iterable[Path | str]) -> list[Path]:
        """Return the paths that have the recorded size and another modification time: only their hash tells more."""
        names = dict.fromkeys(map(name_of, paths))
        return [Path(name) for name in names if self._is_touched(name)]

    def set_hash(self, path: Path, sha256: str) -> None:
        """Set the SHA-256 of a touched file."""
        self._hashed[str(path)] = sha256

    def differs(self, path: Path) -> bool:
        """Return whether a file is not what the stages that wrote it recorded, or is gone; call `touched` before."""
        name = name_of(path)
        records = [record for record in self._records(name) if record.size >= 0]
        if not records:
            return False
        info = self.stat(name)
        if info and any(matches(info, record) for record in records):
            return False
        return self._hashed.get(name, "") not in [record.sha256 for record in records]

    def producers(self, folder: str) -> list[Producer]:
        """Return the stages that keep their ledgers in a folder or a parent of it."""
        if folder not in self._producers:
            producers = list[Producer]()
            if self._may_have_ledgers(folder):
                for ledger in Ledger.all_in(Path(folder, STATE_DIR)):
                    if ledger.file != self.own_ledger:
                        producers.append(Producer(ledger))
            if not is_top(folder):
                parent = os.path.dirname(folder)  # noqa: PTH120
                if parent != folder:
                    producers += self.producers(parent)
            self._producers[folder] = producers
        return self._producers[folder]

    def _may_have_ledgers(self, folder: str) -> bool:
        """Return whether a state folder may be in a folder: a listing that is known needs no request."""
        if folder not in self._levels:
            return True
        folders, _ = self._levels[folder]
        return STATE_DIR in folders

    def _level(self, folder: str) -> Level:
        if folder not in self._levels:
            listed = self._tree_above(folder)
            if listed is None:
                self._levels[folder] = list_level(Path(folder))
            else:
                self._levels[folder] = self._trees[listed].level(folder[len(listed) + 1 :])
        return self._levels[folder]

    def _tree_above(self, folder: str) -> str | None:
        """Return the folder that was listed as a whole, and is this one or above it; None if there is none."""
        return next((listed for listed in self._trees if f"{folder}/".startswith(f"{listed}/")), None)

    def _is_touched(self, name: str) -> bool:
        if name in self._hashed:
            return False
        info = self.stat(name)
        if info is None:
            return False
        record = self._record(name)
        if record is None:
            return False
        return info.size == record.size and not matches(info, record)

    def _record(self, name: str) -> OutputRecord | None:
        """Return the record of the file by the stage that wrote it, the one that fits best if several stages did."""
        records = self._records(name)
        if not records:
            return None
        if len(records) == 1:
            return records[0]
        info = self.stat(name)
        if info is None:
            return records[0]
        return max(records, key=lambda record: (matches(info, record), record.size == info.size))

    def _records(self, name: str) -> list[OutputRecord]:
        """Return the records of a file by stages whose ledgers are in a parent folder, or by this one."""
        folder = name.rpartition("/")[0] or "/"
        records = list[OutputRecord]()
        for producer in self.producers(folder):
            if name in producer.outputs:
                records.append(producer.outputs[name])
        if name in self.own:
            records.append(self.own[name])
        return records


def is_hash(tag: str) -> bool:
    """Return whether a tag is a SHA-256, not the size and time of a file that no stage wrote."""
    return _SIZE_AND_TIME not in tag


def matches(info: FileInfo, record: OutputRecord) -> bool:
    """Return whether a file has the size, and the modification time or ETag, that its record gives."""
    return info == FileInfo(record.size, record.mtime_ns, record.e_tag)


def writer_of(path: Path | str) -> str:
    """Return the stage that wrote a file, by a ledger in a parent folder; '' for a raw file."""
    name = name_of(path)
    producers = FileTags().producers(name.rpartition("/")[0] or "/")
    for producer in producers:
        if name in producer.outputs:
            return producer.ledger.stage
    if producers:
        return "the stage before"
    return ""


def missing_input(path: Path | str, more: str = "") -> InputError:
    """Return the error for a file that a stage wrote and that is gone; `more`: how many others are."""
    stage = writer_of(path) or "the stage before"
    return InputError(
        f"{path}, which {stage} wrote, is missing{more}. Run {stage} again, which writes it, then this command again. "
        f"(If you removed it on purpose, copy its folder without {STATE_DIR} to another place and give that copy.)"
    )


def changed_input(path: Path | str) -> InputError:
    """Return the error for a file that is not what the stage that wrote it recorded."""
    stage = writer_of(path) or "the stage before"
    return InputError(
        f"{path} is not what {stage} wrote: it was changed or damaged since. Remove it, run {stage} again, which "
        f"writes it, then this command again. (If the change is intended, copy its folder without {STATE_DIR} to "
        "another place and give that copy.)"
    )


def reject_incomplete(folder: Path, paths: Iterable[Path], tags: FileTags) -> None:
    """Raise InputError if the files `paths`, found in an input folder, are not the files that stages wrote there.

    One is missing if a ledger names it: in the folder or above it, directly in a folder of it, or above a file that was
    found. One is foreign if no ledger names it, and one that is in its folder, or in a parent, names others.
    """
    top = name_of(folder)
    present = set(map(name_of, paths))
    producers = _producers_around(top, present, tags)
    missing = set[str]()
    for producer in producers:
        for name in producer.below(top):
            if name not in present and not tags.stat(name):
                missing.add(name)
    if missing:
        others = ""
        if len(missing) > 1:
            others = f" (and {len(missing) - 1:,} more)"
        raise missing_input(min(missing), others)
    writers = {producer for producer in producers if not present.isdisjoint(producer.outputs)}
    for name in sorted(present):
        above = tags.producers(os.path.dirname(name))  # noqa: PTH120
        if any(name in producer.outputs for producer in above):
            continue
        for producer in above:
            if producer in writers:
                ledger = producer.ledger.file
                stage = producer.ledger.stage
                raise InputError(
                    f"{name} is in the output of {stage}, which did not write it, or its ledger {ledger} is damaged. "
                    f"Run {stage} again, and then the same command. (If it is to be read with the other files, copy "
                    f"{folder} without {STATE_DIR} to another place, and give that; else move it away.)"
                )


def _producers_around(top: str, present: Iterable[str], tags: FileTags) -> list[Producer]:
    """Return the stages whose ledgers may name files in a folder, or are above a file that is present."""
    holders = {top, *map(os.path.dirname, present)}
    for name in tags.folders_in(top):  # of which all files may be missing
        holders.add(os.path.join(top, name))
    producers = dict[Producer, None]()  # in order
    for holder in sorted(holders):
        producers |= dict.fromkeys(tags.producers(holder))
    return list(producers)


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
        if tags.stat(path) is None:
            raise missing_input(path)
        raise changed_input(path)
