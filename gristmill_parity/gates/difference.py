"""Difference: the first step, and the first tensor of a checkpoint, in which two runs of one training differ."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gristmill.errors import UsageError
from gristmill.wording import count_of
from gristmill_parity.gates.recorded_run import RecordedRun
from training.checkpoint.record import read_record
from training.checkpoint.shard_storage import read_shards, stored_tensors
from training.sharding.shard_spec import ShardSpec

AT_EQUAL_WEIGHTS = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 2.0**-7, "fp16": 2.0**-10}
"""Largest relative difference of the loss and the gradient norm of the first step: the certificate's limits."""
LATER = {"fp64": 1e-10, "fp32": 1e-4, "bf16": 2.0**-6, "fp16": 2.0**-6}
"""Largest relative difference of the losses of later steps; gradient norms differ by up to a third in 16 bits then."""
_OF_A_STEP = ("lr", "loss", "grad_norm", "z_loss", "skipped")


@dataclass(frozen=True)
class FirstDifference:
    """Where two runs first differ: a step, what differs in it, and in words by how much."""

    step: int
    what: str
    how: str

    def __str__(self) -> str:
        return f"{self.what} of step {self.step}: {self.how}"


@dataclass(frozen=True)
class Comparison:
    """Comparison of two runs: the steps that must be equal bit for bit, and what is allowed in the others."""

    first: RecordedRun
    second: RecordedRun
    steps: Sequence[int]
    """The steps in common, and those between them that one of the runs lacks."""
    last_exact: int
    """Until this step both runs were in one layout, so that every number is to be the same."""
    tolerance: float
    """Allowed relative difference, in place of the limits of the precision; 0: those."""

    @classmethod
    def of(cls, first: RecordedRun, second: RecordedRun, last: int, tolerance: float) -> "Comparison":
        """Compare the steps that both runs took, until `last` if that is not 0."""
        begin = max(min(first.steps), min(second.steps))
        end = min(max(first.steps), max(second.steps))
        if last:
            end = min(end, last)
        if end < begin:
            raise UsageError(f"--steps is {last}, and the first step in common is {begin}; try a higher --steps")
        steps = range(begin, end + 1)
        return cls(first, second, steps, _last_exact_step(first, second, steps), tolerance)

    def differences(self) -> list[FirstDifference]:
        """Return the first difference of the steps, of the evaluations and of the checkpoints, where there is one."""
        firsts = (self.of_steps(), self.of_evaluations(), self.of_checkpoints())
        return [first for first in firsts if first is not None]

    def of_steps(self) -> FirstDifference | None:
        """Return the first step whose learning rate, loss or gradient norm differs; None if none does."""
        for step in self.steps:
            one = self.first.steps.get(step)
            other = self.second.steps.get(step)
            if one is None or other is None:
                missing = self.first if one is None else self.second
                return FirstDifference(step, "the record", f"{missing.folder} has none")
            for name in _OF_A_STEP:
                how = self._differ(step, name, one.get(name), other.get(name))
                if how:
                    return FirstDifference(step, name, how)
        return None

    def of_evaluations(self) -> FirstDifference | None:
        """Return the first evaluation of both runs whose loss differs; None if none does."""
        common = self.first.evaluations.keys() & self.second.evaluations.keys()
        for step in sorted(common & set(self.steps)):
            one = self.first.evaluations[step].get("loss")
            other = self.second.evaluations[step].get("loss")
            how = self._differ(step, "loss", one, other)
            if how:
                return FirstDifference(step, "the evaluation's loss", how)
        return None

    def of_checkpoints(self) -> FirstDifference | None:
        """Return the first tensor that differs in the first common checkpoint in which one does; None if none does.

        Only where every bit is to be equal: see `of_weights`.
        """
        for step in self.exact_checkpoints:
            one = self.first.checkpoints[step]
            other = self.second.checkpoints[step]
            if _same_files(one, other):
                continue
            difference = first_different_tensor(one, other)
            if difference is not None:
                return FirstDifference(step, *difference)
        return None

    @property
    def exact_checkpoints(self) -> list[int]:
        """Return the steps of the checkpoints that both runs have, and in which every bit is to be equal."""
        common = self.first.checkpoints.keys() & self.second.checkpoints.keys()
        last = min(self.last_exact, self.steps[-1])
        return sorted(step for step in common if step <= last)

    def of_weights(self) -> str:
        """Say in which weights the first common checkpoint of different layouts differs the most; or nothing.

        Nothing follows from it alone: AdamW makes whole steps of what is rounding in a gradient.
        """
        common = self.first.checkpoints.keys() & self.second.checkpoints.keys()
        inexact = [step for step in common if self.last_exact < step <= self.steps[-1]]
        if not inexact:
            return ""
        step = min(inexact)
        name, share = most_different_weights(self.first.checkpoints[step], self.second.checkpoints[step])
        return f"weights after step {step} differ the most in {name}, by {share:.1e} of its norm"

    def largest(self, name: str) -> float:
        """Return the largest relative difference of a number of the compared steps."""
        largest = 0.0
        for step in self.steps:
            one = self.first.steps[step].get(name)
            other = self.second.steps[step].get(name)
            if one is not None and other is not None:
                largest = max(largest, relative_difference(one, other))
        return largest

    def allowed(self, step: int, name: str) -> float:
        """Return the largest relative difference that is allowed in a number of a step."""
        if step <= self.last_exact or name in ("lr", "skipped"):
            return 0.0
        if step <= max(self.steps[0], self.last_exact + 1):
            return self.tolerance or AT_EQUAL_WEIGHTS[self.first.precision]
        if name == "grad_norm":
            return math.inf
        return self.tolerance or LATER[self.first.precision]

    def _differ(self, step: int, name: str, one: Any, other: Any) -> str:
        """Say how two numbers of a step differ, if they do by more than is allowed; else nothing."""
        if one == other:
            return ""
        allowed = self.allowed(step, name)
        if one is None or other is None or name == "skipped":
            return f"{one} in the first run and {other} in the second"
        relative = relative_difference(one, other)
        if relative <= allowed:
            return ""
        limit = f"more than {allowed:.1e}" if allowed else "expected every bit to be equal"
        return f"{one!r} in the first run and {other!r} in the second, a relative difference of {relative:.1e}; {limit}"


def _last_exact_step(first: RecordedRun, second: RecordedRun, steps: Sequence[int]) -> int:
    """Return the last step until which both runs were in one setting, with one version of torch; 0 if none was."""
    if first.versions.get("torch") != second.versions.get("torch"):
        return 0
    last = 0
    for step in steps:
        setting = first.setting(step)
        if not setting or setting != second.setting(step):
            break
        last = step
    return last


def describe_expected(comparison: Comparison) -> str:
    """Say where every bit of two runs must be equal, and how far other numbers may differ."""
    first = comparison.steps[0]
    last = comparison.steps[-1]
    exact = comparison.last_exact
    if exact >= last:
        return f"one layout: every number of steps {first} to {last} must be equal bit for bit"
    if exact >= first:
        layouts = f"one layout until step {exact}, where every bit must be equal; then other layouts"
    else:
        layouts = "different layouts, devices or versions of torch"
    begins = max(first, exact + 1)
    return (
        f"{layouts}: loss and gradient norm of step {begins} may differ by {comparison.allowed(begins, 'loss'):.1e}, "
        f"later losses by {comparison.allowed(last + 1, 'loss'):.1e}"
    )


def relative_difference(one: float, other: float) -> float:
    """Return the difference of two numbers over the larger one."""
    return abs(one - other) / max(abs(one), abs(other), 1e-300)


def first_different_tensor(one: Path, other: Path) -> tuple[str, str] | None:
    """Return the first tensor that differs between two checkpoints, in the order of the model, and how; or None.

    One tensor of each is in memory at a time.
    """
    in_one = stored_tensors(one)
    in_other = stored_tensors(other)
    for key in sorted(in_one.keys() | in_other.keys(), key=_model_order):
        if key not in in_one:
            return key, f"{one} has none"
        if key not in in_other:
            return key, f"{other} has none"
        shape = tuple(in_one[key].size)
        other_shape = tuple(in_other[key].size)
        if shape != other_shape:
            return key, f"its shape is {shape} in the first run and {other_shape} in the second"
        values = _read(one, key, in_one[key])
        other_values = _read(other, key, in_other[key])
        if not torch.equal(_bits(values), _bits(other_values)):
            return key, describe_difference(values, other_values)
    return None


def most_different_weights(one: Path, other: Path) -> tuple[str, float]:
    """Return the parameter that differs most between two checkpoints, and by which share of its 2-norm."""
    stored = stored_tensors(one)
    most_different = ""
    largest = -1.0
    for key in sorted(stored, key=_model_order):
        if not key.startswith(_WEIGHTS):
            continue
        values = _read(one, key, stored[key]).double()
        apart = float((_read(other, key, stored[key]).double() - values).norm())
        share = apart / max(float(values.norm()), 1e-300)
        if share > largest:
            most_different = key.removeprefix(_WEIGHTS)
            largest = share
    return most_different, largest


def describe_difference(one: Tensor, other: Tensor) -> str:
    """Say how many elements of two tensors of one shape differ, and where most."""
    apart = (one.double() - other.double()).abs()
    count = int((_bits(one) != _bits(other)).any(1).sum())
    worst = int(apart.flatten().nan_to_num(torch.inf).argmax())
    indices = list[int]()
    if one.ndim:
        indices = [int(index) for index in torch.unravel_index(torch.tensor(worst), one.shape)]
    values = f"{float(one.flatten()[worst])!r} and {float(other.flatten()[worst])!r}"
    return f"{count:,} of {count_of(one.numel(), 'element')} differ, most at {indices}: {values}"


def _bits(x: Tensor) -> Tensor:
    """Return the bytes of a tensor, (elements, bytes): not a number equals itself."""
    return x.contiguous().flatten().view(torch.uint8).view(x.numel(), -1)


def _same_files(one: Path, other: Path) -> bool:
    """Return whether two checkpoints are of the same bytes by their records, so that no tensor needs to be read."""
    record, _ = read_record(one)
    other_record, _ = read_record(other)
    if record is None or other_record is None or record.files is None:
        return False
    return record.files == other_record.files


def _read(checkpoint: Path, key: str, stored: Any) -> Tensor:
    """Read one tensor of a checkpoint, as a whole."""
    values = torch.empty(stored.size, dtype=stored.properties.dtype)
    group = dist.group.WORLD
    assert group is not None
    read_shards({key: [(values, ShardSpec.whole(tuple(values.shape)))]}, checkpoint, group)
    return values


_WEIGHTS = "model."
_KINDS = (_WEIGHTS, "optim.", "")  # the last is any other
_ENDS = ("embed", "blocks", "norm", "head", "")


def _model_order(key: str) -> tuple[Any, ...]:
    """Return where a tensor comes in the order of the model: weights, then states of the optimizer, then others."""
    kind = [key.startswith(prefix) for prefix in _KINDS].index(True)
    name = key.removeprefix(_KINDS[kind])
    first_word = name.partition(".")[0]
    part = [end in first_word for end in _ENDS].index(True)
    words = [(int(word), "") if word.isdigit() else (-1, word) for word in name.split(".")]
    return kind, part, words
