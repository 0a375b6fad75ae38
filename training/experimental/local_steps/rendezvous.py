"""Rendezvous: rounds in which replicas that are runs of their own exchange what their local steps changed, as files.

round-00000003/replica-1.rank-0     outer gradients of replica 1, of the shards that its rank 0 updates: plain numbers
round-00000003/replica-1.done       all its ranks have left theirs; the fingerprint of the shared weights before
round-00000003/coming-1             replica 1 has returned, and is on its way to this round
round-00000003/members.json         the replicas whose gradients count, written once
round-00000003/shared.rank-0        shared weights and outer momentum after the round, for those that return

Replicas know of each other by these files alone, each of which appears whole or not at all: one may be killed at any
time. What a replica has left it never writes again, also if it is killed and returns. All average the same files in the
same order, so that they compute the same shared weights, bit for bit. See rendezvous_folder.py for who may take part.
"""

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gristmill.errors import InputError, UsageError, require, wrap_write_errors
from gristmill.storage.local import atomic_write_bytes
from training.distributed.stop_signals import StopSignals
from training.experimental.local_steps.rendezvous_folder import RendezvousFolder, Start, write_once
from training.experimental.local_steps.replicas_config import ReplicasConfig

_MEMBERS = "members.json"
_KEPT = 3  # rounds whose files are left for replicas that are late
_PAUSE = 0.05  # seconds between looks at the folder


@dataclass(frozen=True)
class ReplicaRanks:
    """The ranks of a replica, and this one among them; by default it is alone.

    `main_only` runs an action on rank 0 and shares its result, `sum` adds a tensor up over the ranks, in place.
    """

    rank: int = 0
    size: int = 1
    main_only: Callable[[Callable[[], Any]], Any] = lambda action: action()
    sum: Callable[[Tensor], Tensor] = lambda values: values


class Rendezvous:
    """A replica's rank at the meetings in a folder; every rank calls every method. It leaves at a signal in `stop`."""

    def __init__(self, config: ReplicasConfig, ranks: ReplicaRanks) -> None:
        assert config.folder is not None
        self.config = config
        self.folder = config.folder
        self.ranks = ranks
        self.stop = StopSignals()
        self._entry = RendezvousFolder(config.folder, config.number)

    def join(self, common: Mapping[str, Any], lengths: Mapping[str, Any], start: Start) -> tuple[str, int]:
        """Enter the folder, as RendezvousFolder.join; returns the run's id and the last round with shared weights."""

        def enter() -> tuple[str, int]:
            began = self._entry.join(common, lengths, start)
            if start.round < began.round:
                self._wait_for_shared(began.round)
            if not start.run and (last := self._last()) <= start.round:
                require(
                    (start.round, start.shared) == (began.round, began.shared),
                    f"replica {self.config.number} begins with other weights than those that met in {self.folder} "
                    f"first{f', and they are at round {last}' if last else ''}; give all replicas the same --seed and "
                    "the same --init_from or --branch_from, or try another --replicas.folder",
                )
            return began.run, self._last()

        run, last = self.ranks.main_only(enter)
        return str(run), int(last)

    def close(self) -> None:
        """Let another process be this replica."""
        self._entry.close()

    def last_shared(self, min_round: int = 0) -> int:
        """Return the last round whose shared weights are there; 0 if there is none. InputError below `min_round`."""

        def find() -> int:
            if (last := self._last()) < min_round:
                raise InputError(
                    f"the files of round {min_round} in {self.folder} are gone or damaged, which replica "
                    f"{self.config.number} needs; stop all replicas and start them again, the one with the latest "
                    "checkpoint first"
                )
            return last

        return int(self.ranks.main_only(find))

    def announce(self, number: int) -> None:
        """Say that this replica will come to round `number`, though it was not at the one before."""
        self.ranks.main_only(lambda: self._write(number, f"coming-{self.config.number}", b""))

    def fingerprint(self, tensors: Sequence[Tensor]) -> str:
        """Return a hash of the shared weights and momenta of all ranks, the same on all of them."""
        digest = np.frombuffer(sha256(_flat(tensors).numpy().data).digest(), np.int64).copy()
        return self.ranks.sum(torch.from_numpy(digest)).numpy().tobytes().hex()

    def exchange(self, number: int, gradients: Sequence[Tensor], shared: str) -> list[int] | None:
        """Leave this replica's gradients at round `number`, and replace them by the mean of the members', in place.

        If it had left some there before it was killed, those count. `shared`: the fingerprint of the shared weights
        before. Returns the members; none if the others are rounds ahead by now; None if it was asked to stop. Raises
        UsageError for replicas with other shared weights.
        """
        flat = _flat(gradients)
        name = f"replica-{self.config.number}"
        if not self.ranks.main_only(lambda: self._has_left(number, shared)):
            self._write(number, f"{name}.rank-{self.ranks.rank}", flat.numpy().tobytes())
            self.ranks.sum(torch.zeros(1))  # all have written
            self.ranks.main_only(lambda: self._write(number, f"{name}.done", shared.encode()))
        members: list[int] | None = self.ranks.main_only(lambda: self._close(number, shared))
        if not members:
            return members
        paths = [self._round(number) / f"replica-{member}.rank-{self.ranks.rank}" for member in members]
        if (mean := self._together(lambda: _mean(paths, flat))) is None:
            return []
        _unflatten(mean, gradients)
        return members

    def write_shared(self, number: int, tensors: Sequence[Tensor]) -> None:
        """Leave the shared weights and momenta after round `number`, and remove the files of much earlier ones."""
        self._write(number, f"shared.rank-{self.ranks.rank}", _flat(tensors).numpy().tobytes())
        if self.ranks.rank == 0:
            for each in _numbers(self.folder, "round-"):
                if each <= number - _KEPT:
                    shutil.rmtree(self._round(each), ignore_errors=True)

    def read_shared(self, number: int, tensors: Sequence[Tensor]) -> None:
        """Fill the shared weights and momenta from those after round `number`. Raises InputError without them."""
        path = self._round(number) / f"shared.rank-{self.ranks.rank}"
        like = _flat(tensors)
        if (shared := self._together(lambda: _read(path, like))) is None:
            raise InputError(
                f"the shared weights in {path.parent} are gone or damaged; remove that folder to use the weights of an "
                "earlier round, or of another replica's checkpoint"
            )
        _unflatten(shared, tensors)

    def _has_left(self, number: int, shared: str) -> bool:
        self._require_same_shared(number, shared)
        return (self._round(number) / f"replica-{self.config.number}.done").exists()

    def _close(self, number: int, shared: str) -> list[int] | None:
        """Wait for the replicas that are expected at a round, and agree on its members: the first to decide writes."""
        end = time.monotonic() + self.config.deadline
        path = self._round(number) / _MEMBERS
        expected = set(_read_members(self._round(number - 1) / _MEMBERS) or range(self.config.count))
        while not path.exists():
            there = _numbers(self._round(number), "replica-", ".done")
            if self.config.number not in there:
                return []  # the round was removed while this process was stopped
            if self.stop.received:
                return None
            expected |= _numbers(self._round(number), "coming-")
            if expected <= there or time.monotonic() > end:
                if self._last() >= number:
                    return []
                write_once(path, self.config.number, json.dumps(sorted(there)).encode())
                break
            time.sleep(_PAUSE)
        self._require_same_shared(number, shared)
        return _read_members(path)

    def _require_same_shared(self, number: int, shared: str) -> None:
        """Raise UsageError if a replica that came to a round has other shared weights than this one."""
        others = []
        for each in sorted(_numbers(self._round(number), "replica-", ".done")):
            with suppress(FileNotFoundError):  # removed: this replica is late
                if (self._round(number) / f"replica-{each}.done").read_text() != shared:
                    others.append(str(each))
        if others:
            raise UsageError(
                f"replica {self.config.number} comes to {self._round(number)} with other shared weights than replica "
                f"{', '.join(others)}: they went on from checkpoints that do not belong together, or on other kinds of "
                f"processors; end the one that is wrong, remove {self._round(number)}, and start it with an empty "
                "--out_dir: it takes the others' weights"
            )

    def _wait_for_shared(self, number: int) -> None:
        """Wait until the replica that began the meetings has left its shared weights, which it does at once."""
        end = time.monotonic() + self.config.deadline
        while self._last() < number and time.monotonic() < end and not self.stop.received:
            time.sleep(_PAUSE)

    def _last(self) -> int:
        return max((number for number in _numbers(self.folder, "round-") if self._has_shared(number)), default=0)

    def _has_shared(self, number: int) -> bool:
        return all((self._round(number) / f"shared.rank-{rank}").exists() for rank in range(self.ranks.size))

    def _round(self, number: int) -> Path:
        return self.folder / f"round-{number:08d}"

    def _write(self, number: int, name: str, data: bytes) -> None:
        path = self._round(number) / name
        with wrap_write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write_bytes(path, data)

    def _together(self, read: Callable[[], Tensor]) -> Tensor | None:
        """Return the result of `read`; None if it fails on any rank."""
        values = None
        with suppress(OSError, ValueError):
            values = read()
        failed = self.ranks.sum(torch.tensor(float(values is None)))
        return None if failed.item() else values


def _numbers(folder: Path, before: str, after: str = "") -> set[int]:
    """Return the numbers between `before` and `after` in the names of files in a folder."""
    names = (path.name.removeprefix(before).removesuffix(after) for path in folder.glob(f"{before}*{after}"))
    return {int(name) for name in names if name.isdigit()}


def _read_members(path: Path) -> list[int]:
    """Return the members of a round; none if its files are gone."""
    try:
        members: list[int] = json.loads(path.read_text())
    except FileNotFoundError:
        return []
    return members


def _mean(paths: Sequence[Path], like: Tensor) -> Tensor:
    total = torch.zeros_like(like)
    for path in paths:
        total += _read(path, like)
    return total / len(paths)


def _read(path: Path, like: Tensor) -> Tensor:
    values = torch.from_numpy(np.frombuffer(path.read_bytes(), like.numpy().dtype).copy())
    require(values.shape == like.shape, f"{path} has {len(values)} numbers; expected {len(like)}")
    return values


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors]).cpu()


def _unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    for tensor, values in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(values.view_as(tensor))
