"""Where worker processes die: each notes the document that it works on, in memory that outlives it.

    note_place(part.label, row)                    # in a task, before a user's function is given the document
    dead = rows_of_deaths(part.label)              # rows on which earlier attempts at this task died, and how
    if times_suspected(part.label, row): …         # an earlier attempt died here: try documents alone, each noted

A driver whose worker died runs its call again, alone, with what is known so far. A row that was noted as tried alone is
set aside in the next attempt; one that was not is suspected.
"""

import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.context import BaseContext
from typing import Any, NamedTuple

READING = -1  # in place of a row: a slice is read, and no document of it worked on
MAX_DEATHS = 16  # in one call: the function is wrong, and not the documents
_MAX_SUSPECTED = 2  # attempts that end at one place, and at no document tried alone
_HEAD = struct.Struct("<qq?H")  # number of the call, row, whether it is tried alone, bytes of the label
_SLOT = 1024  # bytes for each worker


class CurrentDocument(NamedTuple):
    """A document that a worker works on: slice and row, and whether a function was given it alone."""

    label: str
    row: int
    is_alone: bool = False


@dataclass
class KnownDeaths:
    """The deaths of workers in one call, as far as known: rows on which one died, and places that are suspected."""

    dead: dict[tuple[str, int], str] = field(default_factory=dict)
    suspected: dict[tuple[str, int], int] = field(default_factory=dict)

    def add(self, document: CurrentDocument | None, how: str) -> bool:
        """Add where and how a worker died; return whether another attempt can tell more, or leave the document out."""
        if document is None:
            return False
        at = (document.label, document.row)
        if document.is_alone:
            self.dead[at] = how
            return len(self.dead) <= MAX_DEATHS
        self.suspected[at] = self.suspected.get(at, 0) + 1
        return self.suspected[at] <= _MAX_SUSPECTED


class Journal:
    """Memory that a driver and its workers share, with a slot for the place of each worker."""

    def __init__(self, context: BaseContext, workers: int) -> None:
        self.memory = context.RawArray("c", workers * _SLOT)

    def read(self, slot: int) -> tuple[int, CurrentDocument | None]:
        """Return the number of the call that a worker has begun, and where it was; no place: in no document."""
        data = self.memory[slot * _SLOT : (slot + 1) * _SLOT]
        number, row, is_alone, length = _HEAD.unpack_from(data)
        label = data[_HEAD.size : _HEAD.size + length].decode(errors="replace")
        return number, CurrentDocument(label, row, is_alone) if label else None


class _WorkerState:
    """The state of this worker process: its slot in the journal, and what is known of the call that it runs."""

    def __init__(self) -> None:
        self.memory: Any = None
        self.start = 0
        self.number = 0
        self.known = KnownDeaths()

    def write(self, label: str, row: int, is_alone: bool) -> None:
        name = label.encode()
        if self.memory is None:
            return
        if _HEAD.size + len(name) > _SLOT:
            name = b""
        data = _HEAD.pack(self.number, row, is_alone, len(name)) + name
        self.memory[self.start : self.start + len(data)] = data


_worker = _WorkerState()


def use_journal(journal: Journal, slot: int) -> None:
    """Have this worker process note its places in a slot of `journal`."""
    _worker.memory = journal.memory
    _worker.start = slot * _SLOT


@contextmanager
def known_deaths(number: int, known: KnownDeaths) -> Iterator[None]:
    """Context: this worker runs a call, of this number, of which so much is known."""
    _worker.number = number
    _worker.known = known
    _worker.write("", 0, False)
    yield
    _worker.write("", 0, False)


def note_place(label: str, row: int, is_alone: bool = False) -> None:
    """Note the document that is worked on, or the first of several; `is_alone`: that it alone is to blame."""
    _worker.write(label, row, is_alone)


def note_no_place() -> None:
    """Note that no document is worked on."""
    _worker.write("", 0, False)


def rows_of_deaths(label: str) -> Mapping[int, str]:
    """Return the rows of a slice on which workers died, and how."""
    return {row: how for (name, row), how in _worker.known.dead.items() if name == label}


def times_suspected(label: str, row: int) -> int:
    """Return how many attempts ended when this document, or several from it on, were worked on."""
    return _worker.known.suspected.get((label, row), 0)


def suspected_rows(label: str) -> Mapping[int, int]:
    """Return the rows of a slice at which attempts ended, and how many did."""
    return {row: times for (name, row), times in _worker.known.suspected.items() if name == label}
