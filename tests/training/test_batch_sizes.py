"""Runs whose batch size changes, by a ramp, at a resume or at a branch: no sequence is repeated or left out."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from gristmill.errors import UsageError
from training.checkpoint.checkpoint_config import CheckpointConfig
from training.checkpoint.record import checksum_of
from training.config import TrainConfig
from training.data.batches import PrefetchLoader
from training.model.batch import TokenBatch
from training.reporting.metrics_file import METRICS, read_metrics
from training.train import train

Read = list[Tensor]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[Read]:
    """The inputs of every batch that is trained on, in order."""
    read: Read = []
    load = PrefetchLoader.batch

    def loaded(loader: PrefetchLoader, step: int) -> TokenBatch:
        read.append((batch := load(loader, step)).ids)
        return batch

    monkeypatch.setattr(PrefetchLoader, "batch", loaded)
    yield read


def run_of(config: TrainConfig, steps: int, size: int, *ramp: str) -> TrainConfig:
    return replace(
        config,
        data=replace(config.data, batch_size=size, batch_ramp=ramp),
        optim=replace(config.optim, steps=steps, decay_steps=12),
        eval=replace(config.eval, sample_tokens=0, every=0),
        checkpoint=CheckpointConfig(every=2, keep=9, async_save=False),
    )


def rows(batches: Read) -> list[tuple[int, ...]]:
    return [tuple(row) for batch in batches for row in batch.tolist()]


def losses(out_dir: Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in read_metrics(out_dir / METRICS) if r["kind"] == "step"}


@pytest.mark.parametrize("branches", [False, True])
def test_another_batch_size_goes_on_where_the_run_was(
    config: TrainConfig, tmp_path: Path, read: Read, branches: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    train(run_of(replace(config, out_dir=tmp_path / "whole"), 6, 8))
    whole = rows(read)
    read.clear()
    train(run_of(config, 4, 8))
    start = {"out_dir": tmp_path / "branch", "branch_from": config.out_dir} if branches else {}
    resumed = replace(config, **start)  # type: ignore[arg-type]
    train(run_of(resumed, 6, 4))
    train(run_of(resumed, 7, 8))  # and once more, from checkpoints that know both sizes
    assert [len(batch) for batch in read] == [8] * 4 + [4] * 2 + [8]
    assert rows(read)[:48] == whole and len(set(rows(read))) == 48
    assert "sequences per step: 8 until step 4, then 4\n" in (said := capsys.readouterr().out)
    assert "sequences per step: 8 until step 4, 4 until step 6, then 8\n" in said
    rates = {r["step"]: r["tokens_per_second"] * r["step_seconds"] for r in read_metrics(resumed.out_dir / METRICS)
             if r["kind"] == "step"}  # fmt: skip
    assert rates[6] == pytest.approx(4 * 16) and rates[7] == pytest.approx(8 * 16)


def test_a_ramp_resumes_in_its_middle_bit_for_bit(config: TrainConfig, tmp_path: Path, read: Read) -> None:
    ramp = "4:200", "8:600"  # 4 steps of 64 tokens, 3 of 128
    train(run_of(config, 10, 12, *ramp))
    assert [len(batch) for batch in read] == [4] * 4 + [8] * 3 + [12] * 3
    read.clear()
    train(run_of(replace(config, out_dir=tmp_path / "large"), 5, 15))  # the same sequences in other batches
    whole = rows(read)
    for stop in (2, 6):
        read.clear()
        other = replace(config, out_dir=tmp_path / f"stopped-{stop}")
        train(run_of(other, stop, 12, *ramp))
        train(run_of(other, 10, 12, *ramp))
        assert losses(other.out_dir) == losses(config.out_dir) and rows(read)[:75] == whole[:75]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("processes", "layout"),
    [(2, ["--parallel.dp", "2"]), (2, ["--parallel.pp", "2", "--parallel.micro_batches", "2"]),
     (2, ["--parallel.cp", "2"]), (2, ["--parallel.tp", "2"])],
)  # fmt: skip
def test_every_layout_takes_the_same_steps_of_a_ramp(
    corpus: Path,
    tmp_path: Path,
    train_in_ranks: Callable[[int, Path, list[str]], None],
    processes: int,
    layout: list[str],
) -> None:
    options = {
        "data.train": corpus / "tokens/train", "data.holdout": corpus / "tokens/holdout", "data.seq_len": 16,
        "data.batch_size": 12, "model.layers": 2, "model.width": 32, "device": "cpu", "precision": "fp64",
        "optim.steps": 7, "optim.lr": 1e-2, "optim.warmup_steps": 2, "eval.every": 0, "eval.sample_tokens": 0,
    }  # fmt: skip
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    words += ["--data.batch_ramp", "4:128", "8:384"]
    found = {}
    for name, size, more in (("one", 1, []), ("many", processes, layout)):
        train_in_ranks(size, tmp_path / name, [*words, *more])
        found[name] = losses(tmp_path / name)
    assert found["many"] == pytest.approx(found["one"], rel=1e-9)


def test_what_a_ramp_and_an_earlier_release_cannot_have_is_refused(config: TrainConfig) -> None:
    ramp = run_of(config, 2, 8, "3:64")
    with pytest.raises(UsageError, match=r"data.batch_ramp 3 is not divisible by .*; try --data.batch_ramp 4:64"):
        train(replace(ramp, parallel=replace(ramp.parallel, micro_batches=2)))
    train(run_of(config, 2, 8))
    record = config.out_dir / "checkpoints/step-00000002/record.json"
    fields = json.loads(record.read_text())
    del fields["batch_sizes"]  # as earlier releases wrote it
    record.write_text(json.dumps({**fields, "checksum": checksum_of(fields)}))
    with pytest.raises(UsageError, match=r"began this run with data.batch_size 8, .*; give --data.batch_size 8, or"):
        train(run_of(config, 4, 4))
    train(run_of(config, 4, 8))
