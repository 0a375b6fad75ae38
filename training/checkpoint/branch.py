"""Branches: a new run that continues a checkpoint of another one, with its optimizer's state and its step."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec

from gristmill.errors import InputError, UsageError, require
from training.checkpoint.checkpoint import open_checkpoint
from training.checkpoint.checkpoint_group import CheckpointGroup
from training.checkpoint.record import CheckpointRecord
from training.checkpoint.run_file import INTERVENTIONS
from training.checkpoint.run_folder import COUNTED_FROM, RUN, read_run
from training.data.batch_schedule import Sizes
from training.data.mix import MixPlace
from training.optim.optim_config import OptimConfig, decay_start, learning_rate
from training.own_code import recorded_name

_JUMP = 1e-6  # relative difference of learning rates above which one jumps
# options that decide which tokens a step reads
_READ = (
    "data.train", "data.weights", "data.seq_len", "data.order", "data.packing", "data.packing_version", "seed",
)  # fmt: skip
_SAME_SEQUENCES = {"data.train", "data.weights", "data.order", "seed"}  # and those that leave each set's sequences
_FILLED = {"decay_steps": "last_decay_step", "min_lr": "final_lr"}  # options with a default, and its value


@dataclass(frozen=True)
class BranchSource:
    """A checkpoint to branch from, the optimizer's options of its run, and what its run.json says of its data.

    `reads`: the options that decide which tokens a step reads; `counted_from`: see `RunFolder.claim`; `batch_sizes` of
    the steps before, and the `interventions` in them.
    """

    path: Path
    record: CheckpointRecord
    optim: OptimConfig
    reads: dict[str, Any] = field(default_factory=dict)
    counted_from: int = 0
    batch_sizes: Sizes = ()
    interventions: list[dict[str, Any]] = field(default_factory=list)
    skipped_documents: Sequence[str] = ()

    @classmethod
    def open(cls, checkpoint: Path, group: CheckpointGroup, say: Callable[[str], None]) -> "BranchSource":
        """Find and verify a checkpoint, or the latest of a run; every rank calls it.

        Raises UsageError where there is none, or it is in no run's folder; InputError where it is damaged.
        """
        path, record = open_checkpoint(checkpoint, group, say)
        run = path.absolute().parents[1] / RUN
        stored = group.main_only(lambda: read_run(run))
        if stored is None:
            raise UsageError(
                f"branch_from is {checkpoint}, but there is no {run}, which says with which optimizer it was trained; "
                "give a checkpoint in its run's folder, or start from its parameters alone with --init_from"
            )
        return cls.of_record(path, record, stored)

    @classmethod
    def of_record(cls, path: Path, record: CheckpointRecord, stored: dict[str, Any]) -> "BranchSource":
        """Return the source of a branch from the checkpoint `path`, given its record and its run's run.json.

        Raises InputError for options of an optimizer that run.json cannot have.
        """
        run = path.absolute().parents[1] / RUN
        reads = {key: stored.get(key) for key in _READ}
        sizes = record.batch_sizes or [(0, int(stored.get("data.batch_size") or 1))]
        earlier = [each for each in stored.get(INTERVENTIONS, []) if each["after_step"] < record.step]
        documents = stored.get("data.skip_documents", ())
        return cls(path, record, _optim_of(stored, run), reads, stored[COUNTED_FROM], sizes, earlier, documents)

    def check(self, optim: OptimConfig, local_steps: int = 0, allow_lr_jump: bool = False) -> None:
        """Raise UsageError for a branch with another optimizer or without steps, or one that leaves a decay.

        `local_steps` of the replicas of the branch; 0: it has none. `allow_lr_jump`: any learning rate will do.
        """
        step = self.record.step
        theirs = self.record.layout.get("local_steps", 0)
        require(
            bool(local_steps or not theirs),
            f"branch_from is a checkpoint of replicas that take {theirs} local steps, each with its own moments; give "
            f"--parallel.local_steps {theirs}, or start from its shared weights with --init_from",
        )
        name = recorded_name(optim.name)
        differing = [f"optim.name {self.optim.name} there and {name} here"] * (self.optim.name != name)
        if optim.ema_decay and not self.optim.ema_decay:
            differing.append(f"optim.ema_decay {self.optim.ema_decay} there and {optim.ema_decay} here")
        require(
            not differing,
            f"branch_from is a checkpoint of another optimizer: {'; '.join(differing)}. Give the options it was "
            "trained with, or start from its parameters alone with --init_from",
        )
        require(
            step < optim.steps,
            f"branch_from is a checkpoint of step {step}, and optim.steps {optim.steps}, which counts the steps before "
            f"the branch, too; try --optim.steps {step + (optim.cooldown_steps or optim.steps)}",
        )
        require(
            optim.warmup_from in (step, self.optim.warmup_from),
            f"optim.warmup_from is {optim.warmup_from}, and branch_from is a checkpoint of step {step}: a branch warms "
            f"up from there, or as its run did; try --optim.warmup_from {step}, or {self.optim.warmup_from}",
        )
        if allow_lr_jump:
            return
        start = decay_start(self.optim)
        begin = decay_start(optim)
        require(
            optim.schedule != "wsd" or step <= begin or step > start,
            f"a decay of {optim.cooldown_steps} steps that ends at step {optim.last_decay_step} begins after step "
            f"{begin}, and branch_from is a checkpoint of step {step}; try --optim.steps {step + optim.cooldown_steps}",
        )
        self._check_rate(optim)

    def _check_rate(self, optim: OptimConfig) -> None:
        """Raise UsageError unless the learning rate of the last step was the one that `optim` would give that step."""
        step = self.record.step
        before, now = self._rates(optim)
        if step == 0 or not _jumps(before, now):
            return
        at = f"branch_from is a checkpoint of step {step}"
        jump = f"the learning rate would jump from {before:.2e} to {now:.2e}"
        start = decay_start(self.optim)
        if self.optim.schedule == "wsd" and step > start:
            raise UsageError(
                f"{at}, in a decay that began after step {start}: {jump}; give a checkpoint of step {start} or before, "
                "or --allow_lr_jump true"
            )
        shape = ["schedule", "lr", "warmup_steps"] + ["decay_steps", "min_lr"] * (step > start)
        given = " ".join(f"--optim.{name} {getattr(self.optim, _FILLED.get(name, name))}" for name in shape)
        decay = ", with --optim.cooldown_steps for a decay from there" * (self.optim.schedule == "wsd")
        raise UsageError(
            f"{at}, and {jump} there; give those of its run, {given}{decay}, or --allow_lr_jump true to keep the "
            "optimizer's state all the same, or start from its parameters alone with --init_from"
        )

    def _rates(self, optim: OptimConfig, before: OptimConfig | None = None) -> tuple[float, float]:
        """Return the rates of the last step before the branch, by `before`, its run's options, and by `optim`.

        Where the schedule of `optim` begins there: of the first step after it. Raises UsageError for a schedule of the
        user's whose file this command does not name.
        """
        last = max(0, self.record.step - 1)
        here = self.record.step if optim.warmup_from == self.record.step else last
        return learning_rate(last, before or self.optim), learning_rate(here, optim)

    def changes(self, optim: OptimConfig, skipped: int, documents: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Return what the branch changes at its step, as run.json records it: its learning rate, and what it skips.

        That is `skipped` sequences, and `documents`, of which its run has not skipped all.

        The rate before is None where a function of the user's gave it whose file this command does not name.
        """
        before: float | None = None
        now = self._rates(optim, optim)[1]
        with suppress(UsageError):
            before, now = self._rates(optim)
        changes: list[dict[str, Any]] = []
        if self.record.step and (before is None or _jumps(before, now)):
            changes.append({"after_step": self.record.step, "learning_rate": [before, now]})
        if skipped:
            changes.append({"after_step": self.record.step, "skipped_sequences": skipped})
        if new := sorted({*documents} - {*self.skipped_documents}):
            changes.append({"after_step": self.record.step, "skipped_documents": new})
        return changes

    def progress(self, identity: Mapping[str, Any]) -> tuple[MixPlace, bool]:
        """How far the data sets were read, and whether the branch begins to read anew: other sets, weights or seed.

        With another length of sequences or packing all sets consist of other sequences: nothing of them was read.
        """
        other = set(self._other(identity))
        return self.record.data.of_run(self.reads) if other <= _SAME_SEQUENCES else MixPlace(), bool(other)

    def seen_since(self, identity: Mapping[str, Any]) -> int:
        """Return the step from which on a branch, whose options are `identity`, counts the tokens that it has seen.

        They are computed from its own data: where the source read other tokens, only the branch's steps are counted.
        """
        return self.record.step if self._other(identity) else self.counted_from

    def describe(self, identity: Mapping[str, Any]) -> str:
        """Return the checkpoint and its step for a log, and what decides that the branch reads other tokens."""
        at = f"{self.path}, after its step {self.record.step}"
        other = ", ".join(self._other(identity))
        return f"{at}, with another {other}: tokens seen are counted from there on" if other else at

    def _other(self, identity: Mapping[str, Any]) -> list[str]:
        return [key for key in _READ if self.reads.get(key) != identity.get(key)]


def _jumps(before: float, now: float) -> bool:
    return abs(before - now) > _JUMP * max(before, now)


def _optim_of(stored: dict[str, Any], run: Path) -> OptimConfig:
    """Return the optimizer's options that `run`, a run.json, holds.

    Raises InputError for values that they cannot have.
    """
    values = {option.name: stored[f"optim.{option.name}"] for option in fields(OptimConfig)}
    lengths = {key: stored[key] for key in ("steps", "decay_steps", "cooldown_steps")}
    if values["schedule"] == "constant":
        lengths["decay_steps"] = 0
    try:
        return msgspec.convert({**values, **lengths}, OptimConfig)
    except msgspec.ValidationError as error:
        raise InputError(
            f"{run} is damaged: {error}; restore it, or start from the parameters of a checkpoint alone with "
            "--init_from"
        ) from error
