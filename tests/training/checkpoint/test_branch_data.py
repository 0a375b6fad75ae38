"""Branches read on in every data set where it was left, whatever their folders, paths and seeds."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from gristmill.errors import UsageError
from tests.training.conftest import write_shards
from training.checkpoint.checkpoint_config import CheckpointConfig
from training.checkpoint.record import RECORD, CheckpointRecord, encode_record
from training.config import TrainConfig
from training.data.batches import PrefetchLoader
from training.model.batch import TokenBatch
from training.reporting.metrics_file import METRICS, read_metrics
from training.train import train

BATCH, SIZE = 4, 40  # sequences of a batch and of each set: an epoch of one set is ten steps
Read = list[tuple[str, int]]


class Stage(NamedTuple):
    """A run, or a branch off the one before: folders by their letters, and its steps."""

    folders: str
    steps: int
    seed: int = 1
    order: str = "keyed"


@pytest.fixture
def base(config: TrainConfig, corpus: Path, tmp_path: Path) -> TrainConfig:
    """Data sets a, b and c of `SIZE` sequences each."""
    random = np.random.default_rng(7)
    for name in "abc":
        ids = random.integers(3, 300, (SIZE, 16)).tolist()
        write_shards(tmp_path / name, [[*ids, [1]]], corpus / "tokenizer.model")
    optim = replace(config.optim, schedule="wsd", warmup_steps=1)
    return replace(
        config,
        optim=optim,
        data=replace(config.data, batch_size=BATCH),
        eval=replace(config.eval, sample_tokens=0),
        checkpoint=CheckpointConfig(every=2, keep=99),
    )


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Read:
    """The sequences that are trained on, as (set, number)."""
    sequences: Read = []
    load = PrefetchLoader.batch

    def batch(loader: PrefetchLoader, step: int) -> TokenBatch:
        data = loader.batches.data
        for number, _, rows in data.by_set(loader.batches.global_indices(step, 1)):
            sequences.extend((data.sets[number].folder.name, row) for row in rows.tolist())
        return load(loader, step)

    monkeypatch.setattr(PrefetchLoader, "batch", batch)
    return sequences


def run_of(base: TrainConfig, root: Path, out_dir: Path, stage: Stage, before: int, source: Path | None) -> TrainConfig:
    data = replace(base.data, train=tuple(root / letter for letter in stage.folders), order=stage.order)
    optim = replace(base.optim, steps=before + stage.steps)
    return replace(base, out_dir=out_dir, data=data, seed=stage.seed, optim=optim, branch_from=source)


def train_stages(base: TrainConfig, root: Path, stages: list[Stage], first_steps: int = 0) -> TrainConfig:
    """Train each stage as a branch off the one before; the last one in two goes, if `first_steps` are given."""
    done = 0
    source = None
    for number, stage in enumerate(stages):
        config = run_of(base, root, root / f"run-{number}", stage, done, source)
        if first_steps and number == len(stages) - 1:
            config = replace(config, out_dir=root / "halted")
            train(replace(config, optim=replace(config.optim, steps=done + first_steps)))
        train(config)
        done += stage.steps
        source = root / f"run-{number}/checkpoints/step-{done:08d}"
    return config


def losses(config: TrainConfig) -> list[float]:
    return [record["loss"] for record in read_metrics(config.out_dir / METRICS) if record["kind"] == "step"]


STAGES = {
    "from one folder to another": [Stage("a", 5), Stage("b", 10)],
    "with another seed": [Stage("a", 5), Stage("a", 5, seed=2)],
    "in another kind of order": [Stage("a", 5, order="randperm"), Stage("a", 5)],
    "from a mix to one of its folders": [Stage("ab", 10), Stage("b", 5)],
    "from a mix to a folder that is not of it": [Stage("ab", 8), Stage("c", 10)],
    "a mix with another seed": [Stage("ab", 10), Stage("ab", 10, seed=2)],
    "from one folder to a mix": [Stage("a", 5), Stage("bca", 15)],
    "from one folder to a mix with another seed": [Stage("a", 5, order="randperm"), Stage("ca", 10, seed=3)],
    "away and back": [Stage("a", 5), Stage("b", 3), Stage("a", 5), Stage("b", 7)],
    "away and back over mixes": [Stage("ab", 6), Stage("c", 3), Stage("ba", 8), Stage("cb", 8, seed=4)],
}


@pytest.mark.parametrize("stages", STAGES.values(), ids=STAGES)
def test_no_sequence_is_read_twice_before_its_set_was_read_once(
    base: TrainConfig, tmp_path: Path, read: Read, stages: list[Stage]
) -> None:
    train_stages(base, tmp_path, stages)
    for letter in "abc":
        of_set = [number for name, number in read if name == letter]
        first_epoch = of_set[:SIZE]
        assert len(set(first_epoch)) == len(first_epoch)
        assert len(set(of_set[SIZE:])) == len(of_set[SIZE:]) or len(of_set) > 2 * SIZE


@pytest.mark.every(3)
@pytest.mark.parametrize("stages", STAGES.values(), ids=STAGES)
def test_a_branch_that_is_resumed_reads_what_it_would_have_read(
    base: TrainConfig, tmp_path: Path, stages: list[Stage]
) -> None:
    whole = train_stages(base, tmp_path, stages)
    halted = train_stages(base, tmp_path, stages, first_steps=2)
    assert halted.out_dir != tmp_path / "run-0"
    assert losses(halted) == losses(replace(whole, out_dir=tmp_path / f"run-{len(stages) - 1}"))


@pytest.mark.parametrize("moved", [False, True])
def test_a_data_set_is_known_wherever_it_lies(
    base: TrainConfig, tmp_path: Path, read: Read, monkeypatch: pytest.MonkeyPatch, moved: bool
) -> None:
    stages = [Stage("ab", 4), Stage("ba", 6)]
    whole = losses(train_stages(base, tmp_path, stages))
    monkeypatch.chdir(tmp_path)
    branch = run_of(base, Path(), tmp_path / "relative", stages[1], 4, Path("run-0/checkpoints/step-00000004"))
    train(replace(branch, optim=replace(branch.optim, steps=6)))
    root = tmp_path
    if moved:
        root = tmp_path / "elsewhere"
        root.mkdir()
        for name in "ab":
            (tmp_path / name).rename(root / name)
    train(run_of(base, root, tmp_path / "relative", stages[1], 4, None))
    assert losses(branch) == whole


def test_checkpoints_of_earlier_releases_name_sets_by_folders(base: TrainConfig, tmp_path: Path, read: Read) -> None:
    stages = [Stage("ab", 10), Stage("b", 5, seed=2)]
    train_stages(base, tmp_path, stages[:1])
    path = tmp_path / "run-0/checkpoints/step-00000010" / RECORD
    record = msgspec.json.decode(path.read_bytes(), type=CheckpointRecord)

    def earlier(encoded: dict[str, Any]) -> dict[str, Any]:
        places = encoded["data"]["sets"].values()
        named = zip((tmp_path / "a", tmp_path / "b"), places, strict=True)
        sets = {str(folder): {key: place[key] for key in ("order", "before", "read")} for folder, place in named}
        return {**encoded, "data": {"start": encoded["data"]["start"], "sets": sets}}

    path.write_bytes(encode_record(msgspec.convert(earlier(msgspec.to_builtins(record)), CheckpointRecord)))
    train(run_of(base, tmp_path, tmp_path / "branch", stages[1], 10, path.parent))
    of_b = [number for name, number in read if name == "b"]
    assert len(of_b) == SIZE == len(set(of_b))


def test_a_data_set_that_is_named_twice_is_refused(base: TrainConfig, tmp_path: Path) -> None:
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    data = replace(base.data, train=(tmp_path / "a", tmp_path / "copy"))
    with pytest.raises(UsageError, match=r"names .*/a and .*/copy, which hold the same token shards; expected each"):
        train(replace(base, data=data))
