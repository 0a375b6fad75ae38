"""RecordedRun: what a training run has recorded in its folder: its options, steps, evaluations and checkpoints."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gristmill.errors import InputError, UsageError, require
from gristmill.wording import count_of
from training.checkpoint.run_file import CHECKPOINTS, INTERVENTIONS, LATEST, RUN, STARTS
from training.checkpoint.run_folder import BEGAN, COUNTED_FROM, read_run
from training.reporting.metrics_file import METRICS, read_metrics_and_damage

_CHECKPOINT = re.compile(r"step-(\d{8,})")
# entries of run.json that do not decide what is computed: lengths, which show in the learning rate, and histories
_NOT_COMPARED = {"steps", "decay_steps", "cooldown_steps", COUNTED_FROM, INTERVENTIONS, STARTS}
# entries of a start in metrics.jsonl on which the order of sums depends, and with it the last bits
_SETTING = ("processes", "device", "layout", "recompute")


@dataclass(frozen=True)
class RecordedRun:
    """A run's folder, and what was recorded there."""

    folder: Path
    options: Mapping[str, Any]
    """What decides the results: the model, data, optimizer, seed and precision, by the options' names."""
    steps: Mapping[int, Mapping[str, Any]]
    evaluations: Mapping[int, Mapping[str, Any]]
    starts: Sequence[tuple[int, Mapping[str, Any]]]
    """The setting of each start of its processes, with the steps that were done before."""
    versions: Mapping[str, str]
    """Versions of libraries, at the last start."""
    checkpoints: Mapping[int, Path]

    @classmethod
    def read(cls, folder: Path) -> "RecordedRun":
        """Read a run. Raises UsageError where the folder is of no training run, or has no step recorded."""
        stored = read_run(folder / RUN)
        if stored is None:
            raise UsageError(f"{folder}: expected the --out_dir of a training run, got no {RUN} in it")
        records, damaged = read_metrics_and_damage(folder / METRICS)
        if damaged:
            raise InputError(
                f"{folder / METRICS} has {count_of(damaged, 'damaged line')}; expected one record a line; restore it"
            )
        steps = dict[int, dict[str, Any]]()
        evaluations = dict[int, dict[str, Any]]()
        starts = []
        for record in records:
            kind = record["kind"]
            if kind == "step":
                steps[record["step"]] = record
            elif kind == "eval":
                evaluations[record["step"]] = record
            elif kind == "run":
                starts.append((record["step"], {key: record.get(key) for key in _SETTING}))
        require(bool(steps), f"{folder / METRICS} records no step; expected those of a training run")
        options = {key: value for key, value in stored.items() if key not in _NOT_COMPARED}
        versions = stored[STARTS][-1].get("versions", {}) if stored.get(STARTS) else {}
        return cls(folder, options, steps, evaluations, starts, versions, _checkpoints(folder / CHECKPOINTS))

    @property
    def precision(self) -> str:
        return str(self.options.get("precision", "fp32"))

    def setting(self, step: int) -> Mapping[str, Any]:
        """Return how many processes took a step, on which device and in which layout; empty if that is not recorded."""
        latest: Mapping[str, Any] = {}
        for done, setting in self.starts:
            if done < step:
                latest = setting
        return latest

    def describe(self) -> str:
        """Return a line: the recorded steps, the layouts that they were taken in, and where the run resumed."""
        numbers = sorted(self.steps)
        parts = [f"{self.folder}: steps {numbers[0]} to {numbers[-1]}, {self.precision}"]
        for number, (done, setting) in enumerate(self.starts):
            verb = "resumed" if number else "started"
            parts.append(f"{verb} after step {done} as {describe_setting(setting)}")
        return ", ".join(parts)


def describe_setting(setting: Mapping[str, Any]) -> str:
    """Return the processes and the layout of a start, in words."""
    layout = setting.get("layout") or {}
    words = [str(setting.get("device"))]
    for axis in ("dp", "tp", "pp", "cp", "ep"):
        size = layout.get(axis, 1)
        if size <= 1:
            continue
        word = f"{axis} {size}"
        if axis == "tp" and layout.get("sequence_parallel"):
            word += " with sequence parallelism"
        if axis == "cp":
            word += f" ({layout.get('context')})"
        words.append(word)
    if layout.get("zero") and layout.get("dp", 1) > 1:
        words.append(f"zero {layout['zero']}")
    if layout.get("micro_batches", 1) > 1:
        words.append(f"micro-batches {layout['micro_batches']}")
    processes = count_of(setting.get("processes") or 1, "process", "processes")
    return f"{processes} ({', '.join(words)})"


def require_same_training(first: RecordedRun, second: RecordedRun) -> None:
    """Raise UsageError where two runs differ in what decides their results, naming an option."""
    require(
        first.folder.resolve() != second.folder.resolve(),
        f"{first.folder} is given twice; expected the folders of two runs",
    )
    different = list(_different_options(first.options, second.options))
    if different:
        name, one, other = different[0]
        what = f"{name} is {one} in the first and {other} in the second"
        if name == BEGAN:
            what = f"the first began from {_describe_start(one)} and the second from {_describe_start(other)}"
        others = len(different) - 1
        more = ""
        if others:
            verb = "differs" if others == 1 else "differ"
            more = f", and {count_of(others, 'more option')} {verb}"
        raise UsageError(
            f"{first.folder} and {second.folder} are not runs of one training: {what}{more}; expected the same start, "
            "data, model, optimizer, seed and precision"
        )
    common = first.steps.keys() & second.steps.keys()
    require(
        bool(common),
        f"{first.folder} has recorded steps {min(first.steps)} to {max(first.steps)}, and {second.folder} "
        f"{min(second.steps)} to {max(second.steps)}; expected steps in common",
    )


def _describe_start(began: Mapping[str, str] | None) -> str:
    """Return what a run began from, as run.json has it, in words."""
    if not began:
        return "new weights"
    return " ".join(f"--{option} {path}" for option, path in began.items())


def _different_options(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name and both values of each option that differs, first those that say the most."""
    names = first.keys() | second.keys()
    for name in sorted(names, key=lambda name: (not name.startswith(("data.", "model.", "seed")), name)):
        if first.get(name) != second.get(name):
            yield name, first.get(name), second.get(name)


def _checkpoints(folder: Path) -> dict[int, Path]:
    """Return the finished checkpoints of a run, by their steps: until the one that `latest` names."""
    latest = folder / LATEST
    last = latest.read_text(errors="replace").strip() if latest.is_file() else ""
    checkpoints = {}
    for path in sorted(folder.glob("step-*")):
        named = _CHECKPOINT.fullmatch(path.name)
        if named and path.name <= last:
            checkpoints[int(named[1])] = path
    return checkpoints
