"""Runs with compressed gradients: resumed bit for bit, taken over by other numbers of replicas, refused where not."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gristmill.errors import UsageError
from tests.training.parallel.test_layouts import recorded
from training.checkpoint.checkpoint_config import CheckpointConfig
from training.config import TrainConfig
from training.distributed.process_group import init_distributed
from training.distributed.rank_pool import RankError
from training.experimental.compression.bucket import buckets_of
from training.experimental.parallel_config import ParallelConfig
from training.run_plan import RunPlan
from training.train import train
from training.trainer import Trainer

RunRanks = Callable[..., list[Any]]
Method = Literal["powersgd", "int8"]


@pytest.fixture
def short(config: TrainConfig) -> TrainConfig:
    """Eight steps of a constant rate, saved after each two."""
    optim = replace(config.optim, steps=8, min_lr=config.optim.lr)
    return replace(config, optim=optim, checkpoint=CheckpointConfig(every=2, keep=9))


def layout(method: Method, **others: Any) -> ParallelConfig:
    return ParallelConfig(compression=method, compression_rank=2 if method == "powersgd" else 4, **others)


def of_steps(config: TrainConfig, steps: int, out_dir: Path, how: ParallelConfig) -> TrainConfig:
    return replace(config, optim=replace(config.optim, steps=steps), out_dir=out_dir, parallel=how)


def saved(out_dir: Path) -> dict[str, object]:
    """Return the files of the last checkpoint; of its record all but when and how the run was started."""
    folder = out_dir / "checkpoints/step-00000008"
    files: dict[str, object] = {path.name: path.read_bytes() for path in folder.iterdir()}
    record = json.loads((folder / "record.json").read_text())
    files["record.json"] = {name: value for name, value in record.items() if name not in ("start", "checksum")}
    return files


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("method", "ranks", "others"),
    [("powersgd", 2, {}), ("powersgd", 4, {"tp": 2}), ("int8", 2, {}), ("int8", 4, {"pp": 2})],
)
def test_a_run_resumes_bit_for_bit(
    short: TrainConfig, run_ranks: RunRanks, tmp_path: Path, method: Method, ranks: int, others: dict[str, Any]
) -> None:
    how = layout(method, **others)
    run_ranks(ranks, train, of_steps(short, 8, tmp_path / "through", how))
    for steps in (4, 8):
        run_ranks(ranks, train, of_steps(short, steps, tmp_path / "resumed", how))
    losses = recorded(tmp_path / "resumed")[0]
    assert losses[-1] == recorded(tmp_path / "through")[0][-1] and losses[-1][1] < 0.9 * losses[0][1]
    assert saved(tmp_path / "resumed") == saved(tmp_path / "through")


def unsent(config: TrainConfig) -> dict[str, Tensor]:
    """The sum over the replicas of what they have left out, by parameter, when the run is resumed."""
    with init_distributed("cpu") as device, Trainer(RunPlan.of(config), device) as trainer:
        trainer.load()
        buckets = buckets_of(trainer.model.reducers)
        found = {name: error.double() for bucket in buckets for name, error in bucket.errors.items()}
        for error in found.values():
            dist.all_reduce(error, group=trainer.world.axis("replicate").group)
        return found


@pytest.mark.thorough
def test_other_numbers_of_replicas_take_over_what_was_left_out(
    short: TrainConfig, run_ranks: RunRanks, tmp_path: Path
) -> None:
    how = layout("powersgd")
    run_ranks(3, train, of_steps(short, 4, tmp_path, how))
    expected = run_ranks(3, unsent, of_steps(short, 8, tmp_path, how))[0]
    assert len(expected) == 16 and all(error.any() for error in expected.values())
    for ranks in (2, 4):
        for found in run_ranks(ranks, unsent, of_steps(short, 8, tmp_path, how)):
            for name, error in expected.items():
                assert torch.allclose(found[name], error, rtol=1e-5, atol=1e-7), name
    run_ranks(4, train, of_steps(short, 8, tmp_path, layout("powersgd", tp=2)))  # pieces of both, and new Q
    assert recorded(tmp_path)[0][-1][0] == 8


def test_a_branch_of_a_run_without_compression_begins_with_nothing_left_out(
    short: TrainConfig, run_ranks: RunRanks, tmp_path: Path
) -> None:
    run_ranks(2, train, of_steps(short, 4, tmp_path / "whole", ParallelConfig()))
    branch = replace(of_steps(short, 8, tmp_path / "branch", layout("int8")), branch_from=tmp_path / "whole")
    assert not any(error.any() for error in run_ranks(2, unsent, branch)[0].values())
    run_ranks(2, train, branch)


def test_a_run_keeps_its_compression(short: TrainConfig, run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(2, train, of_steps(short, 4, tmp_path, layout("int8")))
    for other in (ParallelConfig(), layout("powersgd")):
        with pytest.raises(RankError, match=r"differs in parallel.compression \(int8 there"):
            run_ranks(2, train, of_steps(short, 8, tmp_path, other))


def test_fp16_is_refused(short: TrainConfig) -> None:
    with pytest.raises(UsageError, match="another scale of the loss; try --precision bf16"):
        train(replace(short, precision="fp16", parallel=layout("int8", dp=2)))
