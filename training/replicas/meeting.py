"""Meeting: the folder in which replicas that are runs of their own exchange what their local steps changed.

round-00000003/replica-1.rank-0     outer gradients of replica 1, of the shards that its rank 0 updates: plain numbers
round-00000003/coming-1             replica 1 has returned, and is on its way to this round
round-00000003/members.json         the replicas whose gradients count, written once
round-00000003/shared.rank-0        shared weights and outer momentum after the round, for those that return

Replicas know of each other by these files alone, each of which appears whole or not at all: one may be killed at any
time. All average the same files in the same order, so that they compute the same shared weights, bit for bit.
"""

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gristmill.errors import UsageError, wrap_write_errors
from gristmill.storage.local import atomic_write_bytes
from training.replicas.meeting_config import MeetingConfig

_MEMBERS, _RUN = "members.json", "run.json"
_NAME = re.compile(r"replica-(\d+)\.rank-\d+")
_KEPT = 3  # rounds whose files are left for replicas that are late
_PAUSE = 0.05  # seconds between looks at the folder


class Meeting:
    """A replica's rank at the meetings in a folder. `main_only` runs an action on rank 0 of `ranks` and shares it."""

    def __init__(
        self, config: MeetingConfig, rank: int, ranks: int, main_only: Callable[[Callable[[], Any]], Any]
    ) -> None:
        assert config.folder is not None
        self.config, self.folder, self.rank, self.ranks, self._main_only = config, config.folder, rank, ranks, main_only

    def join(self, run: str) -> None:
        """Make the folder, of the run that `run` identifies. Raises UsageError if it is that of another one."""

        def check() -> None:
            with wrap_write_errors(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                if not (self.folder / _RUN).exists():
                    atomic_write_bytes(self.folder / _RUN, run.encode())
            if (self.folder / _RUN).read_text() != run:
                raise UsageError(
                    f"{self.folder} has the meetings of replicas with other options, another number of ranks or other "
                    "data; give all replicas the same, or try another --replicas.folder"
                )

        self._main_only(check)

    def last_shared(self) -> int:
        """The last round whose shared weights are there; 0 if there is none."""

        def find() -> int:
            found = sorted(self.folder.glob("round-*"), reverse=True)
            return next((int(path.name[6:]) for path in found if self._has_shared(path)), 0)

        return int(self._main_only(find))

    def announce(self, number: int) -> None:
        """Say that this replica will come to round `number`, though it was not at the one before."""
        self._main_only(lambda: self._write(number, f"coming-{self.config.number}", b""))

    def exchange(self, number: int, gradients: Sequence[Tensor]) -> list[int]:
        """Leave this replica's gradients at round `number`, and replace them by the mean of the members', in place.

        Returns the members.
        """
        flat = torch.cat([gradient.detach().flatten() for gradient in gradients]).cpu()
        self._write(number, f"replica-{self.config.number}.rank-{self.rank}", flat.numpy().tobytes())
        members: list[int] = self._main_only(lambda: self._close(number))
        total = torch.zeros_like(flat)
        for member in members:
            total += self._read(self._round(number) / f"replica-{member}.rank-{self.rank}", flat)
        _unflatten(total / len(members), gradients)
        return members

    def write_shared(self, number: int, tensors: Sequence[Tensor]) -> None:
        """Leave the shared weights and momenta after round `number`, and remove the files of much earlier ones."""
        flat = torch.cat([tensor.flatten() for tensor in tensors]).cpu()
        self._write(number, f"shared.rank-{self.rank}", flat.numpy().tobytes())
        if self.rank == 0:
            for path in self.folder.glob("round-*"):
                if int(path.name[6:]) <= number - _KEPT:
                    shutil.rmtree(path, ignore_errors=True)

    def read_shared(self, number: int, tensors: Sequence[Tensor]) -> None:
        """Fill the shared weights and momenta from those after round `number`."""
        like = torch.cat([tensor.flatten() for tensor in tensors]).cpu()
        _unflatten(self._read(self._round(number) / f"shared.rank-{self.rank}", like), tensors)

    def _close(self, number: int) -> list[int]:
        """Wait for the replicas that are expected at a round, and agree on its members: the first to decide writes."""
        end = time.monotonic() + self.config.deadline
        expected = self._expected(number)
        while not (self._round(number) / _MEMBERS).exists():
            there = self._there(number)
            expected |= self._coming(number)
            if expected <= there or time.monotonic() > end:
                self._write_members(number, sorted(there))
                break
            time.sleep(_PAUSE)
        members: list[int] = json.loads((self._round(number) / _MEMBERS).read_text())
        return members

    def _write_members(self, number: int, members: list[int]) -> None:
        own = self._round(number) / f"members.{self.config.number}"
        with wrap_write_errors(own):
            atomic_write_bytes(own, json.dumps(members).encode())
            with suppress(FileExistsError):  # another replica was first
                os.link(own, self._round(number) / _MEMBERS)

    def _expected(self, number: int) -> set[int]:
        before = self._round(number - 1) / _MEMBERS
        if number == 1 or not before.exists():
            return set(range(self.config.count))
        return set(json.loads(before.read_text()))

    def _there(self, number: int) -> set[int]:
        """The replicas all of whose ranks have left their gradients."""
        found = [_NAME.fullmatch(path.name) for path in self._round(number).glob("replica-*")]
        numbers = [int(name[1]) for name in found if name]  # the others are being written
        return {number for number in numbers if numbers.count(number) == self.ranks}

    def _coming(self, number: int) -> set[int]:
        return {int(path.name[7:]) for path in self._round(number).glob("coming-*") if path.name[7:].isdigit()}

    def _has_shared(self, path: Path) -> bool:
        return all((path / f"shared.rank-{rank}").exists() for rank in range(self.ranks))

    def _round(self, number: int) -> Path:
        return self.folder / f"round-{number:08d}"

    def _write(self, number: int, name: str, data: bytes) -> None:
        path = self._round(number) / name
        with wrap_write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write_bytes(path, data)

    def _read(self, path: Path, like: Tensor) -> Tensor:
        values = torch.from_numpy(np.frombuffer(path.read_bytes(), like.numpy().dtype).copy())
        assert values.shape == like.shape, f"{path} has {len(values)} numbers, wanted {len(like)}"
        return values


def _unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    for tensor, values in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(values.view_as(tensor))
