"""Which run an output folder holds: `run.json`, compared before a run goes on in it."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from pipeline.errors import InputError, OutputError, UsageError, writing
from pipeline.files import write_whole
from pipeline.tokens import Manifest
from training.config import ModelConfig, TrainConfig
from training.mesh import World

RUN = "run.json"


def identity(config: TrainConfig, model: ModelConfig, train: Manifest, holdout: Manifest) -> dict[str, Any]:
    """What makes a run this run, by key. Neither where the files lie, nor how many processes share the work."""
    optim = {f"optim.{key}": value for key, value in asdict(config.optim).items() if key != "steps"}
    return {
        **{f"model.{key}": value for key, value in asdict(model).items() if key != "preset"},
        "data.train": _fingerprint(train),
        "data.holdout": _fingerprint(holdout),
        "data.seq_len": config.data.seq_len,
        "data.batch_size": config.data.batch_size,
        **optim,
        "seed": config.seed,
        "precision": config.precision,
    }


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
        write_whole(out_dir / RUN, json.dumps({"steps": steps, **run}, indent=2, default=str).encode() + b"\n")

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


def _fingerprint(manifest: Manifest) -> str:
    return sha256(msgspec.json.encode([shard.sha256 for shard in manifest.shards])).hexdigest()[:16]
