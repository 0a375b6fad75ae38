"""TaskQueue: the tasks of the running step in a folder that several processes see, and which process runs which.

step.json                    the manifest: which step of which session, and how that ended
SESSION-STEP/tasks.pickle    the calls, as long as the step runs; only those who may write the run's folder can write it
SESSION-STEP/7.0.taken       who runs task 7: one process; if that dies, another one creates 7.1.taken
SESSION-STEP/7.done          its result, pickled as the calls are
SESSION-STEP/7.failed        its error
processes/NAME.json          a heartbeat of each process, and what it does
"""

import io
import os
import pickle
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple

import msgspec

from gristmill.engine.execution.call import Call
from gristmill.engine.execution.staging import TAKEN_OVER
from gristmill.engine.options import TaskShard
from gristmill.errors import GristmillError, OutputError, TakenOver
from gristmill.storage.files import (
    FileInfo,
    create_file,
    list_folder,
    list_names,
    names_ending,
    read_file,
    read_files,
    remove_files,
    remove_folder,
    write_file,
)
from gristmill.storage.local import PARTIAL, flush_later
from gristmill.storage.lock import lease_seconds

_MANIFEST = "step.json"
_CALLS = "tasks.pickle"
_PROCESSES = "processes"
_AT_ONCE = 1000  # results that are read, and calls that are pickled: memory stays that of the plan
_BEATS = 4  # of a process in the time after which it counts as dead
_LOOKING = 10  # pauses last so many times as long as a look: the more files, the fewer looks


class Failure(msgspec.Struct):
    """An error of a task or a session: the name of its class, its message, and the error itself, pickled."""

    kind: str
    message: str
    pickled: bytes = b""

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        """Return the failure for an error that is raised."""
        try:
            return cls(type(error).__name__, str(error), pickle.dumps(error))
        except Exception:  # of a class that cannot be pickled
            return cls(type(error).__name__, str(error))

    def error(self) -> Exception:
        """Return the error, of its own class; GristmillError if it cannot be had."""
        with suppress(Exception):  # another version of a library
            if isinstance(error := pickle.loads(self.pickled), Exception):
                return error
        return GristmillError(f"{self.kind}: {self.message}")


class StepManifest(msgspec.Struct, frozen=True):
    """The step that runs: `step` counts from 1 in each session, which is a run of the process in charge."""

    session: str
    work: str = ""  # the command and its folders, without options that change no byte
    step: int = 0
    tasks: int = 0
    name: str = ""  # of the stage and the step
    state: Literal["working", "finished", "failed"] = "working"
    failure: Failure | None = None
    versions: dict[str, str] = {}  # of code and libraries


class TaskStates(NamedTuple):
    """The tasks of a step that are not simply open, by position: how often each was taken over, done and failed."""

    taken: dict[int, int]
    done: set[int]
    failed: set[int]


class ProcessState(msgspec.Struct):
    """State of a process of a run: its heartbeat for the other processes, its tasks for `gristmill status`."""

    process: int
    host: str
    started: float  # seconds since 1970, by its own clock
    beat: int = 0
    is_in_charge: bool = False
    running: list[str] = []
    tasks_done: int = 0
    retried: int = 0
    core_seconds: float = 0.0  # of its tasks
    own_seconds: float = 0.0  # of the process itself: planning, looking, waiting


class _Beat(NamedTuple):
    info: FileInfo | None  # of a heartbeat's file; None: there is none
    since: float


class Heartbeats:
    """The processes of a run, and which are alive. A process rewrites a file in `folder` as long as it lives.

    No clock of another machine is trusted: a process is dead when this one has seen its file unchanged for
    lease_seconds. One whose file has vanished has ended.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._looked = float("-inf")
        self._beats: dict[str, _Beat] = {}  # by process

    def is_alive(self, name: str) -> bool:
        """Return whether a process may be alive; one that never wrote its file, from when it is asked for."""
        now = self._look()
        return now - self._beats.setdefault(name, _Beat(None, now)).since < lease_seconds()

    def states(self) -> dict[str, ProcessState]:
        """Return the states of the processes by name, also of killed ones."""
        states = {}
        for name in names_ending(self.folder, ".json"):
            for data in read_files([self.folder / name]):
                with suppress(msgspec.DecodeError):
                    states[name.removesuffix(".json")] = msgspec.json.decode(data, type=ProcessState)
        return states

    def clear(self, keep: str) -> None:
        """Remove the files of all processes but one; live ones write theirs again."""
        names = set(list_names(self.folder)) - {f"{keep}.json"}
        remove_files(self.folder / name for name in names)

    def _look(self) -> float:
        """Update what is known of each process if that is old; return the time."""
        now = time.monotonic()
        if now - self._looked > lease_seconds() / _BEATS:
            self._looked = now
            listed = dict[str, FileInfo]()
            for file, info_of_file in list_folder(self.folder).items():
                listed[file.removesuffix(".json")] = info_of_file
            for name in listed.keys() | self._beats.keys():
                before = self._beats.get(name)
                info = listed.get(name)
                if before is None or info != before.info:
                    self._beats[name] = _Beat(info, now if info else float("-inf"))
        return now


class Heartbeat:
    """Context: a thread rewrites the state of this process, called `name`, as long as it lives."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / f"{name}.json"
        self.seconds = lease_seconds() / _BEATS
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
            remove_files([self.path])

    def _beat(self) -> None:
        while not self._ended.wait(self.seconds):
            with suppress(GristmillError, OSError):  # the next beat may succeed
                self._write()

    def _write(self) -> None:
        self.state.beat += 1
        self.state.own_seconds = time.process_time()
        with flush_later():
            write_file(self.path, msgspec.json.encode(self.state))


class TaskQueue:
    """The queue in `folder`, as a process with a name of its own sees it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self.processes = Heartbeats(folder / _PROCESSES)

    def read(self) -> StepManifest | None:
        """Return the manifest, None if there is none."""
        for data in read_files([self.folder / _MANIFEST]):
            with suppress(msgspec.DecodeError):
                return msgspec.json.decode(data, type=StepManifest)
        return None

    def post(self, manifest: StepManifest, calls: Sequence[Call] = (), before: StepManifest | None = None) -> None:
        """Show a manifest, with the tasks of its step. Raises TakenOver if the one `before` is not there any more."""
        if before and self.read() != before:
            raise TakenOver(f"{self.folder}: {TAKEN_OVER}")
        if calls:
            file = io.BytesIO()
            for start in range(0, len(calls), _AT_ONCE):  # for processes with other working folders
                pickle.dump([call.with_absolute_paths() for call in calls[start : start + _AT_ONCE]], file)
            self._write(self.fence(manifest), file.getvalue())
        self._write(self.folder / _MANIFEST, msgspec.json.encode(manifest))

    def load(self, manifest: StepManifest) -> list[Call]:
        """Return the tasks of a step. Raises FileNotFoundError if it is over."""
        file = io.BytesIO(read_file(self.fence(manifest)))
        calls = list[Call]()
        while len(calls) < manifest.tasks:
            calls += pickle.load(file)
        return calls

    def fence(self, manifest: StepManifest) -> Path:
        """Return the file that exists as long as the step runs."""
        return self._step(manifest) / _CALLS

    def remove(self, manifest: StepManifest) -> None:
        """Remove the files of a step, the fence first."""
        remove_files([self.fence(manifest)])
        remove_folder(self._step(manifest))

    def clear(self) -> None:
        """Remove the steps that earlier sessions left, and what killed processes were writing."""
        for name in list_names(self.folder):
            if name.endswith(PARTIAL):
                remove_files([self.folder / name])
            elif name not in (_PROCESSES, _MANIFEST):
                remove_files([self.folder / name / _CALLS])
                remove_folder(self.folder / name)

    def close(self) -> None:
        """Remove what a killed session left, the manifest first: nobody is to help with it."""
        manifest = self.read()
        if manifest and manifest.state == "working":
            remove_files([self.folder / _MANIFEST])
            self.clear()

    def list_states(self, manifest: StepManifest) -> TaskStates:
        """Return the tasks that are taken, done and failed."""
        taken = dict[int, int]()
        ended = {"done": set[int](), "failed": set[int]()}
        for name in list_names(self._step(manifest)):
            position, _, state = name.partition(".")
            times, _, kind = state.partition(".")
            if kind == "taken":
                taken[int(position)] = max(int(times), taken.get(int(position), 0))
            elif state in ended:
                ended[state].add(int(position))
        return TaskStates(taken, ended["done"], ended["failed"])

    def take(self, manifest: StepManifest, position: int, times: int) -> bool:
        """Take a task that was taken so many times before; False if another process was faster.

        Raises FileNotFoundError if the step is over.
        """
        return create_file(self._step(manifest) / f"{position}.{times}.taken", self.name.encode())

    def holder(self, manifest: StepManifest, position: int, times: int) -> str:
        """Return the process that took a task; its position if the process was killed before it wrote its name."""
        data = next(read_files([self._step(manifest) / f"{position}.{times}.taken"]), b"")
        return data.decode() or f"{manifest.session}-{position}.{times}"

    def finish(self, manifest: StepManifest, position: int, result: Any) -> None:
        """Show the result of a task that is done, or its Failure; None: the process in charge has the result."""
        if isinstance(result, Failure):
            self._write(self._step(manifest) / f"{position}.failed", msgspec.json.encode(result))
        else:
            self._write(self._step(manifest) / f"{position}.done", pickle.dumps(result))

    def results(self, manifest: StepManifest, positions: Sequence[int]) -> Iterator[tuple[int, Any]]:
        """Yield the results of tasks that are done. Raises OutputError if the step was removed."""
        for start in range(0, len(positions), _AT_ONCE):
            some = positions[start : start + _AT_ONCE]
            files = list(read_files(self._step(manifest) / f"{position}.done" for position in some))
            if len(files) < len(some):
                raise OutputError(f"{self.folder}: {TAKEN_OVER}")
            for position, data in zip(some, files, strict=True):
                yield position, pickle.loads(data)

    def failure(self, manifest: StepManifest, position: int) -> Failure:
        """Return the failure of a task."""
        return msgspec.json.decode(read_file(self._step(manifest) / f"{position}.failed"), type=Failure)

    def _write(self, path: Path, data: bytes) -> None:
        with flush_later():  # after a power cut a new session begins anyway
            write_file(path, data)

    def _step(self, manifest: StepManifest) -> Path:
        return self.folder / f"{manifest.session}-{manifest.step}"


class OpenTasks:
    """Open tasks of a step, in the order that a process takes them: its own, other processes', dead processes'.

    Each look lists the step's folder once; nothing else grows with the tasks.

    Attributes:
        ended: Positions of the tasks that are done or failed, as far as is known.
        mine: Positions of the tasks that this process runs.
    """

    def __init__(self, queue: TaskQueue, manifest: StepManifest, shard: TaskShard, poll: float) -> None:
        self.queue = queue
        self.manifest = manifest
        self.poll = poll
        self.ended = set[int]()
        self.mine = set[int]()
        own = range(shard.index, manifest.tasks, shard.count)
        others = [position for position in range(manifest.tasks) if position not in own]
        Random(queue.name).shuffle(others)  # so that two processes seldom ask for the same one
        self._open = deque([*own, *others])
        self._taken: dict[int, int] = {}  # by others: how often each was taken over
        self._left: Iterator[tuple[int, int]] = iter(())  # by processes that have died
        self._holders: dict[tuple[int, int], str] = {}
        self._due = float("-inf")

    @property
    def is_over(self) -> bool:
        """Return whether no task is left to run."""
        return len(self.ended) == self.manifest.tasks

    @property
    def is_due(self) -> bool:
        """Return whether it is time to look again."""
        return time.monotonic() >= self._due

    def look(self) -> tuple[list[int], list[int]]:
        """Return the tasks that other processes have done since the last look, and the tasks that have failed there."""
        started = time.monotonic()
        taken, done, failed = self.queue.list_states(self.manifest)
        new = sorted(done - self.ended - self.mine)
        broken = sorted(failed - self.ended - self.mine)
        self.ended.update(new, broken)
        self._taken = {}
        for position, times in taken.items():
            if position not in self.ended and position not in self.mine:
                self._taken[position] = times
        self._left = self._find_left(list(self._taken.items()))
        self._due = time.monotonic() + max(self.poll, _LOOKING * (time.monotonic() - started))
        return new, broken

    def next(self) -> int | None:
        """Take the next task; None if there is none to take now. Raises FileNotFoundError if the step is over."""
        while self._open:
            position = self._open.popleft()
            if position not in self.ended and position not in self._taken and self._take(position, 0):
                return position
        for position, times in self._left:
            if position not in self.ended and self._take(position, times + 1):
                return position
        return None

    def end(self, position: int) -> bool:
        """Count a task of this process as ended; False if it was another process's, too, which was faster."""
        self.mine.discard(position)
        is_first = position not in self.ended
        self.ended.add(position)
        return is_first

    def _take(self, position: int, times: int) -> bool:
        if self.queue.take(self.manifest, position, times):
            self.mine.add(position)
            return True
        self._taken[position] = times
        return False

    def _find_left(self, taken: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        for position, times in taken:
            if (position, times) not in self._holders:
                self._holders[position, times] = self.queue.holder(self.manifest, position, times)
            if not self.queue.processes.is_alive(self._holders[position, times]):
                yield position, times
