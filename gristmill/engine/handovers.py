"""Handovers between stages: what a stage has read of others' outputs, and whether that is what is there now.

A run records in its ledger what it has read of other stages' outputs. From these records a later stage follows its
inputs back, over any number of stages, and refuses them if one of these has not read what is there now. Of a folder
without ledgers, such as a user's, nothing is known, and it is taken as it is.
"""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, NoReturn

from gristmill.engine.inputs.recorded import ledger_folders
from gristmill.engine.records import Ledger, OutputRecord
from gristmill.engine.tags import FileTags, KnownLedger, Written, writer_of
from gristmill.errors import InputError, UsageError
from gristmill.io.corpus_names import CORPUS_SUFFIXES
from gristmill.io.files import STATE_DIR
from gristmill.storage.files import file_info, hash_file, is_folder
from gristmill.storage.names import join, name_of
from gristmill.urls import folders_above

Listed = Mapping[Path, Sequence[Path]]  # the files that were found in input folders


def reject_incomplete(folder: Path, paths: Iterable[Path], tags: FileTags) -> list[KnownLedger]:
    """Raise InputError if the files `paths`, found in an input folder, are not those that stages wrote there.

    One is missing if a ledger in the folder, in a parent, or beside the files names it. One is foreign if no ledger
    names it, and one that is in its folder, or in a parent, names others of the `paths`. Returns the ledgers that name
    files in the folder.
    """
    top, found = name_of(folder), set(map(name_of, paths))
    ledgers = _ledgers_of(top, found, tags)
    missing = {
        name for ledger in ledgers for name, _ in ledger.below(top) if name not in found and not tags.listed(name)
    }
    if missing:
        _raise_missing(folder, sorted(missing))
    owned = {ledger: next(iter(found & ledger.outputs.keys()), "") for ledger in ledgers}
    for name in sorted(found):
        above = tags.ledgers(os.path.dirname(name))  # noqa: PTH120
        if not any(name in ledger.outputs for ledger in above):
            for beside in filter(None, (owned[ledger] for ledger in above)):
                _raise_foreign(folder, Path(name), Path(beside))
    return [ledger.known for ledger, name in owned.items() if name]


def _ledgers_of(folder: str, files: Iterable[str], tags: FileTags) -> list[Written]:
    """The ledgers that may name files of a folder: in it, in its parents, beside the `files`, and of its sources."""
    holders = ledger_folders(folder, set(files), tags)
    return list(dict.fromkeys(ledger for holder in holders for ledger in tags.ledgers(holder)))


def _raise_missing(folder: Path, missing: Sequence[str]) -> NoReturn:
    stage, path = writer_of(Path(missing[0])), missing[0]
    others = f", and {len(missing) - 1:,} more of its files are, too" if missing[1:] else ""
    raise InputError(
        f"{path}, which {stage} wrote, is missing{others}. Run {stage} again, which writes it anew, and then the same "
        f"command. (If it was removed on purpose, with its input: {stage} of the whole input at once, such as `all`, "
        f"forgets it. Without: copy {folder} without {STATE_DIR} to another place, and give that.)"
    )


def _raise_foreign(folder: Path, path: Path, beside: Path) -> NoReturn:
    """`beside` is another file that was found, and that one of the same stages wrote."""
    stage = writer_of(beside)
    for ledger in (ledger for parent in folders_above(path) for ledger in Ledger.all_in(parent / STATE_DIR)):
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


Compare = Callable[[KnownLedger], bool]
_Files = dict[str, tuple[OutputRecord, KnownLedger]]  # the record of a file, and the ledger that holds it, by path


class _Fault(NamedTuple):
    """A stage that has not read what is there now, and what it has not read, in words."""

    ledger: KnownLedger
    words: str
    how: str = "again"


@dataclass
class History:
    """Which stages made the inputs of a run, as ledgers say; each ledger and folder is looked at once.

    `compare`, given a ledger, compares the input folders of that stage itself, and returns whether it did. `column` is
    the text column of the run; '': it reads none, or may read any.
    """

    tags: FileTags
    column: str = ""
    compare: Compare = lambda _: False
    _in_folders: dict[str, _Files] = field(default_factory=dict)
    _found: dict[KnownLedger, tuple[list[KnownLedger], _Fault | None]] = field(default_factory=dict)

    def check_folders(self, listed: Listed) -> None:
        """Raise InputError if folders are not as stages wrote them, or these have not read what is there now."""
        for folder, paths in listed.items():
            self._reject_outdated(folder, reject_incomplete(folder, paths, self.tags))

    def check_files(self, files: Iterable[Path]) -> list[KnownLedger]:
        """The ledgers of the stages by which the files were made, as far as they are known.

        Raises InputError if one of these stages has not read what is there now, or a file that it wrote is gone.
        """
        written = [(path, self.tags.writer(name_of(path))) for path in files]
        for path, stage in ((path, it.known.stage) for path, it in written if it and file_info(path) is None):
            raise InputError(
                f"{path}, which {stage} wrote, is missing. Run {stage} again, which writes it anew, and then the same "
                "command"
            )
        found = (self._reject_outdated(path, [it.known]) for path, it in written if it)
        return list(dict.fromkeys(ledger for ledgers in found for ledger in ledgers))

    def _reject_outdated(self, given: Path, writers: Sequence[KnownLedger]) -> Iterable[KnownLedger]:
        """The same of an input that `writers` name. Of several such stages the first of the pipeline is named."""
        todo = list(writers)
        self._reject_other_column(given, todo)
        direct, seen, fault = set(todo), set(todo), None
        while todo:
            found = [self._sources(ledger) for ledger in todo]
            fault = next((fault for _, fault in found if fault), fault)
            todo = list(dict.fromkeys(source for sources, _ in found for source in sources if source not in seen))
            seen.update(todo)
        if fault:
            stage = fault.ledger.stage
            then = "and then the same command" if fault.ledger in direct else "and the stages after it"
            way = f"it without {STATE_DIR} to another place" if is_folder(given) else "it to another folder"
            raise InputError(
                f"{given} is not up to date: {stage} {fault.words}. Run {stage} {fault.how}, {then}. (If {given} is "
                f"right as it is, copy {way}, and give that.)"
            )
        return seen

    def _reject_other_column(self, given: Path, writers: Sequence[KnownLedger]) -> None:
        """UsageError if the stages nearest to an input that read texts, back from `writers`, had another column."""
        todo, seen = list(writers) if self.column else [], set(writers)
        while todo:
            for ledger in todo:
                if other := min(ledger.text_columns - {self.column}, default=""):
                    raise UsageError(
                        f"--text_column {self.column}: {given} was made by {ledger.stage} with --text_column {other}: "
                        f"give all stages the same. (If {self.column} is meant, copy {given} without {STATE_DIR} to "
                        "another folder, and give that.)"
                    )
            sources = (source for ledger in todo if not ledger.text_columns for source in self._sources(ledger)[0])
            todo = [source for source in dict.fromkeys(sources) if source not in seen]
            seen.update(todo)

    def _sources(self, ledger: KnownLedger) -> tuple[list[KnownLedger], _Fault | None]:
        """The ledgers of the stages whose outputs a stage has read, and what it has not read as it is now."""
        if ledger not in self._found:
            self._found[ledger] = self._find_sources(ledger)
        return self._found[ledger]

    def _find_sources(self, ledger: KnownLedger) -> tuple[list[KnownLedger], _Fault | None]:
        read = _Read.of(ledger, self.tags)
        if self.compare(ledger):
            read = read.without_folders()
        now: _Files = {}
        for name, source in read.writers.items():
            if (record := source.outputs.get(name)) and record.size >= 0:
                now[name] = record, source
        for folder, names in read.folders.items():
            for name, found in self._files_in(folder, names).items():
                if name not in now or found[0].mtime_ns >= now[name][0].mtime_ns:
                    now[name] = found
        writers = {**read.writers, **{name: source for name, (_, source) in now.items()}}
        sources = dict.fromkeys(source for name, source in writers.items() if not read.is_of_others(name))
        return [source for source in sources if source is not ledger], _find_fault(ledger, read, now)

    def _files_in(self, folder: str, names: Iterable[str]) -> _Files:
        """The corpus files in a folder, of which `names` are some, that stages wrote, as the last one wrote each."""
        if folder not in self._in_folders:
            found: _Files = {}
            for ledger in _ledgers_of(folder, names, self.tags):
                for name, record in ledger.below(folder):
                    real = ledger.real_name(name)
                    is_last = real not in found or record.mtime_ns >= found[real][0].mtime_ns
                    if is_last and name.lower().endswith(CORPUS_SUFFIXES):
                        found[real] = record, ledger.known
            self._in_folders[folder] = found
        return self._in_folders[folder]


@dataclass(frozen=True)
class _Read:
    """What all runs of a stage have read: the tags of files, the ledgers that named them, and folders with files.

    Of files in `others`, folders of other corpora, it does not matter whether they are up to date themselves.
    """

    tags: dict[str, set[str]]
    writers: dict[str, KnownLedger]  # where the ledger is still there
    folders: dict[str, list[str]]
    others: set[str]

    @classmethod
    def of(cls, ledger: KnownLedger, tags: FileTags) -> "_Read":
        """Of a ledger. Where that has been moved alone, the paths are those of before."""
        read, writers, folders = defaultdict[str, set[str]](set), dict[str, KnownLedger](), dict[str, list[str]]()
        others = set[str]()
        here, inputs = name_of(ledger.ledger.root), ledger.inputs.values()
        for root, place, files in ((it.root, place, files) for it in inputs for place, files in it.files.items()):
            top = next((top for top in (here, root) if tags.ledger_at(join(top, place))), here)
            source = tags.ledger_at(join(top, place))
            named = {join(top, name): tag for name, tag in files.items()}
            for path, tag in named.items():
                read[path].add(tag)
            if source:
                writers.update(dict.fromkeys(named, source))
        for it in inputs:
            names = [name for files in it.files.values() for name in files]
            for folder in it.folders:
                for top in dict.fromkeys((here, it.root)):
                    at = join(top, folder)
                    below = f"{at.rstrip('/')}/"
                    found = [path for path in (join(top, name) for name in names) if path.startswith(below)]
                    if not writers.keys().isdisjoint(found):
                        folders.setdefault(at, []).extend(found)
                        others.update([at] if folder in it.others else [])
                        break
        return cls(read, writers, folders, others)

    def is_of_others(self, name: str) -> bool:
        return bool(self.others) and any(is_below(name, folder) for folder in self.others)

    def without_folders(self) -> "_Read":
        """What is in none of the folders."""
        inside = {name for names in self.folders.values() for name in names}
        tags = {name: found for name, found in self.tags.items() if name not in inside}
        return _Read(tags, {name: known for name, known in self.writers.items() if name not in inside}, {}, set())


def _find_fault(ledger: KnownLedger, read: _Read, now: _Files) -> _Fault | None:
    """The first file that a stage has not `read` as it is `now`."""
    listed = {""}  # and not read
    faulty = [
        name for name, tags in read.tags.items()
        if (now[name][0].sha256 not in tags if name in now else name in read.writers) and tags != listed
    ]  # fmt: skip
    if name := min(faulty, default=""):
        if name in now:
            return _Fault(ledger, f"has not read {name} as {now[name][1].stage} wrote it last")
        words = f"has read {name}, which {read.writers[name].stage} has removed since"
        return _Fault(ledger, words, "again, of the whole input at once")
    unread = min(now.keys() - read.tags.keys(), default="")
    return _Fault(ledger, f"has not read {unread}, which {now[unread][1].stage} wrote") if unread else None


def is_below(name: str, folder: str) -> bool:
    """Whether a file is in a folder, at any depth."""
    return name.startswith(f"{folder.rstrip('/')}/")
