"""Board: the tasks of the step that is running, in a folder that several processes see, and who has taken which.

board.json                   the posting: which step of which session, and how it ended
SESSION-STEP/calls.pickle    the tasks; only those who may write the run's folder can write it
SESSION-STEP/7.taken         who runs task 7, written by one process only
SESSION-STEP/7.done          its done record
SESSION-STEP/7.failed        its error
processes/NAME.json          what a process does, rewritten every few seconds as long as it lives
"""

import os
import pickle
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from gristmill import errors
from gristmill.engine.executors.local import Call
from gristmill.engine.records import DoneRecord
from gristmill.errors import GristmillError
from gristmill.storage.files import (
    create_file,
    list_folder,
    list_names,
    read_file,
    read_files,
    remove_files,
    remove_folder,
    write_file,
)
from gristmill.storage.lease import lease_seconds

_BEATS = 4  # of a process in the time after which it counts as dead


class Failure(msgspec.Struct):
    """An error of a task: the name of its class in errors.py, and its message."""

    kind: str
    message: str

    def error(self) -> GristmillError:
        """The error, of its own class."""
        kind = getattr(errors, self.kind, GristmillError)
        return kind(self.message)


class Posting(msgspec.Struct, frozen=True):
    """The state of the work: `step` counts from 1 in each session, which is a run of the process in charge."""

    session: str
    step: int = 0
    tasks: int = 0
    name: str = ""  # of the stage and the step
    state: Literal["working", "finished", "failed"] = "working"
    failure: Failure | None = None


class ProcessState(msgspec.Struct):
    """What a process of a run does: for others, which see that it lives, and for `gristmill status`."""

    process: int
    host: str
    started: float  # seconds since 1970
    beat: int = 0
    is_in_charge: bool = False
    running: list[str] = []
    tasks_done: int = 0
    retried: int = 0
    core_seconds: float = 0.0


class Board:
    """The board in `folder`, as a process with a name of its own sees it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self._seen: dict[str, tuple[Any, float]] = {}  # of other processes: their last beat, and since when
        self._listed: dict[str, Any] = {}

    def read(self) -> Posting | None:
        """The posting, None if there is none."""
        for data in read_files([self.folder / "board.json"]):
            with suppress(msgspec.DecodeError):
                return msgspec.json.decode(data, type=Posting)
        return None

    def post(self, posting: Posting, calls: Sequence[Call] = ()) -> None:
        """Show a posting, with the tasks of its step."""
        if calls:
            write_file(self._step(posting) / "calls.pickle", pickle.dumps(list(calls)))
        write_file(self.folder / "board.json", msgspec.json.encode(posting))

    def load(self, posting: Posting) -> list[Call]:
        """The tasks of a posting. Raises FileNotFoundError if the step is over."""
        return pickle.loads(read_file(self._step(posting) / "calls.pickle"))

    def forget(self, posting: Posting) -> None:
        """Remove what there is of a posting's step."""
        remove_folder(self._step(posting))

    def clear_steps(self) -> None:
        """Remove the steps that earlier sessions left."""
        for name in list_names(self.folder):
            if name not in ("processes", "board.json"):
                remove_folder(self.folder / name)

    def look(self, posting: Posting) -> dict[int, str]:
        """The state of the tasks that are not simply open: taken, done or failed, by position."""
        order = {"taken": 0, "failed": 1, "done": 2}
        found: dict[int, str] = {}
        for name in list_folder(self._step(posting)):
            position, _, state = name.partition(".")
            if state in order and order[state] >= order[found.get(int(position), "taken")]:
                found[int(position)] = state
        return found

    def take(self, posting: Posting, position: int, is_left: bool) -> bool:
        """Take a task, also from a process that `is_left` says is dead; False if another one was faster."""
        path = self._step(posting) / f"{position}.taken"
        if is_left:
            write_file(path, self.name.encode())
            return True
        return create_file(path, self.name.encode())

    def is_left(self, posting: Posting, position: int) -> bool:
        """Whether the process that took a task has not been alive for as long as this one has looked."""
        holder = next(read_files([self._step(posting) / f"{position}.taken"]), b"").decode()
        return holder != self.name and not self.is_alive(holder)

    def is_alive(self, name: str) -> bool:
        """Whether a process has been seen to beat within the last lease_seconds, or not been watched for so long."""
        now = time.monotonic()
        if now - self._seen.get("", (None, 0.0))[1] > lease_seconds() / _BEATS:
            self._seen[""] = (None, now)
            self._listed = dict(list_folder(self.folder / "processes"))
        beat, since = self._seen.get(name, (0, 0.0))
        if beat != self._listed.get(f"{name}.json"):
            self._seen[name] = (self._listed.get(f"{name}.json"), now)
            return True
        return now - since < lease_seconds()

    def finish(self, posting: Posting, position: int, result: DoneRecord | Failure) -> None:
        """Show the record of a task that is done, or its failure."""
        state = "failed" if isinstance(result, Failure) else "done"
        write_file(self._step(posting) / f"{position}.{state}", msgspec.json.encode(result))

    def results(self, posting: Posting, positions: Iterable[int]) -> dict[int, DoneRecord]:
        """The records of tasks that are done."""
        positions = list(positions)
        files = read_files(self._step(posting) / f"{position}.done" for position in positions)
        return {at: msgspec.json.decode(data, type=DoneRecord) for at, data in zip(positions, files, strict=True)}

    def failure(self, posting: Posting, position: int) -> Failure:
        """The failure of a task."""
        return msgspec.json.decode(read_file(self._step(posting) / f"{position}.failed"), type=Failure)

    def processes(self) -> dict[str, ProcessState]:
        """What the processes do, by name, those that died without a word included."""
        names = [name for name in list_folder(self.folder / "processes") if name.endswith(".json")]
        files = read_files(self.folder / "processes" / name for name in names)
        states = (msgspec.json.decode(data, type=ProcessState) for data in files)
        return dict(zip((name.removesuffix(".json") for name in names), states, strict=False))

    def _step(self, posting: Posting) -> Path:
        return self.folder / f"{posting.session}-{posting.step}"


class Heartbeat:
    """Context: a thread rewrites this process's state on the board, as long as the process lives."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.state = ProcessState(os.getpid(), socket.gethostname(), time.time())
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> ProcessState:
        self._write()
        self._thread.start()
        return self.state

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        with suppress(GristmillError, OSError):
            remove_files([self._path])

    @property
    def _path(self) -> Path:
        return self.board.folder / "processes" / f"{self.board.name}.json"

    def _beat(self) -> None:
        while not self._ended.wait(lease_seconds() / _BEATS):
            with suppress(GristmillError, OSError):  # the next beat may succeed
                self._write()

    def _write(self) -> None:
        self.state.beat += 1
        write_file(self._path, msgspec.json.encode(self.state))
