"""Damaged token shards end a run with an error that names the file; none is trained on up to a checkpoint."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gristmill.errors import InputError
from training.config import TrainConfig
from training.data.sequences import TokenSequences
from training.features import ShardVerifier
from training.train import train

SHARD = "shard-00001"


@pytest.fixture
def copied(config: TrainConfig, tmp_path: Path) -> TrainConfig:
    """The run, on a copy of the train shards."""
    folder = tmp_path / "tokens"
    shutil.copytree(config.data.train, folder)
    (tmp_path / "tokenizer.model").symlink_to(config.data.train.parents[1] / "tokenizer.model")
    manifest = (folder / "manifest.json").read_text().replace("../../tokenizer.model", "../tokenizer.model")
    (folder / "manifest.json").write_text(manifest)
    return replace(config, data=replace(config.data, train=folder))


def overwrite(path: Path, data: bytes, position: int = 200) -> None:
    whole = bytearray(path.read_bytes())
    whole[position : position + len(data)] = data
    path.write_bytes(whole)


def another_run(folder: Path) -> None:
    for suffix in (".bin", ".idx"):
        shutil.copy(folder / f"shard-00000{suffix}", folder / f"{SHARD}{suffix}")


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "ids beyond the vocabulary": (
        lambda folder: overwrite(folder / f"{SHARD}.bin", bytes(range(1, 65))),
        rf"{SHARD}.bin is damaged: it holds id 16447; expected ids from 0 to 299",
    ),
    "other ids of the vocabulary": (
        lambda folder: overwrite(folder / f"{SHARD}.bin", np.arange(100, 132, dtype="<u2").tobytes()),
        rf"{SHARD}.bin is damaged or from another run: its SHA-256",
    ),
    "index": (
        lambda folder: overwrite(folder / f"{SHARD}.idx", bytes(range(64))),
        rf"{SHARD}.idx is damaged or from another run: its SHA-256",
    ),
    "index header": (lambda folder: overwrite(folder / f"{SHARD}.idx", bytes(64), 0), "is not a Megatron index"),
    "cut": (lambda folder: (folder / f"{SHARD}.bin").write_bytes(bytes(64)), "hold 32 tokens of 100 documents"),
    "gone": (lambda folder: (folder / f"{SHARD}.bin").unlink(), rf"{SHARD}.bin is not readable \(No such file"),
    "of another run": (another_run, "tokens of 150 documents as uint16; manifest.json says"),
    "manifest": (lambda folder: overwrite(folder / "manifest.json", bytes(64)), "manifest.json is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_shard_ends_the_run_before_its_first_checkpoint(copied: TrainConfig, damage: str) -> None:
    harm, message = DAMAGE[damage]
    harm(copied.data.train)
    with pytest.raises(InputError, match=f"(?s){message}.*run tokenize_corpus again"):
        train(copied)
    assert not list(copied.out_dir.glob("checkpoints/step-*"))


def test_only_sizes_are_compared_when_asked(copied: TrainConfig) -> None:
    overwrite(copied.data.train / f"{SHARD}.bin", np.arange(100, 132, dtype="<u2").tobytes())
    train(replace(copied, data=replace(copied.data, verify="size"), optim=replace(copied.optim, steps=1)))


def test_the_ranks_verify_every_shard_once_between_them(config: TrainConfig) -> None:
    data = [TokenSequences(folder, 16) for folder in (config.data.train, config.data.holdout)]
    ranks: list[Any] = [SimpleNamespace(world=SimpleNamespace(rank=rank, size=2)) for rank in range(2)]
    verifiers = [ShardVerifier(data, checkpoints, print) for checkpoints in ranks]
    assert [len(verifier._reads) for verifier in verifiers] == [2, 1]
    assert all(verifier.done(60.0) or verifier.done(60.0) for verifier in verifiers)
    for verifier in verifiers:
        verifier.close()


def test_an_id_beyond_the_vocabulary_is_found_in_each_batch(copied: TrainConfig) -> None:
    data = TokenSequences(copied.data.train, 16)
    overwrite(copied.data.train / f"{SHARD}.bin", bytes(range(1, 65)), 0)
    first = int(data.starts[1]) // 16
    assert data.batch([0]).shape == (1, 17)
    for at in (first, first + 1):  # across the shards, and inside the second
        with pytest.raises(InputError, match=rf"{SHARD}.bin is damaged"):
            data.batch([at])
