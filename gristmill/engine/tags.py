"""Content tags: the SHA-256 that the stage which wrote a file recorded, else the file's size and modification time."""

import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from gristmill.engine.records import Inputs, Ledger, OutputRecord, Summary, TaskId
from gristmill.io.files import REJECTS_SUFFIX, STATE_DIR, StateFolders
from gristmill.storage.files import FileInfo, file_info, is_folder, list_folder, list_names
from gristmill.storage.names import name_of
from gristmill.storage.objects import list_level
from gristmill.urls import folders_above, is_remote, is_top

MISSING = "missing"  # the tag of a file that is not there
_SIZE_AND_TIME = " bytes of "  # between the two in a tag


class KnownLedger:
    """A ledger as it was when it was looked at first.

    `place` is its path, or that of the file which announces it, without the suffix.
    """

    def __init__(self, ledger: Ledger, state: Path) -> None:
        self.ledger, self.stage, self.place = ledger, ledger.stage, name_of(state / ledger.file.stem)

    @property
    def outputs(self) -> dict[str, OutputRecord]:
        """The record of every file that the stage wrote, or claimed (size -1), by absolute path."""
        return self._summary.outputs

    @property
    def inputs(self) -> dict[TaskId, Inputs]:
        """What the runs of the stage have read, by the ids of their records."""
        return self._summary.inputs

    @property
    def text_columns(self) -> set[str]:
        """The columns in which the runs of the stage found texts, as far as is known."""
        return {read.text_column for read in self.inputs.values()} - {""}

    @property
    def tags_of_others(self) -> set[str]:
        """The content tags of what the stage has read of other corpora, such as the signatures of an index."""
        found: set[str] = set()
        for read in self.inputs.values():
            files = {name: tag for of in read.files.values() for name, tag in of.items() if tag}
            found |= {files[name] for name in files if any(name.startswith(f"{folder}/") for folder in read.others)}
        return found

    def writes(self, name: str) -> bool:
        """Whether the stage wrote a file of this name."""
        return name in self.outputs and self.outputs[name].size >= 0

    @cached_property
    def is_in_place(self) -> bool:
        """Whether the ledger is whole, and its outputs, in a bucket, are no copies: the largest is looked at."""
        found = ((output.size, name) for name, output in self.outputs.items() if f"/{STATE_DIR}/" not in name)
        size, largest = max(found, default=(-1, ""))
        return size >= 0 and file_info(Path(largest)) == _state(self.outputs[largest]) and not self.ledger.is_damaged

    @cached_property
    def _summary(self) -> Summary:
        return self.ledger.summary()


@dataclass(frozen=True, eq=False)
class Written:
    """What a ledger names, by absolute path; below `link`, where that leads to what the ledger names below `real`."""

    known: KnownLedger
    outputs: dict[str, OutputRecord]
    link: str = ""
    real: str = ""

    def real_name(self, name: str) -> str:
        """The name of an output in the ledger."""
        return self.real + name[len(self.link) :]

    def below(self, folder: str) -> Iterator[tuple[str, OutputRecord]]:
        """The files in a folder, at any depth, that the stage wrote, as a stage that reads the folder may read them.

        So without temporary files, and files of malformed records.
        """
        top = f"{folder.rstrip('/')}/"
        for name in self._names[bisect_left(self._names, top) :]:
            if not name.startswith(top):
                break
            hidden = "/." in name[len(top) - 1 :] or name.endswith(REJECTS_SUFFIX)
            if not hidden and self.outputs[name].size >= 0:
                yield name, self.outputs[name]

    @cached_property
    def _names(self) -> list[str]:
        return sorted(self.outputs)


@dataclass
class FileTags:
    """Content tags of files; each folder is listed once and each ledger is read once. Paths within are absolute.

    `own` has the records of a stage's outputs, as some may be in a folder that is not below its ledger's; that is the
    file `own_ledger`, which is not read again.
    """

    own: dict[str, OutputRecord] = field(default_factory=dict)
    own_ledger: Path | None = None
    _stats: dict[str, dict[str, FileInfo]] = field(default_factory=dict)  # by folder and name
    _folders: dict[str, list[str]] = field(default_factory=dict)  # names of the folders in a folder of a bucket
    _known: dict[Path, list[KnownLedger]] = field(default_factory=dict)  # by state folder
    _states: StateFolders = field(default_factory=StateFolders)
    _written: dict[str, list[Written]] = field(default_factory=dict)  # by folder: of it and its parents
    _hashed: dict[str, str] = field(default_factory=dict)

    def stat(self, path: Path | str) -> FileInfo | None:
        """The file's size and version, from one listing of its folder; None if there is no such file.

        An object that another stage wrote is as its record says until it is fetched.
        """
        name = name_of(path)
        return _state(record) if (record := self._placed(name)) else self.listed(name)

    def listed(self, name: str) -> FileInfo | None:
        """The file's size and version in the listing of its folder, whatever ledgers say; None if it is not there."""
        folder, _, file = name.rpartition("/")
        return self._files_in(folder or "/").get(file)

    def is_placed(self, name: str) -> bool:
        """Whether a file is an object that another stage wrote, and that is in its place as far as ledgers say."""
        return self._placed(name) is not None

    def has_files(self, folder: str) -> bool:
        """Whether there are files directly in a folder that a stage would read."""
        return any(name[0] != "." for name in self._files_in(folder))

    def folders_in(self, folder: str) -> list[str]:
        """The names of the folders directly in a folder, without hidden ones."""
        files = self._files_in(folder)
        names = self._folders[folder] if folder in self._folders else list_names(Path(folder))
        return [name for name in names if name[0] != "." and name not in files]

    def forget(self, folders: Iterable[Path]) -> None:
        """Drop the listings of folders that have been written to."""
        for folder in folders:
            self._stats.pop(name_of(folder), None)

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
        """Those of `paths` that have the recorded size and another modification time: only their hash tells more."""
        names = dict.fromkeys(map(name_of, paths))
        return [Path(name) for name in names if self._is_touched(name)]

    def set_hash(self, path: Path, sha256: str) -> None:
        """Set the SHA-256 of a touched file."""
        self._hashed[str(path)] = sha256

    def differs(self, path: Path) -> bool:
        """Whether a file is there, and is none that a stage of ours wrote under this name; call `touched` before."""
        name = name_of(path)
        records = [record for record in self._all_records(name) if record.size >= 0]
        found = self.stat(name) if records else None
        if found is None or any(matches(found, record) for record in records):
            return False
        return self._hashed.get(name, "") not in (record.sha256 for record in records)

    def ledgers(self, folder: str) -> list[Written]:
        """What the ledgers of a folder and its parents name."""
        if folder not in self._written:
            self._written[folder] = self._read_ledgers(folder)
        return self._written[folder]

    def ledgers_in(self, state: Path) -> list[KnownLedger]:
        """The ledgers in a state folder, without the stage's own."""
        if state not in self._known:
            found = [KnownLedger(ledger, state) for ledger in Ledger.all_in(state) if ledger.file != self.own_ledger]
            self._known[state] = found
        return self._known[state]

    def ledger_at(self, place: str) -> KnownLedger | None:
        """The ledger of a place; see KnownLedger."""
        return next((known for known in self.ledgers_in(Path(place).parent) if known.place == place), None)

    def writer(self, name: str) -> Written | None:
        """What the ledger names whose stage wrote a file, of several the one that fits best."""
        best = self._record(name)
        above = self.ledgers(os.path.dirname(name)) if best else []  # noqa: PTH120
        return next((written for written in above if written.outputs.get(name) is best), None)

    def _files_in(self, folder: str) -> dict[str, FileInfo]:
        if folder not in self._stats and is_remote(folder):
            self._folders[folder], self._stats[folder] = list_level(Path(folder))
        elif folder not in self._stats:
            self._stats[folder] = list_folder(Path(folder))
        return self._stats[folder]

    def _placed(self, name: str) -> OutputRecord | None:
        """The record of an object by the one other stage that wrote it, if its ledger is as that stage left it."""
        if not is_remote(name) or name in self.own:
            return None
        found = [written for written in self.ledgers(os.path.dirname(name)) if name in written.outputs]  # noqa: PTH120
        record = found[0].outputs[name] if len(found) == 1 and found[0].known.is_in_place else None
        return record if record and record.size >= 0 and record.e_tag else None

    def _is_touched(self, name: str) -> bool:
        if not (record := self._record(name)) or name in self._hashed:
            return False
        found = self.stat(name)
        return found is not None and found.size == record.size and not matches(found, record)

    def _record(self, name: str) -> OutputRecord | None:
        """The record of the file by the stage that wrote it, the one that fits best if several stages did."""
        records = self._all_records(name)
        if len(records) > 1 and (found := self.stat(name)):
            records.sort(key=lambda record: (matches(found, record), record.size == found.size), reverse=True)
        return records[0] if records else None

    def _all_records(self, name: str) -> list[OutputRecord]:
        """The records of a file by stages whose ledgers are in a parent folder, or by this one."""
        above = self.ledgers(name.rpartition("/")[0] or "/")
        found = [written.outputs[name] for written in above if name in written.outputs]
        return [*found, self.own[name]] if name in self.own else found

    def _read_ledgers(self, folder: str) -> list[Written]:
        """What the ledgers in `.gristmill` of a folder name, and those of its parents, where there are any."""
        parent = folder if is_top(folder) else os.path.dirname(folder)  # noqa: PTH120
        here = self.ledgers_in(Path(folder, STATE_DIR)) if self._states.may_be_in(Path(folder)) else []
        found = [Written(known, known.outputs) for known in here]
        if not is_remote(folder) and os.path.islink(folder):  # noqa: PTH114
            found += self._behind_link(folder)
        return found + (self.ledgers(parent) if parent != folder else [])

    def _behind_link(self, folder: str) -> list[Written]:
        """What ledgers above the folder to which a link leads name in it, by the paths that files have behind the link.

        Its own ledgers are seen through the link.
        """
        real = os.path.realpath(folder)
        above = self.ledgers(os.path.dirname(real))  # noqa: PTH120
        return [
            Written(
                known,
                {folder + name[len(real) :]: record for name, record in outputs.items() if name.startswith(f"{real}/")},
                folder,
                real,
            )
            for known, outputs in ((written.known, written.outputs) for written in above)
        ]


def is_hash(tag: str) -> bool:
    """Whether a tag is a SHA-256, not the size and time of a file that no stage wrote."""
    return _SIZE_AND_TIME not in tag


def matches(found: FileInfo, record: OutputRecord) -> bool:
    """Whether a file has the size, and the modification time or ETag, that its record gives."""
    return found == _state(record)


def _state(record: OutputRecord) -> FileInfo:
    return FileInfo(record.size, record.mtime_ns, record.e_tag)


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
