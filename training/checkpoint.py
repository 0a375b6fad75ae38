"""Checkpoints: whole or not there, independent of the layout, the latest few kept.

checkpoints/latest             the name of the one to go on from
checkpoints/step-00000200/     torch's distributed checkpoint: parameters and optimizer state by name
    record.json                step, model, tokenizer, and the SHA-256 of every other file in here
checkpoints/….partial          one that was being written when the run ended; never read
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from pipeline.errors import InputError, OutputError, writing
from pipeline.files import partial_path, sha256_file, write_whole
from pipeline.tokens import TokenizerRecord
from training.mesh import World

RECORD = "record.json"
LATEST = "latest"
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)  # one key a tensor: any layout can read it


class CheckpointRecord(msgspec.Struct, forbid_unknown_fields=True):
    """What a checkpoint says of itself. `step`: how many steps were done."""

    step: int
    processes: int
    unigram_loss: float
    model: dict[str, Any]
    tokenizer: TokenizerRecord
    files: dict[str, str] = {}
    version: int = 1


@dataclass
class Checkpoints:
    """The checkpoints in `folder`, of which `keep` are kept; `say` tells the user what happens to them."""

    folder: Path
    keep: int
    world: World
    say: Callable[[str], None]

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def save(self, record: CheckpointRecord, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
        """Write a checkpoint; every rank calls it. Raises OutputError where it cannot be written."""
        final = self.path(record.step)
        temporary = partial_path(final)
        self.world.main_only(lambda: _remove(temporary))
        _save_state(_state(model, optimizer), temporary)
        record.files = self._hashes(temporary)
        self.world.main_only(lambda: self._publish(record, temporary, final))
        return final

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> CheckpointRecord | None:
        """Load the latest whole checkpoint into `model` and `optimizer`; None where none was ever finished.

        One that is damaged is passed over, and said so. Raises InputError where all are.
        """
        candidates = self._candidates()
        for path in candidates:
            record, fault = self._check(path)
            if record is not None:
                state = _state(model, optimizer)
                dcp.load(state, checkpoint_id=path)
                set_state_dict(
                    model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"], options=_OPTIONS
                )
                return record
            self.say(f"checkpoint {path.name} is damaged ({fault}): trying the one before it")
        if candidates:
            raise InputError(f"every checkpoint in {self.folder} is damaged; remove that folder to begin again")
        return None

    def _publish(self, record: CheckpointRecord, temporary: Path, final: Path) -> None:
        write_whole(temporary / RECORD, msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
        _remove(final)  # a damaged or later one, when the run went on from an earlier one
        with writing(final):
            temporary.replace(final)
        write_whole(self.folder / LATEST, final.name.encode())
        for old in sorted(self.folder.glob("step-*[0-9]"))[: -self.keep]:
            if old != final:
                _remove(old)

    def _candidates(self) -> list[Path]:
        """Finished checkpoints, the one that `latest` names first, then earlier ones; the same on all ranks."""
        return self.world.main_only(self._finished)

    def _finished(self) -> list[Path]:
        for partial in self.folder.glob("step-*.partial"):
            self.say(f"checkpoint {partial.stem} was never finished: passing it over")
        found = sorted(self.folder.glob("step-*[0-9]"), reverse=True)
        latest = self.folder / LATEST
        name = latest.read_text().strip() if latest.is_file() else ""
        return [path for path in found if path.name <= name] if self.folder / name in found else found

    def _check(self, path: Path) -> tuple[CheckpointRecord | None, str]:
        """The record of a checkpoint whose files are what it says, or None and why; each rank reads a part."""
        try:
            record = msgspec.json.decode((path / RECORD).read_bytes(), type=CheckpointRecord)
            names = sorted(record.files)[self.world.rank :: self.world.size]
            faults = [f"{n} differs" for n in names if not _matches(path / n, record.files[n])]
        except (OSError, msgspec.DecodeError) as error:
            record, faults = None, [f"{RECORD}: {error}"]
        everyone: list[list[str]] = [[] for _ in range(self.world.size)]
        dist.all_gather_object(everyone, faults)
        first = next((fault for faults in everyone for fault in faults), "")
        return (None, first) if first else (record, "")

    def _hashes(self, folder: Path) -> dict[str, str]:
        """The SHA-256 of every file in `folder`, a part of them computed by each rank."""
        dist.barrier()  # every rank's files are there
        names = sorted(path.name for path in folder.iterdir())[self.world.rank :: self.world.size]
        everyone: list[dict[str, str]] = [{} for _ in range(self.world.size)]
        dist.all_gather_object(everyone, {name: sha256_file(folder / name) for name in names})
        return {name: digest for part in everyone for name, digest in part.items()}


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    parameters, moments = get_state_dict(model, optimizer, options=_OPTIONS)
    return {"model": parameters, "optim": moments}


def _save_state(state: dict[str, Any], folder: Path) -> None:
    """torch's save, whose failure is one line and not a traceback from every rank."""
    try:
        dcp.save(state, checkpoint_id=folder)
    except dcp.CheckpointException as error:
        # torch's file writer loses the reason: it meets a full disk as a position it did not expect
        reason = next(iter(error.failures.values()))[0]
        free = shutil.disk_usage(next(path for path in folder.parents if path.is_dir())).free >> 20
        raise OutputError(
            f"cannot write the checkpoint {folder} ({str(reason).strip()}; {free:,} MiB "
            "are free there): make room, or choose another folder, and run the same command again"
        ) from error


def _matches(path: Path, digest: str) -> bool:
    return path.is_file() and sha256_file(path) == digest


def _remove(folder: Path) -> None:
    if folder.exists():
        with writing(folder):
            shutil.rmtree(folder)
