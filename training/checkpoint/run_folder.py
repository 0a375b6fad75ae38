"""Which run an output folder holds: `run.json`, compared before a run goes on in it."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gristmill.errors import InputError, OutputError, UsageError, writing
from gristmill.io.files import atomic_write_bytes
from training.distributed.mesh import World

RUN = "run.json"


@contextmanager
def claim(out_dir: Path, run: dict[str, Any], steps: int, world: World) -> Iterator[None]:
    """Hold `out_dir` for this run while the block lasts.

    Raises UsageError where it holds another run, or more steps than are wanted now; OutputError where
    another process is training into it.
    """
    locks: list[Any] = []  # on the main process alone; the kernel lets go of it however the process ends

    def take() -> None:
        with writing(out_dir):
            out_dir.mkdir(parents=True, exist_ok=True)
            locks.append((out_dir / ".lock").open("w"))
        try:
            fcntl.flock(locks[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OutputError(f"{out_dir} is in use by another training run; try another --out_dir") from error
        _compare(out_dir, run, steps)
        atomic_write_bytes(out_dir / RUN, json.dumps({"steps": steps, **run}, indent=2, default=str).encode() + b"\n")

    try:
        world.main_only(take)
        yield
    finally:
        for lock in locks:
            lock.close()


def _compare(out_dir: Path, run: dict[str, Any], steps: int) -> None:
    path = out_dir / RUN
    if not path.is_file():
        return
    try:
        held = json.loads(path.read_bytes())
    except ValueError as error:
        raise InputError(f"{path} is damaged; remove {out_dir} to begin again") from error
    wanted = json.loads(json.dumps(run, default=str))  # as it was written: lists for tuples
    differing = [
        f"{key} ({held.get(key)} there, {value} now)" for key, value in wanted.items() if held.get(key) != value
    ]
    if differing:
        raise UsageError(
            f"{out_dir} holds another run, which differs in {'; '.join(differing)}. "
            "Give the values it was started with to go on, or choose another --out_dir"
        )
    if held["steps"] > steps:
        raise UsageError(
            f"{out_dir} holds this run with --optim.steps {held['steps']}, and {steps} were asked for now; "
            "a run can be made longer, not shorter: choose another --out_dir"
        )
