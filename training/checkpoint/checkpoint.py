"""Checkpoints: saved atomically, independent of the layout; keeps the last k.

checkpoints/latest             name of the checkpoint to resume from
checkpoints/step-00000200/     torch distributed checkpoint (DCP): parameters and optimizer state by name
    record.json                step, model, tokenizer, and the SHA-256 of every other file of the checkpoint
checkpoints/….partial          a checkpoint that was never finished; never read

No data position and no RNG state is saved: the data position follows from the step, and every random choice
(initial weights, data order, dropout, sampling) is a function of seed and step.
"""

import math
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from gristmill.errors import InputError, OutputError, UsageError, wrap_write_errors
from gristmill.storage.local import PARTIAL, atomic_write_bytes, flush_to_disk, partial_path, sha256_file
from training.checkpoint.checkpoint_group import CheckpointGroup
from training.checkpoint.record import RECORD, CheckpointRecord, encode_record, read_record, verify_checkpoint
from training.checkpoint.remote_run import RemoteRun, local_copy
from training.checkpoint.run_file import CHECKPOINTS, LATEST
from training.checkpoint.shard_plans import State
from training.checkpoint.shard_storage import METADATA, ShardKey, assign_writers, held_shards, read_shards, write_shards
from training.model.model_config import ModelConfig
from training.parallel.mesh import World


@dataclass
class CheckpointManager:
    """Saves and finds the checkpoints in `folder`; keeps the latest `keep`, and all of every `keep_every` steps.

    `say` prints a line. Every rank calls every method, in the same order. After `save_async`, call `wait` before the
    process group is destroyed.
    """

    folder: Path
    keep: int
    world: World
    say: Callable[[str], None]
    keep_every: int = 0
    remote: RemoteRun | None = None
    """The run in a bucket, to which checkpoints are written; `folder` is then of a working copy."""
    _staged: dict[ShardKey, Tensor] = field(default_factory=dict, init=False)
    _saving: Future[Path] | None = field(default=None, init=False)
    # this rank's shards, and those of them that it writes
    _assigned: tuple[list[ShardKey], set[ShardKey]] | None = field(default=None, init=False)
    # checkpoints later than the loaded one; the next save removes them
    _abandoned: list[Path] = field(default_factory=list, init=False)

    @cached_property
    def group(self) -> CheckpointGroup:
        """Return the process group of the checkpoint threads, created at first use."""
        return CheckpointGroup.create(self.world)

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "checkpoint")

    def path(self, step: int) -> Path:
        """Return the path of the checkpoint of a step; it may not exist."""
        return self.folder / f"step-{step:08d}"

    def final_path(self, step: int) -> Path:
        """Return where the checkpoint of a step is once it is written: in the bucket, if the run is in one."""
        path = self.path(step)
        return self.remote.remote / CHECKPOINTS / path.name if self.remote else path

    def save(self, record: CheckpointRecord, state: State) -> Path:
        """Save a checkpoint and return its path. Raises OutputError where it cannot be written."""
        self.wait()
        return self._write(record, self._shards_to_write(state))

    def save_async(self, record: CheckpointRecord, state: State) -> Path:
        """Save in a background thread; returns once this rank's share of `state` is copied to CPU memory.

        Returns the path that the checkpoint will have. Where it could not be written, it `has_failed`, and the next
        `wait`, `save` or `save_async` raises OutputError.
        """
        self.wait()
        self._saving = self._thread.submit(self._write, record, self._stage(self._shards_to_write(state)))
        return self.path(record.step)

    def wait(self) -> None:
        """Wait for the checkpoint that is being written. Raises OutputError where it could not be."""
        saving = self._saving
        self._saving = None
        if saving is not None:
            saving.result()

    @property
    def has_failed(self) -> bool:
        """Return whether a background save is known to have failed on this rank; soon it has on all, see `wait`."""
        saving = self._saving
        return saving is not None and saving.done() and saving.exception() is not None

    def latest(self) -> tuple[Path, CheckpointRecord] | None:
        """Find the latest intact checkpoint: its path and record; None without one.

        A damaged checkpoint is skipped with a message. Raises InputError where all are damaged.
        """
        candidates, later = self.group.main_only(lambda: _list_finished(self.folder, self.say))
        fault = ""
        for number, path in enumerate(candidates, 1):
            record, fault = verify_checkpoint(path, self.group)
            if record is not None:
                self._abandoned = later
                return path, record
            if number < len(candidates):
                self.say(f"checkpoint {path.name} cannot be used ({fault}): trying the previous one")
            later = [*later, path]
        if candidates:
            raise InputError(
                f"the checkpoint {candidates[-1]} cannot be used ({fault}), and there is none before it; restore it "
                f"from a copy, or remove {self.folder} to start over"
            )
        return None

    def _shards_to_write(self, state: State) -> State:
        """Return the part of `state` that this rank writes: each shard is written by one of the ranks that hold it."""
        held = held_shards(state)
        if not self._assigned:  # once: the ranks hold the same shards at every save of a run
            held_by_ranks = self.group.gather(lambda: held)
            self._assigned = held, assign_writers(held_by_ranks)[self.world.rank]
        known, mine = self._assigned
        assert held == known, "the shards of a state differ from those of the previous save"
        share: State = {}
        for key in sorted(state):
            once = {spec: tensor for tensor, spec in state[key] if (key, spec) in mine}
            if once:
                share[key] = [(tensor, spec) for spec, tensor in once.items()]
        return share

    def _stage(self, state: State) -> State:
        """Copy `state` to CPU memory, reusing the buffers of the previous copy where they fit."""
        old = self._staged
        self._staged = {}
        for key, entries in state.items():
            for tensor, spec in entries:
                buffer = old.get((key, spec))
                if buffer is None or buffer.dtype != tensor.dtype:
                    buffer = torch.empty(spec.size, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._staged[key, spec] = buffer.copy_(tensor, non_blocking=True)
        if self.world.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # wait for the copies
        staged: State = {}
        for key, entries in state.items():
            staged[key] = [(self._staged[key, spec], spec) for _, spec in entries]
        return staged

    def _write(self, record: CheckpointRecord, share: State) -> Path:
        assert all(map(math.isfinite, record.stability.values())), "JSON holds finite numbers only"
        final = self.path(record.step)
        temporary = partial_path(final)
        self.group.main_only(lambda: self._begin(temporary))
        if self.remote is not None:  # the working copies of other machines
            self.group.gather(lambda: _make_folder(temporary))
        try:
            write_shards(share, temporary, self.group.process_group)
        except OutputError:
            if self.world.is_main:
                shutil.rmtree(temporary, ignore_errors=True)  # free space: the disk may be full
            raise
        hashes = self.group.gather(lambda: _hashes(temporary, self.world.rank))
        files = dict[str, str]()
        for hashes_of_rank in hashes:
            files |= hashes_of_rank
        record = msgspec.structs.replace(record, files=files)
        if self.remote is not None:
            names = list(hashes[self.world.rank])
            self.remote.publish(record, temporary, names, self.group, self._kept)
            return self.final_path(record.step)
        self.group.main_only(lambda: self._commit(record, temporary, final))
        return final

    def _begin(self, temporary: Path) -> None:
        for leftover in self.folder.glob(f"*{PARTIAL}"):
            _remove(leftover)
        with wrap_write_errors(temporary):
            temporary.mkdir(parents=True)

    def _commit(self, record: CheckpointRecord, temporary: Path, final: Path) -> None:
        """Rename a written checkpoint to its final name, then point `latest` to it; both are atomic."""
        atomic_write_bytes(temporary / RECORD, encode_record(record))
        with wrap_write_errors(final):
            flush_to_disk(temporary)  # torch has flushed the files, this flushes the folder's entries
            if final.exists():  # damaged, and the run resumed from an earlier one
                final.replace(final.with_name(f"{final.name}.replaced{PARTIAL}"))
            temporary.replace(final)
            atomic_write_bytes(self.folder / LATEST, final.name.encode())
            flush_to_disk(self.folder)
        self._prune(final)

    def _prune(self, final: Path) -> None:
        """Remove checkpoints that are not to be kept, and those later than the one loaded, once."""
        old = [path for path in sorted(self.folder.glob("step-*[0-9]")) if path not in (final, *self._abandoned)]
        kept = set(self._kept([path.name for path in old]))
        too_many = [path for path in old if path.name not in kept]
        for path in [*too_many, *self._abandoned, *self.folder.glob(f"*{PARTIAL}")]:
            if path != final:
                _remove(path)
        self._abandoned = []  # the run may come to their steps again

    def _kept(self, names: list[str]) -> list[str]:
        """Return which of the checkpoints before a new one are kept, of their names in order."""
        for_ever = list[str]()
        others = list[str]()
        for name in names:
            if self.keep_every and _step_of(name) % self.keep_every == 0:
                for_ever.append(name)
            else:
                others.append(name)
        latest = others[max(0, len(others) - (self.keep - 1)) :]  # besides the new one
        return [*for_ever, *latest]


def _step_of(name: str) -> int:
    return int(name.removeprefix("step-"))


def _list_finished(folder: Path, say: Callable[[str], None]) -> tuple[list[Path], list[Path]]:
    """List finished checkpoints: the one named in `latest` and earlier ones, newest first; and any later ones."""
    for partial in sorted(folder.glob(f"step-*[0-9]{PARTIAL}")):
        say(f"checkpoint {partial.stem} was never finished: ignoring it")
    paths = sorted(folder.glob("step-*[0-9]"), reverse=True)
    latest = folder / LATEST
    name = latest.read_text(errors="replace").strip() if latest.is_file() else ""
    if folder / name not in paths:
        return paths, []
    return [path for path in paths if path.name <= name], [path for path in paths if path.name > name]


def open_checkpoint(
    folder: Path, group: CheckpointGroup, say: Callable[[str], None], others: Sequence[str] = ()
) -> tuple[Path, CheckpointRecord]:
    """Find a checkpoint: `folder` itself, or the latest in a folder of checkpoints or in a run's --out_dir.

    One in a bucket is fetched. Returns its path and record. Raises UsageError where there is none, InputError where it
    is damaged. `others`: what else the caller takes, for the message.
    """
    given = folder
    folder = group.gather(lambda: local_copy(given))[group.world.rank]
    if (folder / RECORD).is_file():
        record, fault = verify_checkpoint(folder, group)
        if record is None:
            raise InputError(f"the checkpoint {folder} cannot be used ({fault}); restore it, or try another one")
        return folder, record
    inside = folder / CHECKPOINTS
    checkpoints = CheckpointManager(inside if inside.is_dir() else folder, 1, group.world, say)
    checkpoints.group = group
    latest = checkpoints.latest()
    if latest is None:
        advice = ""
        if (folder / "config.json").is_file():
            advice = f"; this is a model of transformers: try gristmill import-hf {folder} OUT"
        *kinds, last = [f"a checkpoint with {RECORD}", "a folder of checkpoints", "a run's --out_dir", *others]
        raise UsageError(f"{given}: expected {', '.join(kinds)}, or {last}{advice}")
    return latest


def find_record(folder: Path) -> CheckpointRecord | None:
    """Return the record of the checkpoint that `open_checkpoint` would find, unverified; None if none is readable."""
    return read_record(find_checkpoint(folder))[0]


def find_checkpoint(folder: Path) -> Path:
    """Return the checkpoint that `open_checkpoint` would find, unverified; `folder` itself if there is none."""
    folder = local_copy(folder)
    if (folder / RECORD).is_file():
        return folder
    inside = folder / CHECKPOINTS
    finished, _ = _list_finished(inside if inside.is_dir() else folder, lambda _: None)
    return finished[0] if finished else folder


def recorded_model(folder: Path) -> ModelConfig | None:
    """Return the model of that checkpoint."""
    record = find_record(folder)
    return ModelConfig.from_record(record.model) if record else None


def load_model(folder: Path, state: State, group: CheckpointGroup, say: Callable[[str], None]) -> CheckpointRecord:
    """Fill `state`, such as a model's parameters, from a checkpoint that `open_checkpoint` finds; returns its record.

    Every rank calls it. Raises UsageError where there is none, InputError where it is damaged or names or shapes
    differ. Call `require_same_model` before, which names the options that differ.
    """
    path, record = open_checkpoint(folder, group, say)
    read_shards(state, path, group.process_group)
    return record


def _make_folder(folder: Path) -> None:
    with wrap_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)


def _hashes(folder: Path, rank: int) -> dict[str, str]:
    """Return the SHA-256 of every file that this rank wrote."""
    with wrap_write_errors(folder):
        names = sorted(path.name for path in folder.glob(f"__{rank}_*"))
        if rank == 0:
            names.append(METADATA)
        return {name: sha256_file(folder / name) for name in names}


def _remove(path: Path) -> None:
    with wrap_write_errors(path):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
