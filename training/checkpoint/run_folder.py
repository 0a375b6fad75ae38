"""Run folder: one run per output folder, described by run.json and locked while it trains."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gristmill.errors import InputError, OutputError, UsageError, wrap_write_errors
from gristmill.storage.local import atomic_write_bytes
from training.distributed.mesh import main_only
from training.model.model_config import ModelConfig
from training.optim.optim_config import OptimConfig

RUN = "run.json"
# old names of options to new, for folders that an earlier release began
_RENAMED = {
    f"{section}.{old}": f"{section}.{new}"
    for section, options in (("model", ModelConfig), ("optim", OptimConfig))
    for old, new in options.RENAMED.items()
}
# what releases before an option did, whose folders do not name it
_BEFORE = {"data.order": "randperm"}


@dataclass(frozen=True)
class RunFolder:
    """A run's locked --out_dir. Every rank calls every method; rank 0 reads and writes.

    `identity`: the options that must be equal to resume, by name. `steps`: those of the whole run.
    """

    out_dir: Path
    identity: dict[str, Any]
    steps: int

    def require_same_run(self) -> None:
        """Raise UsageError where the folder holds a run of another identity or of more steps."""
        main_only(lambda: _require_same_run(self.out_dir, self.identity, self.steps))

    def claim(self) -> None:
        """Write run.json: from now on the folder is this run's. Call it once nothing can refuse the start."""
        run = {"steps": self.steps, **self.identity}
        text = json.dumps(run, indent=2, default=str).encode() + b"\n"
        main_only(lambda: atomic_write_bytes(self.out_dir / RUN, text))


@contextmanager
def lock_run_folder(out_dir: Path, identity: dict[str, Any], steps: int) -> Iterator[RunFolder]:
    """Create and lock `out_dir`; every rank calls it, rank 0 holds the lock while the block runs.

    Raises OutputError where another process trains into it, and what `require_same_run` raises.
    """
    folder = RunFolder(out_dir, identity, steps)
    locks: list[Any] = []  # on rank 0 only; the kernel releases it even if the process is killed

    def lock() -> None:
        with wrap_write_errors(out_dir):
            out_dir.mkdir(parents=True, exist_ok=True)
            locks.append((out_dir / ".lock").open("w"))
        try:
            fcntl.flock(locks[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OutputError(f"{out_dir} is in use by another training run; try another --out_dir") from error

    try:
        main_only(lock)
        folder.require_same_run()
        yield folder
    finally:
        for file in locks:
            file.close()


def _require_same_run(out_dir: Path, identity: dict[str, Any], steps: int) -> None:
    path = out_dir / RUN
    if not path.is_file():
        return
    try:
        stored = _BEFORE | {_RENAMED.get(key, key): value for key, value in json.loads(path.read_bytes()).items()}
        stored_steps = int(stored["steps"])
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise InputError(f"{path} is damaged; remove {out_dir} to start over") from error
    given = json.loads(json.dumps(identity, default=str))  # as it was written: lists for tuples
    differing = [
        f"{key} ({stored.get(key)} there, {value} now)" for key, value in given.items() if stored.get(key) != value
    ]
    if differing:
        raise UsageError(
            f"{out_dir} holds another run, which differs in {'; '.join(differing)}. "
            "Give the values it was started with to resume it, or choose another --out_dir"
        )
    if stored_steps > steps:
        raise UsageError(
            f"{out_dir} holds this run with --optim.steps {stored_steps}, and {steps} are given now; "
            "a run can be made longer, not shorter: choose another --out_dir"
        )
