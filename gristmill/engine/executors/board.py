"""Board: the tasks of the step that is running, in a folder that several processes see, and who has taken which.

board.json                   the posting: which step of which session, and how it ended
SESSION-STEP/calls.pickle    the tasks, as long as the step runs; only those who may write the run's folder can write it
SESSION-STEP/7.0.taken       who runs task 7: one process; if that dies, another one creates 7.1.taken
SESSION-STEP/7.done          its done record
SESSION-STEP/7.failed        its error
processes/NAME.json          what a process does (see presence.py)
"""

import io
import os
import pickle
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from gristmill.engine.executors.local import Call
from gristmill.engine.executors.presence import Presence
from gristmill.engine.executors.staging import TAKEN_OVER
from gristmill.engine.executors.work import Work
from gristmill.engine.records import DoneRecord
from gristmill.errors import GristmillError, OutputError, TakenOver
from gristmill.storage.files import (
    create_file,
    list_names,
    read_file,
    read_files,
    remove_files,
    remove_folder,
    write_file,
)
from gristmill.storage.local import PARTIAL, flush_later

_POSTING, _CALLS, _PROCESSES = "board.json", "calls.pickle", "processes"
_AT_ONCE = 1000  # done records that are read, and calls that are pickled: memory stays that of the plan


class Failure(msgspec.Struct):
    """An error of a task or a session: the name of its class, its message, and the error itself, pickled."""

    kind: str
    message: str
    pickled: bytes = b""

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        """The failure for an error that is raised."""
        try:
            return cls(type(error).__name__, str(error), pickle.dumps(error))
        except Exception:  # of a class that cannot be pickled
            return cls(type(error).__name__, str(error))

    def error(self) -> Exception:
        """The error, of its own class; GristmillError if it cannot be had."""
        with suppress(Exception):  # another version of a library
            if isinstance(error := pickle.loads(self.pickled), Exception):
                return error
        return GristmillError(f"{self.kind}: {self.message}")


class Spent(msgspec.Struct, frozen=True):
    """What processes that have ended have cost and done."""

    core_seconds: float = 0.0
    tasks: int = 0
    retried: int = 0


class Posting(msgspec.Struct, frozen=True):
    """The state of the work: `step` counts from 1 in each session, which is a run of the process in charge."""

    session: str
    work: Work = Work()
    step: int = 0
    tasks: int = 0
    name: str = ""  # of the stage and the step
    state: Literal["working", "finished", "failed"] = "working"
    failure: Failure | None = None
    spent: Spent = Spent()  # in earlier sessions, and in this one if it has ended
    versions: dict[str, str] = {}  # of code and libraries


class Look(NamedTuple):
    """The tasks of a step that are not simply open, by position: how often each was taken over, done and failed."""

    taken: dict[int, int]
    done: set[int]
    failed: set[int]


class Board:
    """The board in `folder`, as a process with a name of its own sees it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self.processes = Presence(folder / _PROCESSES)

    def read(self) -> Posting | None:
        """The posting, None if there is none."""
        for data in read_files([self.folder / _POSTING]):
            with suppress(msgspec.DecodeError):
                return msgspec.json.decode(data, type=Posting)
        return None

    def post(self, posting: Posting, calls: Sequence[Call] = (), before: Posting | None = None) -> None:
        """Show a posting, with the tasks of its step. Raises OutputError if the one `before` is not there any more."""
        if before and self.read() != before:
            raise TakenOver(f"{self.folder}: {TAKEN_OVER}")
        if calls:
            self._write(self.fence(posting), _pickled(calls))
        self._write(self.folder / _POSTING, msgspec.json.encode(posting))

    def load(self, posting: Posting) -> list[Call]:
        """The tasks of a posting. Raises FileNotFoundError if the step is over."""
        file, calls = io.BytesIO(read_file(self.fence(posting))), list[Call]()
        while len(calls) < posting.tasks:
            calls += pickle.load(file)
        return calls

    def fence(self, posting: Posting) -> Path:
        """The file that is there as long as the step runs."""
        return self._step(posting) / _CALLS

    def forget(self, posting: Posting) -> None:
        """Remove what there is of a posting's step, the fence first."""
        remove_files([self.fence(posting)])
        remove_folder(self._step(posting))

    def clear(self) -> None:
        """Remove the steps that earlier sessions left, and what killed processes were writing."""
        for name in list_names(self.folder):
            if name.endswith(PARTIAL):
                remove_files([self.folder / name])
            elif name not in (_PROCESSES, _POSTING):
                remove_files([self.folder / name / _CALLS])
                remove_folder(self.folder / name)

    def close(self) -> None:
        """Take down what a session left that was killed, the posting first: nobody is to help with it."""
        posting = self.read()
        if posting and posting.state == "working":
            remove_files([self.folder / _POSTING])
            self.clear()

    def look(self, posting: Posting) -> Look:
        """Which tasks are taken, done and failed."""
        taken, ended = dict[int, int](), {"done": set[int](), "failed": set[int]()}
        for name in list_names(self._step(posting)):
            position, _, state = name.partition(".")
            times, _, kind = state.partition(".")
            if kind == "taken":
                taken[int(position)] = max(int(times), taken.get(int(position), 0))
            elif state in ended:
                ended[state].add(int(position))
        return Look(taken, ended["done"], ended["failed"])

    def take(self, posting: Posting, position: int, times: int) -> bool:
        """Take a task that was taken so many times before; False if another process was faster.

        Raises FileNotFoundError if the step is over.
        """
        return create_file(self._step(posting) / f"{position}.{times}.taken", self.name.encode())

    def holder(self, posting: Posting, position: int, times: int) -> str:
        """The process that took a task; its position if the process was killed before it wrote its name."""
        data = next(read_files([self._step(posting) / f"{position}.{times}.taken"]), b"")
        return data.decode() or f"{posting.session}-{position}.{times}"

    def finish(self, posting: Posting, position: int, result: DoneRecord | Failure | None) -> None:
        """Show the record of a task that is done, or its failure; None: the process in charge has the record."""
        state = "failed" if isinstance(result, Failure) else "done"
        self._write(self._step(posting) / f"{position}.{state}", msgspec.json.encode(result) if result else b"")

    def results(self, posting: Posting, positions: Sequence[int]) -> Iterator[tuple[int, DoneRecord]]:
        """The records of tasks that are done. Raises OutputError if the step was removed."""
        for start in range(0, len(positions), _AT_ONCE):
            some = positions[start : start + _AT_ONCE]
            files = list(read_files(self._step(posting) / f"{position}.done" for position in some))
            if len(files) < len(some):
                raise OutputError(f"{self.folder}: {TAKEN_OVER}")
            yield from ((at, msgspec.json.decode(file, type=DoneRecord)) for at, file in zip(some, files, strict=True))

    def failure(self, posting: Posting, position: int) -> Failure:
        """The failure of a task."""
        return msgspec.json.decode(read_file(self._step(posting) / f"{position}.failed"), type=Failure)

    def _write(self, path: Path, data: bytes) -> None:
        with flush_later():  # after a power cut a new session begins anyway
            write_file(path, data)

    def _step(self, posting: Posting) -> Path:
        return self.folder / f"{posting.session}-{posting.step}"


def _pickled(calls: Sequence[Call]) -> bytes:
    """Calls for processes with other working folders, as several pickles."""
    file = io.BytesIO()
    for start in range(0, len(calls), _AT_ONCE):
        pickle.dump([call.with_absolute_paths() for call in calls[start : start + _AT_ONCE]], file)
    return file.getvalue()
