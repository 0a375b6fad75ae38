"""Ledger: the done records of one run of a stage, by the name of the run.

A worker writes a record after the outputs of its task: `.gristmill/RUN.done/<hash of the task>.json`. At the end of
the run the records are compacted into `.gristmill/RUN.ledger`, a line each. Both are read without trust: what is not
a record is as if it was not there, and its task runs again.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from gristmill.counts import Counts
from gristmill.engine.staleness.records import (
    AnyRecord,
    BriefRecord,
    DoneRecord,
    MadeWith,
    OutputRecord,
    Records,
    TaskId,
    decode_records,
    encode_record,
)
from gristmill.io.files import PART, stage_in
from gristmill.paths import absolute, join, name_of, relative_to
from gristmill.storage.files import (
    list_names,
    locked_file,
    names_ending,
    read_files,
    remove_files,
    remove_partial_files,
    write_file,
    write_unflushed,
)

LEDGER = ".ledger"
_LOOSE = ".done"
_ELSEWHERE = ".ledger-elsewhere"
_LINES: TaskId = ("", "lines")  # the record of the number of lines in the ledger


def run_name(stage: str, label: str = "", part: str = "") -> str:
    """Return the name of a call of a stage, with the label of its output, and the part of the work that it does.

    >>> run_name("to_hash", part="book/0-10"), run_name("filter", "short+200.pickle")
    ('to_hash+book+0-10', 'filter-short%2B200.pickle')
    """
    name = stage
    if label:
        name += f"-{_escaped(label)}"
    if part:
        name += PART + _escaped(part).replace("/", PART)
    return name


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace(PART, "%2B")


class Ledger:
    """The done records of one stage in the state folder `state`; several processes may write records at once."""

    def __init__(self, state: Path, stage: str) -> None:
        state = state.absolute()  # tasks may write records in another working folder
        self.file = state / f"{stage}{LEDGER}"
        self.loose = state / f"{stage}{_LOOSE}"
        self.root = state.parent

    @property
    def stage(self) -> str:
        """Return the name of the stage, without the output and the part of its work."""
        return stage_in(self.file.stem)

    @property
    def containing(self) -> list["Ledger"]:
        """Return the ledgers that calls would have which do all the work that this one is a part of, nearest first."""
        names = self.file.stem.split(PART)
        ledgers = list[Ledger]()
        for end in range(len(names) - 1, 0, -1):
            ledgers.append(Ledger(self.file.parent, PART.join(names[:end])))
        return ledgers

    @property
    def siblings(self) -> list["Ledger"]:
        """Return the ledgers of the other calls that do a part of the same stage's work for the same output."""
        whole = self.file.stem.partition(PART)[0]
        ledgers = list[Ledger]()
        for ledger in Ledger.all_in(self.file.parent):
            if ledger.file != self.file and ledger.file.stem.startswith(f"{whole}{PART}"):
                ledgers.append(ledger)
        return ledgers

    def is_part_of(self, other: "Ledger") -> bool:
        """Return whether the call with this ledger does a part of another one's work."""
        return self.file.stem.startswith(f"{other.file.stem}{PART}")

    @classmethod
    def all_in(cls, state: Path) -> list["Ledger"]:
        """Return the ledgers of stages that keep their state in `state`, or have written to its folder; see announce.

        A stage that has not ended may have loose records alone.
        """
        stages = dict[str, None]()  # in order
        copies = list[Ledger]()
        for name in sorted(list_names(state)):
            if Path(name).suffix in (LEDGER, _LOOSE):
                stages[Path(name).stem] = None
            elif name.endswith(_ELSEWHERE):
                copies.append(cls._copy(state / name))
        return [*(cls(state, stage) for stage in stages), *copies]

    @classmethod
    def _copy(cls, path: Path) -> "Ledger":
        copy = cls(path.parent, path.stem)
        copy.file = path
        return copy

    def announce(self, folders: Iterable[Path]) -> None:
        """Write, in each output folder outside the ledger's own, where the ledger is and which files it names there."""
        root = absolute(self.root)
        others = [folder for folder in map(absolute, folders) if not folder.is_relative_to(root)]
        if not others:
            return
        outputs = sorted(self.outputs().items())
        for folder in others:
            prefix = f"{name_of(folder)}/"
            written = list[OutputRecord]()
            for name, output in outputs:
                if name.startswith(prefix) and output.size >= 0:
                    written.append(msgspec.structs.replace(output, path=name.removeprefix(prefix)))
            self._announce_in(folder, os.path.relpath(root, folder), written)

    def _announce_in(self, folder: Path, root: str, written: list[OutputRecord]) -> None:
        """Write in a folder that the ledger in the folder `root` has written some files there."""
        path = folder / self.file.parent.name / f"{self.file.stem}{_ELSEWHERE}"
        copy = DoneRecord("", "copy", {}, written, Counts({}, []))
        data = root.encode() + b"\n" + encode_record(copy)
        if next(read_files([path]), None) != data:
            with locked_file(self.file.with_suffix(".compacting")):
                remove_partial_files([path])
                write_file(path, data)

    def announced(self, folders: Iterable[Path]) -> set[Path]:
        """Return the files that a ledger of this name and place, which may be gone, announced to be in folders.

        Such as the holdout of a pass2 of which the train set was removed.
        """
        root = name_of(self.root)
        files = set[Path]()
        for folder in folders:
            path = folder / self.file.parent.name / f"{self.file.stem}{_ELSEWHERE}"
            first_line = next(read_files([path]), b"").partition(b"\n")[0]
            relative_root = first_line.decode(errors="replace")
            if relative_root and join(name_of(folder), relative_root) == root:
                files.update(map(Path, Ledger._copy(path).outputs()))
        return files

    def read(self) -> Records:
        """Return the last record of each task."""
        return {record.id: record for record in self._read(DoneRecord) if record.id != _LINES}

    def costs(self) -> list[MadeWith]:
        """Return what each task was made with, and its cost."""
        return [record for record in self._read(MadeWith) if record.step]

    @property
    def is_damaged(self) -> bool:
        """Return whether a line of the ledger is no record, or lines are missing, so that some outputs are unknown."""
        lines = self._lines()
        counted = list[int]()
        for line in lines:
            records = decode_records(line, BriefRecord)
            if not records:
                return True
            for record in records:
                if (record.step, record.task) == _LINES:
                    counted.append(msgspec.json.decode(record.value))
        return counted not in ([], [len(lines)])

    def outputs(self) -> dict[str, OutputRecord]:
        """Return the record of every file that the stage wrote, or was about to write (size -1), by absolute path."""
        root = name_of(self.root)
        outputs = dict[str, OutputRecord]()
        for record in self._read(BriefRecord):
            for output in record.outputs:
                name = join(root, output.path)
                known = outputs.get(name)
                # If two tasks wrote the file, the later record counts.
                if known is None or (output.size >= 0 and output.mtime_ns >= known.mtime_ns):
                    outputs[name] = output
        return outputs

    def outputs_of_its_own(self) -> set[str]:
        """Return the files that this call may remove: no other call of the stage has written them, too."""
        own = set(self.outputs())
        for ledger in self.siblings:
            own -= ledger.outputs().keys()
        return own

    def path(self, output: OutputRecord) -> Path:
        """Return the absolute path of an output."""
        return output.path_in(self.root)

    def relative(self, path: Path | str) -> str:
        """Return the name of an output in a record."""
        return relative_to(name_of(self.root), name_of(path))

    def write(self, record: DoneRecord) -> None:
        """Write the record of a task that has just finished. Raises OutputError if it cannot be written."""
        write_unflushed(self._loose_path(record.id), encode_record(record))  # one that a power cut empties is no record

    def compact(self, own: Iterable[DoneRecord], removed: Iterable[TaskId] = ()) -> None:
        """Move the records of a run that has ended into the ledger, and forget `removed` ones."""
        new = {record.id: record for record in own}
        forgotten = {*removed, _LINES}
        with locked_file(self.file.with_suffix(".compacting")):
            records = {record.id: record for record in self._decode_file(DoneRecord)} | new
            lines = list[bytes]()
            for task, record in sorted(records.items()):
                if task not in forgotten:
                    lines.append(encode_record(record))
            lines.insert(0, encode_record(DoneRecord(*_LINES, {}, [], Counts({}, []), len(lines) + 1)))
            remove_partial_files([self.file])
            write_file(self.file, b"\n".join([*lines, b""]))
        loose = list(map(self._loose_path, (*new, *forgotten)))
        remove_files(loose)
        remove_partial_files(loose)
        with suppress(OSError):  # another process's records are in it, or there is none
            self.loose.rmdir()

    def forget(self, tasks: Iterable[TaskId]) -> None:
        """Remove the records of tasks that have run in this run."""
        remove_files(map(self._loose_path, tasks))

    def _loose_path(self, task: TaskId) -> Path:
        name = hashlib.sha256("\0".join(task).encode()).hexdigest()[:32]
        return self.loose / f"{name}.json"

    def _read(self, kind: type[AnyRecord]) -> Iterator[AnyRecord]:
        """Decode the ledger, then the loose records, which are newer.

        The loose ones are read first: another process may end in between, and move its own into the ledger.
        """
        names = names_ending(self.loose, ".json")
        loose = list(read_files(self.loose / name for name in names))
        yield from self._decode_file(kind)
        for data in loose:
            yield from decode_records(data, kind)

    def _decode_file(self, kind: type[AnyRecord]) -> Iterator[AnyRecord]:
        for line in self._lines():
            yield from decode_records(line, kind)

    def _lines(self) -> list[bytes]:
        lines = next(read_files([self.file]), b"").splitlines()
        if self.file.suffix == _ELSEWHERE:
            return lines[1:]  # the first says where the ledger is
        return lines
