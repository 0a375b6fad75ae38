"""Run folder: one run per output folder, described by run.json and locked while it trains."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gristmill.errors import InputError, OutputError, UsageError, wrap_write_errors
from gristmill.io.files import atomic_write_bytes
from training.distributed.mesh import World
from training.model.model_config import ModelConfig
from training.optim.optim_config import OptimConfig

RUN = "run.json"
# old names of options to new, for folders that an earlier release began
_RENAMED = {
    f"{section}.{old}": f"{section}.{new}"
    for section, options in (("model", ModelConfig), ("optim", OptimConfig))
    for old, new in options.RENAMED.items()
}


@contextmanager
def lock_run_folder(out_dir: Path, identity: dict[str, Any], steps: int, world: World) -> Iterator[None]:
    """Create and lock `out_dir` for this run; every rank calls it, rank 0 holds the lock while the block runs.

    `identity`: the options that must be equal to resume, by name. Raises UsageError where the folder holds a run of
    another identity or of more steps, OutputError where another process trains into it.
    """
    locks: list[Any] = []  # on rank 0 only; the kernel releases it even if the process is killed

    def lock() -> None:
        with wrap_write_errors(out_dir):
            out_dir.mkdir(parents=True, exist_ok=True)
            locks.append((out_dir / ".lock").open("w"))
        try:
            fcntl.flock(locks[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OutputError(f"{out_dir} is in use by another training run; try another --out_dir") from error
        _require_same_run(out_dir, identity, steps)
        run = {"steps": steps, **identity}
        atomic_write_bytes(out_dir / RUN, json.dumps(run, indent=2, default=str).encode() + b"\n")

    try:
        world.main_only(lock)
        yield
    finally:
        for file in locks:
            file.close()


def _require_same_run(out_dir: Path, identity: dict[str, Any], steps: int) -> None:
    path = out_dir / RUN
    if not path.is_file():
        return
    try:
        stored = json.loads(path.read_bytes())
    except ValueError as error:
        raise InputError(f"{path} is damaged; remove {out_dir} to start over") from error
    stored = {_RENAMED.get(key, key): value for key, value in stored.items()}
    given = json.loads(json.dumps(identity, default=str))  # as it was written: lists for tuples
    differing = [
        f"{key} ({stored.get(key)} there, {value} now)" for key, value in given.items() if stored.get(key) != value
    ]
    if differing:
        raise UsageError(
            f"{out_dir} holds another run, which differs in {'; '.join(differing)}. "
            "Give the values it was started with to resume it, or choose another --out_dir"
        )
    if stored["steps"] > steps:
        raise UsageError(
            f"{out_dir} holds this run with --optim.steps {stored['steps']}, and {steps} are given now; "
            "a run can be made longer, not shorter: choose another --out_dir"
        )
