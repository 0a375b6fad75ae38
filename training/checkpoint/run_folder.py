"""Run folder: one run per output folder, described by run.json and locked while it trains."""

import fcntl
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gristmill.errors import InputError, OutputError, UsageError, require, wrap_write_errors
from gristmill.storage.local import atomic_write_bytes
from training.checkpoint.record import CheckpointRecord
from training.checkpoint.remote_run import RemoteRun
from training.checkpoint.run_file import CHECKPOINTS, INTERVENTIONS, STARTS
from training.checkpoint.run_file import RUN as RUN
from training.distributed.process_group import main_only
from training.optim.optim_config import OptimConfig, decay_start, learning_rate
from training.own_code import is_own

COUNTED_FROM = "counted_from"  # in run.json: the step after which tokens seen are counted, of a branch with other data
_OTHER_FOLDER = "try another --out_dir"
BEGAN = "began_from"  # in run.json: the option that named the run's first weights, and its path; or nothing
# old names of options to new, for folders that an earlier release began
_RENAMED = {"model.hidden": "model.ffn_width", "optim.clip": "optim.max_grad_norm"}
# what releases before an option did, whose folders do not name it
_BEFORE = {
    "data.order": "randperm",
    **{f"optim.{option.name}": json.loads(json.dumps(option.default)) for option in fields(OptimConfig)},
}
_MASKS = "data.masks"
_PACKING = "data.packing"
_PACKING_VERSION = "data.packing_version"
_BATCHES = {"data.batch_size", "data.batch_ramp"}  # a run may go on with others
_SHARED = ("replicas.", "parallel.parts")  # options of runs whose batches several processes read by themselves
_FALLING = ("cosine", "linear")  # schedules of which another decay_steps changes every rate


@dataclass(frozen=True)
class RunFolder:
    """A run's locked --out_dir. Every rank calls every method; rank 0 reads and writes.

    `identity`: the options that must be equal to resume, by name. `optim`: the length of the run and of its decay.
    `began_from`: the checkpoint that a new run starts from, by the option that names it; empty without one.
    """

    out_dir: Path
    identity: dict[str, Any]
    optim: OptimConfig
    began_from: Mapping[str, str] = field(default_factory=dict)
    remote: RemoteRun | None = None
    """The run in a bucket of which `out_dir` is a working copy."""
    data: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Folders of token shards, as the record of a start has them."""

    def require_same_run(self) -> None:
        """Raise UsageError for a run of another identity, start or length, or one whose learning rate would jump."""
        main_only(lambda: _require_same_run(self))

    def describe_changed_decay(self, step: int) -> str:
        """Say how the learning rate after `step` steps changes, as the run was given another decay; or nothing.

        Raises UsageError where it would leave a WSD schedule's decay, or jump into one.
        """
        return main_only(lambda: _describe_changed_decay(self, step))

    def claim(
        self,
        counted_from: int = 0,
        start: Mapping[str, Any] = MappingProxyType({}),
        interventions: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Write run.json: from now on the folder is this run's. Call it once nothing can refuse the start.

        `counted_from`: the step after which it counts the tokens that it has seen. `start`, of `describe_start`, is
        added to those of the run. `interventions` of a new branch.
        """
        run = {"steps": self.optim.steps, "decay_steps": self.optim.last_decay_step}
        if self.optim.cooldown_steps:
            run["cooldown_steps"] = self.optim.cooldown_steps
        run |= {COUNTED_FROM: counted_from} if counted_from else {}
        run |= self.identity

        def write() -> None:
            resumes = _has_checkpoints(self.out_dir)
            began = _began_from(self.out_dir) if resumes else dict(self.began_from)
            written = run if began is None else {**run, BEGAN: began}
            stored = (read_run(self.out_dir / RUN, _OTHER_FOLDER) or {}) if resumes else {}
            changes = stored.get(INTERVENTIONS, []) if resumes else interventions
            if changes:
                written = {**written, INTERVENTIONS: changes}
            text = json.dumps({**written, STARTS: [*stored.get(STARTS, []), start]}, indent=2, default=str)
            atomic_write_bytes(self.out_dir / RUN, text.encode() + b"\n")

        main_only(write)


@contextmanager
def lock_run_folder(folder: RunFolder) -> Iterator[None]:
    """Create and lock a run's folder; every rank calls it, rank 0 holds the lock while the block runs.

    Raises OutputError where another process trains into it, and what `require_same_run` raises.
    """
    out_dir = folder.out_dir
    locks: list[Any] = []  # on rank 0 only; the kernel releases it even if the process is killed
    leases = ExitStack()

    def lock() -> None:
        with wrap_write_errors(out_dir):
            out_dir.mkdir(parents=True, exist_ok=True)
            locks.append((out_dir / ".lock").open("w"))
        try:
            fcntl.flock(locks[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OutputError(
                f"{out_dir} is in use by another training run; wait for its end, or try another --out_dir"
            ) from error
        if folder.remote is not None:
            leases.enter_context(folder.remote.lease())

    try:
        main_only(lock)
        folder.require_same_run()
        yield
    finally:
        leases.close()
        for file in locks:
            file.close()


def _has_checkpoints(out_dir: Path) -> bool:
    return any(out_dir.glob(f"{CHECKPOINTS}/step-*[0-9]"))


def _began_from(out_dir: Path) -> dict[str, str] | None:
    """Return what the run in `out_dir` began from; None if an earlier release, which did not record that, began it."""
    began: dict[str, str] | None = (read_run(out_dir / RUN, _OTHER_FOLDER) or {}).get(BEGAN)
    return began


def _require_same_start(folder: RunFolder) -> None:
    """A checkpoint to start from is read once: where the folder has its own, it must be the one that was read."""
    began = _began_from(folder.out_dir)
    if began is None or not folder.began_from or folder.began_from == began or not _has_checkpoints(folder.out_dir):
        return
    (option, path), start = next(iter(folder.began_from.items())), "".join(f"{o} {p}" for o, p in began.items())
    raise UsageError(
        f"{folder.out_dir} holds checkpoints of a run that began from {start or 'new weights'}, and --{option} {path} "
        f"would not be read; leave --{option} out to resume that run, or choose another --out_dir to start from {path}"
    )


def _require_same_data(
    folder: RunFolder, stored: Mapping[str, Any], given: Mapping[str, Any], changed: Sequence[str]
) -> None:
    """Raise UsageError if nothing has `changed` but the shards in the folders that the run was started with."""
    of_shards = {"data.train": "train", "data.holdout": "holdout"}
    if not changed or not {*changed} <= {*of_shards, _MASKS}:
        return
    starts = stored.get(STARTS) or [{}]
    before = starts[-1].get("data")
    if before != folder.data:
        return
    rewritten = list[str]()
    for key, name in of_shards.items():
        theirs = _listed(stored.get(key))
        ours = _listed(given.get(key))
        rewritten += [path for path, old, new in zip(folder.data[name], theirs, ours, strict=True) if old != new]
    paths = rewritten or folder.data["train"]  # else masks alone
    raise UsageError(
        f"{folder.out_dir} holds a run of other token shards: those in {', '.join(dict.fromkeys(paths))} were written "
        "anew since. Restore them to resume it, or choose another --out_dir, with "
        f"--init_from {folder.out_dir} to go on from its weights"
    )


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _require_same_run(folder: RunFolder) -> None:
    out_dir = folder.out_dir
    identity = folder.identity
    optim = folder.optim
    if (stored := read_run(out_dir / RUN, _OTHER_FOLDER)) is None:
        require(
            not _has_checkpoints(out_dir),
            f"{out_dir} holds checkpoints and no {RUN}, which says with which options they were trained; restore that "
            f"file, or start a new run from their weights: another --out_dir, and --init_from {out_dir}",
        )
        return
    if not _has_checkpoints(out_dir):  # it was killed before the first: nothing that it trained is left to resume
        return
    given = json.loads(json.dumps(identity, default=str))  # as it was written: lists for tuples
    used = [
        key for key in stored if key.startswith(("model.", "data.", "parallel.", "replicas.")) and key not in given
    ]  # recorded only where they are used
    stable = optim.schedule == "wsd" and not stored["cooldown_steps"]  # min_lr has had no effect yet
    free = {_PACKING_VERSION} | ({"optim.min_lr"} if stable else set())
    if not any(key.startswith(_SHARED) for key in given):  # others read the same batches, and have no checkpoint
        free |= _BATCHES
    changed = [key for key in (*given, *used) if key not in free and stored.get(key) != given.get(key)]
    _require_same_data(folder, stored, given, changed)
    differing = [f"{key} ({stored.get(key)} there, {given.get(key)} now)" for key in changed]
    if differing:
        raise UsageError(
            f"{out_dir} holds another run, which differs in {'; '.join(differing)}. "
            "Give the values it was started with to resume it, or choose another --out_dir"
        )
    _require_same_packing(out_dir, stored, given)
    _require_same_start(folder)
    if stored["steps"] > optim.steps:
        raise UsageError(
            f"{out_dir} holds this run with --optim.steps {stored['steps']}, and {optim.steps} are given now; "
            "a run can be made longer, not shorter: choose another --out_dir"
        )
    before = stored["decay_steps"]
    now = optim.last_decay_step
    if before != now and not optim.decay_steps and _falls(optim):
        raise UsageError(
            f"{out_dir} holds this run with a learning rate that decays until step {before}, and with --optim.steps "
            f"{optim.steps} alone it would decay until {now}, and jump where the run resumes; give --optim.decay_steps "
            f"{before} to keep it, with optim.min_lr for the steps beyond, or --optim.decay_steps {now} to change it"
        )


def _require_same_packing(out_dir: Path, stored: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    before, now = (run.get(_PACKING_VERSION) for run in (stored, given))
    require(
        before == now,
        f"{out_dir} holds a run with best-fit packing in its version {before}, and this release has version {now}, "
        "where other tokens of a row are targets: its losses would be of other tokens from here on. Resume it with the "
        f"release that began it, or start a new run from its weights: another --out_dir, and --init_from {out_dir}",
    )


def document_options(record: CheckpointRecord, checkpoint: Path) -> tuple[bool, bool]:
    """Return data.mask_documents and data.eod_mask_loss of the training that a checkpoint with `record` is of.

    The run.json of one of an earlier release says it; without that they count as off.
    """
    if record.mask_documents is not None:
        return record.mask_documents, bool(record.eod_mask_loss)
    try:
        run = read_run(checkpoint.absolute().parent.parent / RUN) or {}
    except (InputError, OSError):
        run = {}
    return bool(run.get("data.mask_documents")), bool(run.get("data.eod_mask_loss"))


def read_run(path: Path, advice: str = "expected that of a training run") -> dict[str, Any] | None:
    """Read run.json, under the names of today; None without one.

    Raises InputError where it is damaged, UsageError, with `advice`, where it is that of `gristmill run`.
    """
    if not path.is_file():
        return None
    try:
        stored = _BEFORE | {_RENAMED.get(key, key): value for key, value in json.loads(path.read_bytes()).items()}
        require("corpus" not in stored, f"{path} belongs to a run of the data pipeline; {advice}")
        if stored.get(_PACKING) == "best-fit":
            stored.setdefault(_PACKING_VERSION, 1)  # which did not name it
        stored["steps"] = int(stored["steps"])
        stored["decay_steps"] = int(stored.get("decay_steps") or stored["steps"])
        stored["cooldown_steps"] = int(stored.get("cooldown_steps", 0))
        stored[COUNTED_FROM] = int(stored.get(COUNTED_FROM, 0))
    except UsageError:
        raise
    except (ValueError, AttributeError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise InputError(
            f"{path} is damaged; restore that file, or start a new run from its weights: another --out_dir, and "
            f"--init_from {path.parent}"
        ) from error
    return stored


def sizes_of_earlier_release(stored: Mapping[str, Any], size: int) -> list[tuple[int, int]]:
    """Return the batch sizes of a run whose checkpoints do not name them, of its run.json; it has none but `size`."""
    before = int(stored.get("data.batch_size", size))
    require(
        before == size,
        f"an earlier release began this run with data.batch_size {before}, and its checkpoints do not say which "
        f"sequences were read; give --data.batch_size {before}, or choose another --out_dir and --branch_from",
    )
    return [(0, before)]


def _describe_changed_decay(folder: RunFolder, step: int) -> str:
    stored = read_run(folder.out_dir / RUN, _OTHER_FOLDER)
    optim = folder.optim
    if stored is None or not _has_checkpoints(folder.out_dir):
        return ""
    before = replace(optim, decay_steps=stored["decay_steps"], cooldown_steps=stored["cooldown_steps"])
    if optim.schedule == "wsd":
        return _describe_moved_cooldown(before, optim, step)
    if before.last_decay_step == optim.last_decay_step or not _falls(optim):
        return ""
    return (
        f"the learning rate decays until step {optim.last_decay_step} from now on, instead of step "
        f"{before.decay_steps}: the rate of step {step + 1} is {learning_rate(step, optim):.2e} instead of "
        f"{learning_rate(step, before):.2e}"
    )


def _falls(optim: OptimConfig) -> bool:
    """Return whether each rate follows from the step at which the decay ends, or may: a user's function is given it."""
    return is_own(optim.schedule) or (optim.schedule in _FALLING and optim.lr != optim.final_lr)


def _describe_moved_cooldown(before: OptimConfig, now: OptimConfig, step: int) -> str:
    starts = decay_start(before), decay_start(now)
    if starts[0] == starts[1] and (before.last_decay_step == now.last_decay_step or starts[0] == math.inf):
        return ""
    if step > starts[0]:
        raise UsageError(
            f"the run is at step {step}, in a decay that began after step {starts[0]}: another decay would make its "
            f"learning rate jump; give --optim.cooldown_steps {before.cooldown_steps} and --optim.decay_steps "
            f"{before.decay_steps} as before, or --branch_from a checkpoint of step {starts[0]} or before, and another "
            "--out_dir"
        )
    if step > starts[1]:
        raise UsageError(
            f"a decay of {now.cooldown_steps} steps that ends at step {now.last_decay_step} begins after step "
            f"{starts[1]}, and the run is at step {step}; try --optim.steps {step + now.cooldown_steps}"
        )
    what = "does not decay" if starts[1] == math.inf else f"decays from step {starts[1]} to {now.last_decay_step}"
    return f"the learning rate {what} from now on"
