"""Done records, one a finished task, and the ledger of those of a stage.

A worker writes a record after the outputs of its task: `.gristmill/STAGE.done/<hash of the task>.json`. At the end of
a stage the records are compacted into `.gristmill/STAGE.ledger`, a line each. Both are read without trust: what is not
a record is as if it was not there, and its task runs again.
"""

import hashlib
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gristmill.counts import Counts
from gristmill.io.files import PART, stage_in
from gristmill.paths import absolute, join, name_of, relative_to
from gristmill.storage.files import (
    list_names,
    locked_file,
    read_files,
    remove_files,
    remove_folder,
    remove_partial_files,
    write_file,
    write_unflushed,
)

READS = "", "reads"  # the record of the inputs: see outputs.py
READS_OF_PARTS = "", "reads of parts"  # those of all parts whose records were taken over: "input 0 of 3"
CLAIMS = "claims"  # begins the names of records of outputs that are about to be written
LEDGER = ".ledger"
_LOOSE = ".done"
_ELSEWHERE = ".ledger-elsewhere"

TaskId = tuple[str, str]  # step, name of the task
_LINES: TaskId = ("", "lines")  # the record of the number of lines in the ledger
_REPLACED: TaskId = ("", f"{CLAIMS}: parts")  # the outputs of records that others replaced


class OutputRecord(msgspec.Struct, frozen=True):
    """A file that a task wrote; `path` is relative to the folder with `.gristmill` in it.

    `mtime_ns` is 0 for an object, `e_tag` is empty for a local file.
    """

    path: str
    size: int
    mtime_ns: int
    sha256: str
    e_tag: str = ""


_Value = TypeVar("_Value")


class BriefRecord(msgspec.Struct):
    """A DoneRecord without its identity and counts, which most readers do not need: they are not decoded."""

    outputs: list[OutputRecord]
    step: str = ""
    task: str = ""
    value: msgspec.Raw = msgspec.Raw(b"null")
    core_seconds: float = 0.0
    retries: int = 0


class MadeWith(msgspec.Struct):
    """A DoneRecord without its outputs and counts: what a task was made with, and what it cost."""

    identity: dict[str, str]
    step: str = ""
    task: str = ""
    core_seconds: float = 0.0
    retries: int = 0


class DoneRecord(msgspec.Struct):
    """A finished task: all that its outputs depend on (see identify), its outputs, its counts, and its value.

    `core_seconds` is the processor time that the worker spent on it, with processes that it started for it; `retries`
    how often storage made it begin anew.
    The first outputs are those that the task declares, in order; files of malformed records follow.
    """

    step: str
    task: str
    identity: dict[str, str]
    outputs: list[OutputRecord]
    counts: Counts
    value: Any = None
    core_seconds: float = 0.0
    retries: int = 0

    @property
    def id(self) -> TaskId:
        """Return the step and the name of the task."""
        return self.step, self.task


@dataclass(frozen=True)
class StepResult:
    """The done records of a step's tasks, in the order of the tasks."""

    records: list[DoneRecord]

    @property
    def counts(self) -> Counts:
        """Return the counts of all tasks."""
        total = Counts({}, [])
        for record in self.records:
            total.merge(record.counts)
        return total

    def values(self, kind: type[_Value]) -> list[_Value]:
        """Return the value that each task returned, as `kind`."""
        return [msgspec.convert(record.value, kind) for record in self.records]


_Record = TypeVar("_Record", DoneRecord, BriefRecord, MadeWith)


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
        """Return the name of the stage, without that of its output and of the part of its work."""
        return stage_in(self.file.stem)

    @property
    def parts(self) -> list["Ledger"]:
        """Return the ledgers of calls that did parts of this one's work."""
        prefix = f"{self.file.stem}{PART}"
        return [ledger for ledger in Ledger.all_in(self.file.parent) if ledger.file.stem.startswith(prefix)]

    @property
    def wholes(self) -> list["Ledger"]:
        """Return the ledgers of calls that this one's work is a part of, the nearest first."""
        names = self.file.stem.split(PART)
        wholes = list[Ledger]()
        for end in range(len(names) - 1, 0, -1):
            wholes.append(Ledger(self.file.parent, PART.join(names[:end])))
        return wholes

    @property
    def others(self) -> list["Ledger"]:
        """Return the ledgers of all other calls of the same stage with the same output."""
        wholes = self.wholes
        top = wholes[-1] if wholes else self
        return [ledger for ledger in (top, *top.parts) if ledger.file != self.file]

    def take_over(self, part: str = "") -> None:
        """Move the records of calls for parts of this work here, and those of its tasks from a call for all of it.

        The tasks of `part`, such as a data set, have names that begin with it.
        """
        for whole in self.wholes:
            own_tasks = list[DoneRecord]()
            for record in whole._read(DoneRecord):
                if record.step and record.task.startswith(f"{part}/"):
                    own_tasks.append(record)
            if own_tasks:
                self._add([*own_tasks, *self._read(DoneRecord)])
                whole.compact((), {record.id for record in own_tasks})
        parts = [ledger for ledger in self.parts if ledger.file.suffix == LEDGER]
        if parts:
            self._take_over_parts(parts)

    def _take_over_parts(self, parts: Sequence["Ledger"]) -> None:
        """Move the records of calls for parts of this work here; their inputs become one record."""
        own = list(self._read(DoneRecord))
        of_parts = list[DoneRecord]()
        for ledger in parts:
            of_parts += ledger._read(DoneRecord)
        reads = [record for record in own if record.id == READS_OF_PARTS]
        reads += [record for record in of_parts if record.id == READS]
        inputs = dict[tuple[str, str], None]()  # in order
        for record in reads:
            for key, names in record.identity.items():
                inputs[key.partition(" of ")[0], names] = None
        identity = {f"{key} of {number}": names for number, (key, names) in enumerate(inputs)}
        kept = [record for record in of_parts if record.step or record.task.startswith(CLAIMS)]
        self._add([*own, *kept, DoneRecord(*READS_OF_PARTS, identity, [], Counts({}, []))])
        for ledger in parts:
            remove_folder(ledger.loose)
            remove_folder(ledger.file.with_suffix(".work"))
        remove_files(ledger.file for ledger in parts)

    def _add(self, added: Sequence[DoneRecord]) -> None:
        """Write the last record of each task; the files that only earlier ones name stay claimed."""
        records = {record.id: record for record in added if record.id != _LINES}
        replaced = set[str]()  # names of files
        for record in added:
            if records.get(record.id) is not record or record.id == _REPLACED:
                replaced.update(output.path for output in record.outputs)
        if replaced:
            outputs = [OutputRecord(name, -1, 0, "") for name in sorted(replaced)]
            records[_REPLACED] = DoneRecord(*_REPLACED, {}, outputs, Counts({}, []))
        self.compact(records.values())

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
        outputs = sorted(self.outputs().items()) if others else []
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
        of_parts = list[Path]()  # which were taken over
        for name in list_names(path.parent):
            if name.startswith(f"{self.file.stem}{PART}") and name.endswith(_ELSEWHERE):
                of_parts.append(path.parent / name)
        remove_files(of_parts)
        copy = DoneRecord("", "copy", {}, written, Counts({}, []))
        data = root.encode() + b"\n" + _encode(copy)
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

    def read(self) -> dict[TaskId, DoneRecord]:
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
            records = _decode(line, BriefRecord)
            if not records:
                return True
            for record in records:
                if (record.step, record.task) == _LINES:
                    counted.append(msgspec.json.decode(record.value))
        return counted not in ([], [len(lines)])

    def outputs(self) -> dict[str, OutputRecord]:
        """Return the record of every file that the stage wrote, or claimed (size -1), by absolute path."""
        root = name_of(self.root)
        outputs = dict[str, OutputRecord]()
        for record in self._read(BriefRecord):
            for output in record.outputs:
                name = join(root, output.path)
                known = outputs.get(name)
                # Of two tasks, such as of two shares of a corpus, that which wrote the file last has its record.
                if known is None or (output.size >= 0 and output.mtime_ns >= known.mtime_ns):
                    outputs[name] = output
        return outputs

    def outputs_of_its_own(self) -> set[str]:
        """Return the files that this call may remove: no other call of the stage has written them, too."""
        own = set(self.outputs())
        for ledger in self.others:
            own -= ledger.outputs().keys()
        return own

    def path(self, output: OutputRecord) -> Path:
        """Return the absolute path of an output."""
        return Path(join(name_of(self.root), output.path))

    def relative(self, path: Path | str) -> str:
        """Return the name of an output in a record."""
        return relative_to(name_of(self.root), name_of(path))

    def write(self, record: DoneRecord) -> None:
        """Write the record of a task that has just finished. Raises OutputError if it cannot be written."""
        write_unflushed(self._loose_path(record.id), _encode(record))  # one that a power cut empties is no record

    def compact(self, own: Iterable[DoneRecord], removed: Iterable[TaskId] = ()) -> None:
        """Move the records of a run that has ended into the ledger, and forget `removed` ones."""
        new = {record.id: record for record in own}
        forgotten = {*removed, _LINES}
        with locked_file(self.file.with_suffix(".compacting")):
            records = {record.id: record for record in self._decode_file(DoneRecord)} | new
            lines = [_encode(record) for task, record in sorted(records.items()) if task not in forgotten]
            lines.insert(0, _encode(DoneRecord(*_LINES, {}, [], Counts({}, []), len(lines) + 1)))
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

    def _read(self, kind: type[_Record]) -> Iterator[_Record]:
        """Decode the ledger, then the loose records, which are newer.

        The loose ones are read first: another process may end in between, and move its own into the ledger.
        """
        names = sorted(name for name in list_names(self.loose) if name.endswith(".json"))
        loose = list(read_files(self.loose / name for name in names))
        yield from self._decode_file(kind)
        for data in loose:
            yield from _decode(data, kind)

    def _decode_file(self, kind: type[_Record]) -> Iterator[_Record]:
        for line in self._lines():
            yield from _decode(line, kind)

    def _lines(self) -> list[bytes]:
        lines = next(read_files([self.file]), b"").splitlines()
        return lines[1:] if self.file.suffix == _ELSEWHERE else lines  # the first says where the ledger is


def _encode(record: DoneRecord) -> bytes:
    """Return a record as JSON, after a checksum of 8 digits."""
    data = msgspec.json.encode(record)
    return b"%08x %b" % (zlib.crc32(data), data)


def _decode(line: bytes, kind: type[_Record]) -> list[_Record]:
    """Return the record of a line; nothing if it is damaged, or of another schema."""
    checksum, _, data = line.partition(b" ")
    try:
        if int(checksum, 16) != zlib.crc32(data):
            return []
        return [msgspec.json.decode(data, type=kind)]
    except (ValueError, RecursionError):
        return []
