"""Branches that change a run on purpose: another learning rate with the optimizer's state, and data left out."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gristmill.errors import UsageError
from tests.training.checkpoint.test_branch import branch, stable, steps
from training.config import TrainConfig
from training.data.batches import PrefetchLoader
from training.train import train

__all__ = ["stable"]


def record_of(config: TrainConfig, step: int) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((config.out_dir / f"checkpoints/step-{step:08d}/record.json").read_text())
    return record


def interventions(config: TrainConfig) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((config.out_dir / "run.json").read_text())["interventions"]
    return found


def test_a_branch_at_another_rate_keeps_the_optimizer_s_state_when_asked(
    stable: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rate = stable.optim.lr
    faster = branch(stable, tmp_path / "fast", 2, lr=2 * rate, steps=5)
    with pytest.raises(UsageError, match=r"would jump from 1.00e-02 to 2.00e-02 there; .*, or --allow_lr_jump true"):
        train(faster)
    faster = replace(faster, allow_lr_jump=True)
    train(faster)
    assert "; the learning rate jumps from 1.00e-02 to 2.00e-02" in capsys.readouterr().out
    assert steps(faster.out_dir, "lr") == pytest.approx({3: 2 * rate, 4: 2 * rate, 5: 2 * rate})
    found = steps(faster.out_dir, "loss")
    assert found[3] == steps(stable.out_dir, "loss")[3] and found[4] != steps(stable.out_dir, "loss")[4]
    assert record_of(faster, 5)["updates"] == 5
    anew = replace(
        faster, out_dir=tmp_path / "anew", branch_from=None, init_from=faster.branch_from, allow_lr_jump=False
    )
    train(replace(anew, optim=replace(faster.optim, warmup_steps=0)))
    assert steps(anew.out_dir, "loss")[2] != found[4]  # its moments begin at zero
    jump = {"after_step": 2, "learning_rate": [rate, 2 * rate]}
    assert interventions(faster) == [jump]
    train(replace(faster, optim=replace(faster.optim, steps=6)))  # the same command resumes it
    assert interventions(faster) == [jump] and steps(faster.out_dir, "lr")[6] == 2 * rate
    train(branch(replace(faster, allow_lr_jump=False), tmp_path / "next", 5, steps=6))
    assert interventions(replace(faster, out_dir=tmp_path / "next")) == [jump]


def test_a_branch_warms_up_again(stable: TrainConfig, tmp_path: Path) -> None:
    rate = stable.optim.lr
    warm = {"schedule": "linear", "warmup_steps": 2, "warmup_from": 2, "min_lr": 0.0, "steps": 6}
    again = branch(stable, tmp_path / "warm", 2, **warm)
    with pytest.raises(UsageError, match=r"would jump from 1.00e-02 to 5.00e-03"):
        train(again)
    train(replace(again, allow_lr_jump=True))
    assert steps(tmp_path / "warm", "lr") == pytest.approx({3: rate / 2, 4: rate, 5: rate / 2, 6: 0.0})
    other = replace(branch(stable, tmp_path / "other", 4, **warm), allow_lr_jump=True)
    with pytest.raises(UsageError, match=r"warmup_from is 2, .* of step 4: .*; try --optim.warmup_from 4, or 0"):
        train(other)
    with pytest.raises(UsageError, match="warmup_from is 2, and this run begins at step 0"):
        train(replace(stable, out_dir=tmp_path / "new", optim=again.optim))


@pytest.mark.parametrize("mixed", [False, True])
def test_a_branch_leaves_data_out(
    stable: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mixed: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Of two steps; it reads what the run itself reads two steps later, also resumed, and branched off again."""
    read: dict[int, list[int]] = {}
    load = PrefetchLoader.batch

    def batch(loader: PrefetchLoader, step: int) -> Any:
        read[step] = loader.batches.global_indices(step, 1).tolist()
        return load(loader, step)

    monkeypatch.setattr(PrefetchLoader, "batch", batch)
    folders = (*stable.data.train_folders, stable.data.holdout) if mixed else stable.data.train
    run = replace(stable, out_dir=tmp_path / "long", data=replace(stable.data, train=folders))
    run = replace(run, optim=replace(run.optim, steps=12))
    train(run)
    expected = dict(read)
    read.clear()
    capsys.readouterr()
    skipping = branch(run, tmp_path / "skip", 2, steps=6)
    skipping = replace(skipping, data=replace(run.data, skip=2))
    train(skipping)
    size = run.data.batch_size
    assert f"; {2 * size} sequences left out, tokens seen are counted from there on" in capsys.readouterr().out
    train(replace(skipping, optim=replace(skipping.optim, steps=8)))
    assert read == {step: expected[step + 2] for step in range(2, 8)}
    assert interventions(skipping) == [{"after_step": 2, "skipped_sequences": 2 * size}]
    assert record_of(skipping, 8)["skipped"] == [[2, 2 * size]]
    read.clear()
    more = branch(skipping, tmp_path / "more", 6, steps=9)
    train(replace(more, data=replace(run.data, skip=1)))
    assert read == {step: expected[step + 3] for step in range(6, 9)}


def test_what_only_a_branch_can_have_is_refused(config: TrainConfig) -> None:
    with pytest.raises(UsageError, match="allow_lr_jump is given without branch_from"):
        train(replace(config, allow_lr_jump=True))
    with pytest.raises(UsageError, match=r"data.skip is given without branch_from: only a branch can have it; try"):
        train(replace(config, data=replace(config.data, skip=3)))
