"""Content tags: the SHA-256 that the stage which wrote a file recorded, else the file's size and modification time."""

import os
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from gristmill.engine.records import Ledger, OutputRecord
from gristmill.engine.task import FileSet
from gristmill.errors import InputError
from gristmill.io.files import REJECTS_SUFFIX, STATE_DIR
from gristmill.storage.files import FileInfo, hash_file, is_folder, list_folder, list_names
from gristmill.storage.names import name_of
from gristmill.urls import folders_above, is_remote, is_top

_SIZE_AND_TIME = " bytes of "  # between the two in a tag


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
        return f"{found.size}{_SIZE_AND_TIME}{found.e_tag or found.mtime_ns}"

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

    def folders_with_ledgers(self, folder: str, files: Collection[str]) -> list[str]:
        """A folder, those of `files` below it, and those directly in it without any of these: where ledgers may be."""
        holders = {folder, *map(os.path.dirname, files)}
        in_use = {name[len(folder) :].lstrip("/").partition("/")[0] for name in holders}
        self.stat(os.path.join(folder, STATE_DIR))  # lists the folder
        others = {*list_names(Path(folder))} - in_use - self._stats[folder].keys()
        return sorted(holders.union(os.path.join(folder, name) for name in others if name[0] != "."))

    def ledgers(self, folder: str) -> list[dict[str, OutputRecord]]:
        """The records in the ledgers of a folder and its parents, by absolute path, a dict for each ledger."""
        if folder not in self._records:
            self._records[folder] = self._read_records(folder)
        return self._records[folder]

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
        return [records[name] for records in (*self.ledgers(folder), self.own) if name in records]

    def _read_records(self, folder: str) -> list[dict[str, OutputRecord]]:
        """The records in `.gristmill` of a folder, and those of its parents, where there are any."""
        parent = os.path.dirname(folder)  # noqa: PTH120
        if is_top(folder):
            parent = folder
        if parent not in self._records and parent != folder:
            self._records[parent] = self._read_records(parent)
        ledgers = (ledger for ledger in Ledger.all_in(Path(folder, STATE_DIR)) if ledger.file != self.own_ledger)
        behind = self._behind_link(folder) if not is_remote(folder) and os.path.islink(folder) else []  # noqa: PTH114
        return [ledger.outputs() for ledger in ledgers] + behind + self._records.get(parent, [])

    def _behind_link(self, folder: str) -> list[dict[str, OutputRecord]]:
        """The records of the folder to which a link leads, by the paths that files have behind the link."""
        real = os.path.realpath(folder)
        ledgers = [
            {name: ledger[name] for name in ledger if name.startswith(f"{real}/")} for ledger in self.ledgers(real)
        ]
        return [{folder + name[len(real) :]: ledger[name] for name in ledger} for ledger in ledgers]


def reject_incomplete(folder: Path, paths: Iterable[Path], tags: FileTags) -> None:
    """Raise InputError if the files `paths`, found in an input folder, are not those that stages wrote there.

    One is missing if a ledger in the folder, in a parent, or beside the files names it. One is foreign if no ledger
    names it, and one that is in its folder, or in a parent, names others of the `paths`.
    """
    top, found = name_of(folder), set(map(name_of, paths))
    ledgers: dict[int, dict[str, OutputRecord]] = {}  # by identity: a folder's are those of its parents, too
    for holder in tags.folders_with_ledgers(top, found):
        ledgers |= {id(ledger): ledger for ledger in tags.ledgers(holder)}
    missing = {
        name
        for ledger in ledgers.values()
        for name, record in ledger.items()
        if name not in found and record.size >= 0 and _is_read_in(top, name) and tags.stat(name) is None
    }
    if missing:
        _raise_missing(folder, sorted(missing))
    owned = {number: next(iter(found & ledger.keys()), "") for number, ledger in ledgers.items()}
    for name in sorted(found):
        above = tags.ledgers(os.path.dirname(name))  # noqa: PTH120
        if not any(name in ledger for ledger in above):
            for beside in filter(None, (owned[id(ledger)] for ledger in above)):
                _raise_foreign(folder, Path(name), Path(beside))


def reject_outdated(folder: Path) -> None:
    """Raise InputError if a stage that wrote an input folder has not read what is in its own input folder by now.

    Compares the files of folders of which some have the same names in both, each written by a stage, such as a train
    set before and after decontamination.
    """
    for ledger in _ledgers_above(folder / STATE_DIR):
        sources = [(source, other) for source, _ in ledger.sources() for other in Ledger.all_in(source / STATE_DIR)]
        if sources:
            own, read = set(ledger.outputs()), ledger.input_tags()
            for source, other in sources:
                if name := _find_unread(ledger.root, own, read, other, source):
                    raise InputError(
                        f"{folder} is not up to date: {ledger.stage} has not read {source / name} as {other.stage} "
                        f"wrote it last. Run {ledger.stage} again, and then the same command. (If {folder} is right as "
                        f"it is, copy it without {STATE_DIR} to another place, and give that.)"
                    )


def _find_unread(root: Path, own: set[str], read: set[str], other: Ledger, source: Path) -> str:
    """The name of a file that the stage `other` wrote in `source`, and that was not `read` as it is now.

    Only of folders that hold a file from which one of the same name was made below `root`, among the files `own`.
    """
    top = name_of(source)
    if top == name_of(root):
        return ""
    found = {name[len(top) + 1 :]: out.sha256 for name, out in other.outputs().items() if _is_read_in(top, name)}
    folders = {os.path.dirname(name) for name in found if name_of(root / name) in own}  # noqa: PTH120
    unread = (name for name, tag in found.items() if tag not in read and os.path.dirname(name) in folders)  # noqa: PTH120
    return min(unread, default="")


def _is_read_in(folder: str, name: str) -> bool:
    """Whether a recorded output may be read by who reads the folder: no temporary file, and no malformed records."""
    below = name.removeprefix(folder.rstrip("/"))
    return below != name and below[0] == "/" and "/." not in below and not name.endswith(REJECTS_SUFFIX)


def _raise_missing(folder: Path, missing: Sequence[str]) -> NoReturn:
    stage, path = writer_of(Path(missing[0])), missing[0]
    others = f", and {len(missing) - 1:,} more of its files are, too" if missing[1:] else ""
    raise InputError(
        f"{path}, which {stage} wrote, is missing{others}. Run {stage} again, which writes it anew, and then the same "
        f"command. (If it was removed on purpose, copy {folder} without {STATE_DIR} to another place, and give that.)"
    )


def _raise_foreign(folder: Path, path: Path, beside: Path) -> NoReturn:
    """`beside` is another file that was found, and that one of the same stages wrote."""
    stage = writer_of(beside)
    for ledger in _ledgers_above(path):
        if ledger.is_damaged:
            raise InputError(
                f"{path} may be of another run than the files beside it: the ledger {ledger.file} is damaged, and does "
                f"not name it. Run {stage} again, and then the same command"
            )
    raise InputError(
        f"{path} is in the output of {stage}, which did not write it: it may be another run's. If it is to be read "
        f"with the other files, copy {folder} without {STATE_DIR} to another place, and give that; else move it away"
    )


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


def is_hash(tag: str) -> bool:
    """Whether a tag is a SHA-256, not the size and time of a file that no stage wrote."""
    return _SIZE_AND_TIME not in tag


def matches(found: FileInfo, record: OutputRecord) -> bool:
    """Whether a file has the size, and the modification time or ETag, that its record gives."""
    return found == (record.size, record.mtime_ns, record.e_tag)


def writer_of(path: Path) -> str:
    """The stage that wrote a file, by a ledger in a parent folder; '' for a raw file.

    A folder whose state folder holds no ledger is the second output of a stage: the ledger is in the first.
    """
    name = name_of(path)
    real = name if is_remote(name) else os.path.realpath(name)
    return _writer_of(real) or _writer_of(name)


def _writer_of(name: str) -> str:
    """The same for an absolute path, by the ledgers in the folders that it names: links are not followed."""
    is_second = None
    for folder in folders_above(Path(name)):
        state = folder / STATE_DIR
        ledgers = Ledger.all_in(state)
        for ledger in ledgers:
            if name in ledger.outputs():
                return ledger.stage
        if is_second is None and (ledgers or is_folder(state)):
            is_second = not ledgers
    return "the stage before" if is_second else ""


def _ledgers_above(path: Path) -> Iterator[Ledger]:
    """The ledgers in the folder of a file and its parents."""
    for folder in folders_above(Path(name_of(path))):
        yield from Ledger.all_in(folder / STATE_DIR)
