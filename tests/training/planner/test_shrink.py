"""Shrunk published runs: their architecture and shape are the published ones, and they train."""

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from gristmill.config import load_config
from gristmill_planner.published_runs import (
    PublishedRun,
    find_published_run,
    published_runs,
    shrunk_config,
    shrunk_layout,
)
from training.config import TrainConfig
from training.data.batch_schedule import BatchSplit
from training.experimental.parallel_config import ParallelConfig
from training.reporting.metrics_file import METRICS, read_metrics

SIZES = {"layers", "width", "heads", "kv_heads", "head_dim", "ffn_width", "vocab_size", "context"}


def shrunk(each: PublishedRun, folder: Path) -> TrainConfig:
    path = folder / "shrunk.toml"
    path.write_text(shrunk_config(each))
    return load_config(
        TrainConfig, ["--config", str(path), "--out_dir", "o", "--data.train", "t", "--data.holdout", "h"]
    )


@pytest.mark.parametrize("each", published_runs(), ids=lambda each: each.name)
def test_every_one_has_its_architecture_and_shape(each: PublishedRun, tmp_path: Path) -> None:
    config = shrunk(each, tmp_path)
    config.check()
    model = config.model.resolve(300, config.data.seq_len)
    layout, published = config.parallel.resolve(8, model, config.data.seq_len), each.run.layout
    BatchSplit.of(config.data, layout)
    same = {name: value for name, value in asdict(each.run.model).items() if name not in SIZES}
    assert {name: getattr(model, name) for name in same} == same
    assert model.ffn_width / model.width == pytest.approx(each.run.model.ffn_width / each.run.model.width, rel=0.2)
    for name in ("dp", "tp", "pp", "micro_batches"):
        assert (getattr(layout, name) > 1) == (getattr(published, name) > 1), name
    for name in ("zero", "schedule", "virtual_stages", "sequence_parallel"):
        assert getattr(layout, name) == getattr(published, name), name
    assert config.memory.recompute == "full" and config.optim.steps == 20


def test_what_is_left_goes_to_the_largest_degree() -> None:
    assert shrunk_layout(ParallelConfig(dp=124, tp=8, zero=3, zero_group=124, micro_batches=1)).describe() == (
        "dp 4 x ZeRO-3 x tp 2"
    )
    assert shrunk_layout(ParallelConfig(dp=2, pp=64, virtual_stages=1, micro_batches=128)).pp == 4


@pytest.mark.thorough
def test_one_trains(corpus: Path, tmp_path: Path, train_in_ranks: Callable[[int, Path, list[str]], None]) -> None:
    """For a few steps; rows of the benchmark bench_presets.py train all of them for 20."""
    path = tmp_path / "bloom.toml"
    path.write_text(shrunk_config(find_published_run("bloom-176b")))
    data = [f"--data.{name}={corpus / 'tokens' / name}" for name in ("train", "holdout")]
    few = ["--optim.steps", "5", "--eval.sequences", "1", "--metrics.tensorboard", "false"]
    train_in_ranks(8, tmp_path / "run", ["--config", str(path), *data, *few])
    losses = [record["loss"] for record in read_metrics(tmp_path / "run" / METRICS) if record["kind"] == "step"]
    assert len(losses) == 5
    assert losses[0] == pytest.approx(math.log(1024), abs=0.3)
    assert losses[-1] < losses[0] - 0.2
