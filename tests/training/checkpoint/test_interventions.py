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
from training.kernels.cross_entropy import IGNORE_INDEX
from training.rewind import ReadSequence, Rewind
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


def test_a_branch_learns_nothing_from_documents(
    stable: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two that its next steps read; what is read is the same, and the losses are those of the other documents."""
    run = replace(stable, out_dir=tmp_path / "run", optim=replace(stable.optim, steps=5))
    train(run)
    rewind = Rewind(run.out_dir)
    parts = [part for sequence in rewind.sequences(4) for part in sequence.parts]
    chosen = sorted({(part.shard, part.in_shard) for part in parts})[:2]
    names = tuple(f"{shard}@{number}" for shard, number in chosen)
    targets: dict[int, Any] = {}
    load = PrefetchLoader.batch

    def batch(loader: PrefetchLoader, step: int) -> Any:
        found = load(loader, step)
        targets[step + 1] = found.targets
        return found

    monkeypatch.setattr(PrefetchLoader, "batch", batch)
    train(replace(run, out_dir=tmp_path / "again"))
    before = dict(targets)
    capsys.readouterr()
    without = branch(run, tmp_path / "without", 2, steps=5)
    without = replace(without, data=replace(run.data, skip_documents=names))
    train(without)
    assert "; nothing is learnt from 2 documents" in capsys.readouterr().out
    left_out = sum(_targets_of(sequence, chosen) for sequence in rewind.sequences(4))
    masked = targets[4] == IGNORE_INDEX
    assert int(masked.sum()) == left_out > 0
    assert (targets[4][~masked] == before[4][~masked]).all()
    assert steps(without.out_dir, "loss")[4] != steps(run.out_dir, "loss")[4]
    assert interventions(without) == [{"after_step": 2, "skipped_documents": sorted(names)}]
    stored = json.loads((without.out_dir / "run.json").read_text())
    assert stored["data.skip_documents"] == sorted(names)
    train(replace(without, optim=replace(without.optim, steps=6)))  # resumes
    with pytest.raises(UsageError, match=r"differs in data.skip_documents"):
        train(replace(without, data=run.data, optim=replace(without.optim, steps=7)))
    assert sum(Rewind(without.out_dir).summarize(4).tokens.values()) == int((~masked).sum())
    more = branch(replace(without, data=replace(without.data, skip=0)), tmp_path / "more", 5, steps=6)
    train(replace(more, data=without.data))
    assert interventions(more) == interventions(without)


def _targets_of(sequence: ReadSequence, documents: list[tuple[str, int]]) -> int:
    """The targets of documents in a sequence, whose first token is none."""
    of_documents = [part for part in sequence.parts if (part.shard, part.in_shard) in documents]
    return sum(part.tokens - (part.first == 0) for part in of_documents)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ("81", "data.skip_documents has 81; expected SHARD@NUMBER, such as tokens_00000@81"),
        ("tokens@1", "data.train has no shard tokens; check its name"),
        (
            "shard-00000@9999",
            "has shard-00000@9999, and shard-00000 has 150 documents; expected a number from 0 to 149",
        ),
    ],
)
def test_a_document_that_is_none_is_refused(config: TrainConfig, document: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        train(replace(config, data=replace(config.data, skip_documents=(document,))))
