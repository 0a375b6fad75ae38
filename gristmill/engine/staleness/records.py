"""Done records: what a finished task depended on, wrote and counted. Each is a line of JSON after a checksum."""

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gristmill.counts import Counts
from gristmill.paths import join, name_of

TaskId = tuple[str, str]  # step, name of the task; the step is empty for records that are of no task
Records = dict[TaskId, "DoneRecord"]
_Value = TypeVar("_Value")


class OutputRecord(msgspec.Struct, frozen=True):
    """A file that a task wrote; `path` is relative to the folder with `.gristmill` in it.

    `mtime_ns` is 0 for an object, `e_tag` is empty for a local file.
    """

    path: str
    size: int
    mtime_ns: int
    sha256: str
    e_tag: str = ""

    def path_in(self, root: Path) -> Path:
        """Return the absolute path of the file, given that folder."""
        return Path(join(name_of(root), self.path))


class BriefRecord(msgspec.Struct):
    """A DoneRecord without its identity and counts, which few readers need: they are not decoded."""

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
    The first outputs are the declared outputs of the task, in order; files of malformed records follow.
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
    """The done records of a step's tasks, in the order of the tasks; `root` is the folder of the ledger."""

    records: list[DoneRecord]
    root: Path

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

    def joined_values(self, kind: type[_Value]) -> list[_Value]:
        """Return the items of the lists that the tasks returned, each as `kind`."""
        items = list[_Value]()
        for record in self.records:
            for item in record.value:
                items.append(msgspec.convert(item, kind))
        return items

    def paths(self, number: int = 0) -> list[Path]:
        """Return the path of one output of each task, by default of its first."""
        return [record.outputs[number].path_in(self.root) for record in self.records]

    def paths_of_tasks(self) -> list[tuple[Path, ...]]:
        """Return the paths of all files that each task wrote."""
        of_tasks = list[tuple[Path, ...]]()
        for record in self.records:
            of_tasks.append(tuple(output.path_in(self.root) for output in record.outputs))
        return of_tasks

    def sizes(self, number: int = 0) -> list[int]:
        """Return the bytes of one output of each task, by default of its first."""
        return [record.outputs[number].size for record in self.records]


AnyRecord = TypeVar("AnyRecord", DoneRecord, BriefRecord, MadeWith)


def encode_record(record: DoneRecord) -> bytes:
    """Return a record as JSON, after a checksum of 8 digits."""
    data = msgspec.json.encode(record)
    return b"%08x %b" % (zlib.crc32(data), data)


def decode_records(line: bytes, kind: type[AnyRecord]) -> list[AnyRecord]:
    """Return the record of a line; nothing if it is damaged, or of another schema."""
    checksum, _, data = line.partition(b" ")
    try:
        if int(checksum, 16) != zlib.crc32(data):
            return []
        return [msgspec.json.decode(data, type=kind)]
    except (ValueError, RecursionError):
        return []
