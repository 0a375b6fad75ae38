"""RendezvousFolder: which replicas may meet in a folder: those of one run, each once.

run.json            what the replicas have in common, the id of their run, and the shared weights that they began with
replica-1.lock      locked while replica 1 runs, with its process and the length of its run
entry.lock          locked while a replica looks at these locks
"""

import fcntl
import json
import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gristmill.errors import InputError, OutputError, UsageError, require, wrap_write_errors
from gristmill.storage.local import atomic_write_bytes

_RUN = "run.json"
_LOCK = "replica-{}.lock"
_ENTRY = "entry.lock"


@dataclass(frozen=True)
class Start:
    """The start of a replica: the `run` that its checkpoint is of, or "" for a new replica; the last `round` of its
    shared weights, and their fingerprint.
    """

    run: str = ""
    round: int = 0
    shared: str = ""


class RendezvousFolder:
    """The folder `path` as replica `number` sees it; only its rank 0 calls the methods."""

    def __init__(self, path: Path, number: int) -> None:
        self.path = path
        self.number = number
        self._lock: BinaryIO | None = None

    def join(self, common: Mapping[str, Any], lengths: Mapping[str, Any], start: Start) -> Start:
        """Enter the folder, which is made if need be; returns what its run began with.

        `common`: what all replicas have in common. `lengths`: what all that run at the same time have in common. Raises
        UsageError for a folder or for replicas of something else.
        """
        with wrap_write_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        with self._alone():
            self._lock_number(lengths)
            self._require_lengths(lengths)
        began = Start(start.run or secrets.token_hex(8), start.round, start.shared)
        text = json.dumps({"run": began.run, "round": began.round, "shared": began.shared, "common": common}, indent=2)
        write_once(self.path / _RUN, self.number, text.encode())
        stored = self._read_run()
        given = json.loads(text)["common"]  # as it was written: lists for tuples
        differing = sorted(key for key in {*given, *stored["common"]} if given.get(key) != stored["common"].get(key))
        require(
            not differing,
            f"{self.path} has the meetings of replicas with other options, another number of ranks or other data: "
            f"another {', '.join(differing)}; give all replicas the same, or try another --replicas.folder",
        )
        require(
            start.run in ("", stored["run"]),
            f"{self.path} has the meetings of another run than the checkpoint of replica {self.number}; give the "
            "--replicas.folder that it was saved with, or an empty one to all replicas; with an empty --out_dir it "
            "takes the weights of the replicas that meet there",
        )
        return Start(stored["run"], stored["round"], stored["shared"])

    def close(self) -> None:
        """Let another process be this replica."""
        if self._lock is not None:
            self._lock.close()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Context of one replica at a time: those that look whether others run lock their files for a moment."""
        path = self.path / _ENTRY
        with wrap_write_errors(path), path.open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _lock_number(self, lengths: Mapping[str, Any]) -> None:
        path = self.path / _LOCK.format(self.number)
        with wrap_write_errors(path):
            self._lock = path.open("r+b" if path.exists() else "w+b", buffering=0)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system releases it with the process
            except BlockingIOError as error:
                holder = _holder(self._lock).get("process", "another process")
                self.close()
                raise OutputError(
                    f"replica {self.number} of {self.path} runs already, as {holder}; give each replica "
                    "another --replicas.number"
                ) from error
            self._lock.truncate(0)
            process = f"process {os.getpid()} on {socket.gethostname()}"
            self._lock.write(json.dumps({"process": process, **lengths}).encode())

    def _require_lengths(self, lengths: Mapping[str, Any]) -> None:
        """The replicas that run now have the same learning rates; all together may be made longer."""
        own = self.path / _LOCK.format(self.number)
        for path in sorted({*self.path.glob(_LOCK.format("*"))} - {own}):
            with path.open("rb") as file, suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                continue  # nobody runs as that one
            with path.open("rb") as file:
                theirs = _holder(file)
            for name in lengths.keys() & theirs.keys():
                if theirs[name] != lengths[name]:
                    raise UsageError(
                        f"{name} is {lengths[name]}, and {theirs[name]} in {path.stem} of {self.path}, which runs now: "
                        "their learning rates differ; give all replicas the same, or end all to make them longer"
                    )

    def _read_run(self) -> dict[str, Any]:
        path = self.path / _RUN
        try:
            run: dict[str, Any] = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise InputError(
                f"{path} is gone or damaged; remove {self.path}, stop all replicas and start them again, the one with "
                "the latest checkpoint first: the others take its shared weights"
            ) from error
        return run


def write_once(path: Path, number: int, data: bytes) -> None:
    """Write a file as replica `number`, unless it is there; of several that try at the same time one writes it."""
    own = path.with_name(f"{path.stem}.{number}")
    with wrap_write_errors(own):
        if path.exists():
            return
        atomic_write_bytes(own, data)
        with suppress(FileExistsError):  # another replica was first
            os.link(own, path)
        own.unlink(missing_ok=True)


def _holder(file: BinaryIO) -> dict[str, Any]:
    """Return how the process that locked a file names itself; it may be about to write it, and checks then itself."""
    with suppress(ValueError):
        holder = json.loads(file.read())
        return holder if isinstance(holder, dict) else {}
    return {}
