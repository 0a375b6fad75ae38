"""Branches off a run: they continue it exactly, decay from there, and are refused where the rate would jump."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gristmill.errors import InputError, UsageError
from gristmill.io.token_shards import Manifest
from training.checkpoint.checkpoint_config import CheckpointConfig
from training.config import TrainConfig
from training.reporting.metrics_file import METRICS, read_metrics
from training.train import train


def with_optim(config: TrainConfig, **options: Any) -> TrainConfig:
    return replace(config, optim=replace(config.optim, **options))


@pytest.fixture
def stable(config: TrainConfig) -> TrainConfig:
    """A WSD run of four steps that does not decay, trained, with checkpoints of steps 2 and 4."""
    config = replace(config, eval=replace(config.eval, sample_tokens=0), checkpoint=CheckpointConfig(every=2, keep=9))
    config = with_optim(config, schedule="wsd", steps=4, warmup_steps=1)
    train(config)
    return config


def branch(of: TrainConfig, out_dir: Path, step: int, **options: Any) -> TrainConfig:
    source = of.out_dir / f"checkpoints/step-{step:08d}"
    return with_optim(replace(of, out_dir=out_dir, branch_from=source), **options)


def steps(out_dir: Path, value: str) -> dict[int, float]:
    return {record["step"]: record[value] for record in read_metrics(out_dir / METRICS) if record["kind"] == "step"}


def test_a_branch_continues_the_run_exactly_and_decays(
    stable: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decaying = branch(stable, tmp_path / "decay", 2, steps=5, cooldown_steps=3, min_lr=0.0)
    train(decaying)
    assert "branching from" in (said := capsys.readouterr().out) and "after its step 2" in said
    train(branch(stable, tmp_path / "same", 2))
    assert steps(tmp_path / "same", "loss") == {s: x for s, x in steps(stable.out_dir, "loss").items() if s > 2}
    assert "with other data" not in capsys.readouterr().out
    found, rate = steps(tmp_path / "decay", "loss"), stable.optim.lr
    assert found[3] == steps(stable.out_dir, "loss")[3] and found[4] != steps(stable.out_dir, "loss")[4]
    assert steps(tmp_path / "decay", "lr") == pytest.approx({3: rate * 2 / 3, 4: rate / 3, 5: 0.0})
    assert train(decaying).steps == 5  # the same command resumes the branch, and never branches again
    assert "resuming from" in capsys.readouterr().out


def test_tokens_seen_of_a_branch_with_other_data_are_of_its_own_steps(
    stable: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def seen(config: TrainConfig) -> dict[str, Any]:
        train(config)
        return [record for record in read_metrics(config.out_dir / METRICS) if record["kind"] == "data"][-1]

    mixed = branch(stable, tmp_path / "mixed", 2, steps=3)
    mixed = replace(mixed, data=replace(mixed.data, train=(mixed.data.train_folders[0], mixed.data.holdout)))
    found, a_step = seen(mixed), 12 * 16
    assert found["after_step"] == 2 and sum(part["tokens"] for part in found["sets"].values()) == a_step
    said = capsys.readouterr().out
    assert "after its step 2, with another data.train, data.weights: tokens seen are counted from there on" in said
    assert "read since step 2 from " in said and f"{found['sets'][str(mixed.data.holdout)]['tokens']} of its " in said
    longer = with_optim(mixed, steps=5)
    resumed = seen(longer)
    assert resumed["after_step"] == 2 and sum(part["tokens"] for part in resumed["sets"].values()) == 3 * a_step
    reweighed = replace(branch(longer, tmp_path / "w", 3, steps=5), data=replace(mixed.data, weights=(1.0, 3.0)))
    assert seen(reweighed)["after_step"] == 3
    assert seen(replace(reweighed, seed=7, out_dir=tmp_path / "seed"))["after_step"] == 3
    again = seen(branch(longer, tmp_path / "again", 3, steps=5))
    assert {key: again[key] for key in ("after_step", "sets")} == {key: resumed[key] for key in ("after_step", "sets")}
    of_all = seen(replace(branch(longer, tmp_path / "b", 3, steps=5), data=replace(mixed.data, batch_size=24)))
    assert of_all["after_step"] == 2 and sum(part["tokens"] for part in of_all["sets"].values()) == 5 * a_step


def test_a_branch_reads_on_in_every_data_set_under_another_mix(stable: TrainConfig, tmp_path: Path) -> None:
    def sets(config: TrainConfig, step: int) -> dict[str, Any]:
        record = json.loads((config.out_dir / f"checkpoints/step-{step:08d}/record.json").read_bytes())["data"]
        return {names[fingerprint]: (place["before"], place["read"]) for fingerprint, place in record["sets"].items()}

    folder, other = stable.data.train_folders[0], stable.data.holdout
    names = {Manifest.load(path).fingerprint: path.name for path in (folder, other)}
    mixed = branch(stable, tmp_path / "mixed", 2, steps=4)
    mixed = replace(mixed, data=replace(mixed.data, train=(other, folder), weights=(1.0, 3.0)))
    train(mixed)
    assert sets(stable, 2) == {folder.name: (0, 2 * 12)}
    assert sets(mixed, 4) == {folder.name: (24, 24 + 18), other.name: (0, 6)}
    even = branch(mixed, tmp_path / "even", 4, steps=6)
    train(replace(even, data=replace(mixed.data, weights=(1.0, 1.0))))
    assert sets(even, 6) == {folder.name: (42, 54), other.name: (6, 18)}
    parts = branch(stable, tmp_path / "parts", 2, steps=3)
    train(replace(parts, data=mixed.data))
    train(replace(with_optim(parts, steps=4), data=mixed.data))
    assert steps(parts.out_dir, "loss") == steps(mixed.out_dir, "loss")


def test_branches_that_cannot_be_are_errors(stable: TrainConfig, tmp_path: Path) -> None:
    decayed = branch(stable, tmp_path / "decay", 2, steps=6, cooldown_steps=3)
    train(decayed)
    wanted = [
        (branch(decayed, tmp_path / "b", 4, steps=9), r"step 4, in a decay that began after step 3: .* would jump"),
        (branch(stable, tmp_path / "b", 4), r"of step 4, and optim.steps 4, which counts .*try --optim.steps 8"),
        (branch(stable, tmp_path / "b", 4, steps=6, cooldown_steps=3), r"after step 3, .* try --optim.steps 7"),
        (branch(stable, tmp_path / "b", 2, name="sgd"), r"another optimizer: optim.name adamw there and sgd here"),
        (
            branch(stable, tmp_path / "b", 2, schedule="cosine", steps=9),
            r"jump from 1.00e-02 .*give those of its",
        ),
        (
            branch(stable, tmp_path / "b", 2, warmup_steps=5, steps=9),
            r"jump from 1.00e-02 to 4.00e-03 there; .*steps 1",
        ),
        (branch(stable, tmp_path / "b", 2, lr=1e-3, steps=9), r"jump from 1.00e-02 to 1.00e-03 .*--optim.lr 0.01 "),
        (replace(branch(stable, tmp_path / "b", 2), init_from=tmp_path), r"init_from and branch_from are both given"),
    ]
    for given, message in wanted:
        with pytest.raises(UsageError, match=message):
            train(given)
    run = stable.out_dir / "run.json"
    named = json.loads(run.read_text())
    run.write_text(json.dumps(named | {"optim.lr": "x"}))
    with pytest.raises(InputError, match=r"run.json is damaged: .*restore it, or .*--init_from"):
        train(branch(stable, tmp_path / "b", 2, steps=9))
    run.unlink()
    with pytest.raises(UsageError, match=r"there is no .*run.json.*--init_from"):
        train(branch(stable, tmp_path / "b", 2, steps=9))


def test_a_stable_run_goes_on_and_says_when_it_decays(stable: TrainConfig, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=r"a decay of 3 steps .* begins after step 3, and the run is at step 4"):
        train(with_optim(stable, steps=6, cooldown_steps=3))
    train(with_optim(stable, steps=6, cooldown_steps=2))
    assert "the learning rate decays from step 4 to 6 from now on" in capsys.readouterr().out
    with pytest.raises(UsageError, match=r"at step 6, in a decay that began after step 4: .*--optim.decay_steps 6"):
        train(with_optim(stable, steps=8, cooldown_steps=2))
    train(with_optim(stable, steps=7, cooldown_steps=2, decay_steps=6))
    assert steps(stable.out_dir, "lr")[7] == pytest.approx(stable.optim.final_lr)


def test_a_folder_that_does_not_name_later_options_is_of_their_defaults(stable: TrainConfig, tmp_path: Path) -> None:
    run, other = tmp_path / "old/run.json", replace(stable, out_dir=tmp_path / "old")
    old = with_optim(other, schedule="cosine", steps=2)
    train(old)
    later = ("schedule", "cooldown_shape", "decay_parts", "muon_momentum", "z_loss", "ema_decay")
    named = {key: value for key, value in json.loads(run.read_text()).items() if key.partition(".")[2] not in later}
    run.write_text(json.dumps(named))
    assert train(old).steps == 2 and json.loads(run.read_text())["optim.schedule"] == "cosine"
    run.write_text(json.dumps(named))
    with pytest.raises(UsageError, match=r"optim.schedule \(cosine there, wsd now\); optim.z_loss \(0.0"):
        train(with_optim(other, steps=2, z_loss=0.1))
