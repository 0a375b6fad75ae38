"""Presence: which processes work on one board, what each does, and whether it lives.

A process rewrites processes/NAME.json every few seconds as long as it lives, and removes it when it ends. No clock of
another machine is trusted: a process counts as dead when this one has seen its file unchanged for lease_seconds.
"""

import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from gristmill.errors import GristmillError
from gristmill.storage.files import FileInfo, list_folder, list_names, read_files, remove_files, write_file
from gristmill.storage.lease import lease_seconds
from gristmill.storage.local import flush_later

_BEATS = 4  # of a process in the time after which it counts as dead
_JSON = ".json"


class ProcessState(msgspec.Struct):
    """What a process of a run does: for others, which see that it lives, and for `gristmill status`."""

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


class Presence:
    """The processes in `folder`, as this process watches them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._looked = float("-inf")
        self._beats: dict[str, tuple[FileInfo, float]] = {}  # by file: what was seen last, and since when
        self._gone: set[str] = set()  # files that were there
        self._beaten: set[str] = set()  # files that have changed meanwhile
        self._asked: dict[str, float] = {}  # names that were never seen, and since when they are asked for

    def is_alive(self, name: str) -> bool:
        """Whether a process may be alive: it is until it has been watched for lease_seconds without a beat.

        One whose file has vanished has ended.
        """
        now, file = time.monotonic(), f"{name}{_JSON}"
        if now - self._looked > lease_seconds() / _BEATS:
            self._look(now)
        if file in self._beats:
            return now - self._beats[file][1] < lease_seconds()
        return file not in self._gone and now - self._asked.setdefault(name, now) < lease_seconds()

    def has_beaten(self, name: str) -> bool:
        """Whether a process has shown a sign of life since this one watches it: it was alive a moment ago."""
        self.is_alive(name)
        return f"{name}{_JSON}" in self._beaten

    def states(self) -> dict[str, ProcessState]:
        """What the processes do, by name, those that died without a word included."""
        found = {}
        for name in sorted(name for name in list_names(self.folder) if name.endswith(_JSON)):
            for data in read_files([self.folder / name]):
                with suppress(msgspec.DecodeError):
                    found[name.removesuffix(_JSON)] = msgspec.json.decode(data, type=ProcessState)
        return found

    def clear(self, keep: str) -> None:
        """Remove the files of all processes but one; those that live write theirs again."""
        remove_files(self.folder / name for name in list_names(self.folder) if name != f"{keep}{_JSON}")

    def _look(self, now: float) -> None:
        listed = list_folder(self.folder)
        self._gone = (self._gone | self._beats.keys()) - listed.keys()
        before, self._beats = self._beats, {}
        for file, info in listed.items():
            seen = before.get(file)
            self._beats[file] = seen if seen and seen[0] == info else (info, now)
            if seen and seen[0] != info:
                self._beaten.add(file)
        self._looked = now


class Heartbeat:
    """Context: a thread rewrites the state of this process, called `name`, as long as it lives."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path, self.seconds = folder / f"{name}{_JSON}", lease_seconds() / _BEATS
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
