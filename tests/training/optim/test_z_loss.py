"""A run with a z-loss shows it apart, under every layout alike, and not in the loss."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from training.config import TrainConfig
from training.experimental.parallel_config import ParallelConfig
from training.reporting.metrics_file import METRICS, read_metrics
from training.train import train


def records(out_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_metrics(out_dir / METRICS) if record["kind"] == kind]


def test_a_z_loss_is_shown_apart(config: TrainConfig, run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    plain = replace(config, optim=replace(config.optim, steps=2), eval=replace(config.eval, sample_tokens=0))
    train(plain)
    run = replace(plain, out_dir=tmp_path / "z", optim=replace(plain.optim, z_loss=0.01))
    train(run)
    split = replace(run, out_dir=tmp_path / "split", parallel=ParallelConfig(tp=2, micro_batches=2))
    run_ranks(2, train, split)
    without, one, two = (records(each.out_dir, "step") for each in (plain, run, split))
    assert "z_loss" not in without[0] and without[0]["loss"] == one[0]["loss"] != one[0]["loss"] + one[0]["z_loss"]
    assert one[0]["z_loss"] == pytest.approx(0.01 * 5.70**2, rel=0.05)  # of even logits: log 300, squared
    assert one[1]["loss"] != without[1]["loss"]  # it was minimised, too
    assert [r["z_loss"] for r in two] == pytest.approx([r["z_loss"] for r in one], rel=1e-4)


def test_a_pipeline_counts_no_z_loss_of_the_pass_in_which_torch_learns_shapes(
    config: TrainConfig, run_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    one = replace(
        config,
        optim=replace(config.optim, steps=2, z_loss=0.01),
        eval=replace(config.eval, sample_tokens=0),
    )
    train(one)
    split = replace(one, out_dir=tmp_path / "split", parallel=ParallelConfig(pp=2, micro_batches=2))
    run_ranks(2, train, split)
    expected, found = ([r["z_loss"] for r in records(each.out_dir, "step")] for each in (one, split))
    assert found == pytest.approx(expected, rel=1e-4)
