"""Optimizers and schedules of the user's file: equal under every layout, saved, resumed, recorded, and refused."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.kill_training import metric_values
from gristmill.config import load_config
from gristmill.errors import UsageError
from tests.training.conftest import small_run
from training.config import TrainConfig
from training.train import train

PARTS = '''
"""My optimizers and schedules."""

import math

import torch

from training.optim.own_optimizer import OwnOptimizer


class Lion(OwnOptimizer):
    """Lion (Chen et al. 2023, algorithm 2)."""

    states = ("exp_avg",)

    def direction(self, weight, gradient, states, step):
        (average,) = states
        beta1, beta2 = self.config.betas
        update = average.lerp(gradient, 1 - beta1).sign()
        average.lerp_(gradient, 1 - beta2)
        return update


class Normed(OwnOptimizer):
    """Momentum of matrices, divided by the norm of each whole matrix; AdamW for all others."""

    states = ("momentum",)
    matrices_only = True

    def direction(self, weight, gradient, states, step):
        return states[0].mul_(0.9).add_(gradient).clone()

    def of_matrix(self, direction):
        return direction / torch.linalg.matrix_norm(direction, keepdim=True)


class Mixing(OwnOptimizer):
    def direction(self, weight, gradient, states, step):
        return gradient / gradient.norm()


class Broken(OwnOptimizer):
    def direction(self, weight, gradient, states, step):
        return gradient + self.nothing


def waves(step, config):
    return config.lr * (1 + math.cos(step)) / 2 * (1 - step / config.steps)


def negative(step, config):
    return -1.0


class NoOptimizer:
    pass
'''
QUIET = ["--metrics.tensorboard", "false", "--eval.sample_tokens", "0", "--metrics.log_every", "1"]
QUIET += ["--optim.warmup_steps", "2"]
LAYOUTS = {
    "one process": (1, []),
    "dp 2": (2, []),
    "ZeRO-3": (2, ["--parallel.zero", "3"]),
    "tp 2": (2, ["--parallel.tp", "2"]),
    "pp 2": (2, ["--parallel.pp", "2"]),
}


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "my_parts.py"
    path.write_text(PARTS)
    return path


def options(corpus: Path, *more: str) -> list[str]:
    return [*small_run(corpus), *QUIET, "--precision", "fp64", "--optim.steps", "6", *more]


def losses(out_dir: Path) -> dict[int, float]:
    return dict(metric_values(out_dir, "step", "loss"))


def run_json(out_dir: Path) -> dict[str, Any]:
    stored: dict[str, Any] = json.loads((out_dir / "run.json").read_text())
    return stored


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["Normed", "Lion"])
def test_an_optimizer_of_a_file_trains_alike_under_every_layout(
    corpus: Path, tmp_path: Path, parts: Path, train_in_ranks: Callable[[int, Path, list[str]], None], name: str
) -> None:
    given = options(corpus, "--optim.name", f"{parts}:{name}")
    found = {}
    for number, (layout, (processes, words)) in enumerate(LAYOUTS.items()):
        train_in_ranks(processes, out_dir := tmp_path / str(number), [*given, *words])
        found[layout] = losses(out_dir)
    plain = found.pop("one process")
    assert len(plain) == 6
    for layout, values in found.items():
        assert values == pytest.approx(plain, rel=1e-9), layout
    train_in_ranks(1, out_dir := tmp_path / "adamw", options(corpus))
    assert losses(out_dir)[6] != pytest.approx(plain[6], rel=1e-3)


def test_lion_updates_as_its_paper_says(corpus: Path, tmp_path: Path, parts: Path) -> None:
    from training.optim.build_optimizer import build_optimizer
    from training.optim.optim_config import OptimConfig
    from training.own_code import allow_named
    from training.sharding.shard_spec import ShardSpec
    from training.sharding.sharded_parameter import ShardedParameter

    allow_named({"optim.name": f"{parts}:Lion"})
    start = torch.rand(3, 4, dtype=torch.float64)
    parameter = torch.nn.Parameter(start.clone())
    weight = ShardedParameter("blocks.0.mlp.up.weight", parameter, parameter, ShardSpec.whole((3, 4)), True)
    optimizer = build_optimizer([weight], OptimConfig(name=f"{parts}:Lion", weight_decay=0.1))
    expected = start.clone()
    average = torch.zeros_like(start)
    for gradient in torch.randn(3, 3, 4, dtype=torch.float64):
        parameter.grad = gradient.clone()
        optimizer.step(0.01)
        expected = expected * (1 - 0.01 * 0.1) - 0.01 * torch.sign(0.9 * average + 0.1 * gradient)
        average = 0.95 * average + 0.05 * gradient
    assert torch.allclose(parameter, expected, rtol=1e-12)
    (states,) = optimizer.moments().values()
    assert torch.allclose(states["exp_avg"], average, rtol=1e-12)


def test_a_run_resumes_under_another_layout_and_says_that_the_file_has_changed(
    corpus: Path, tmp_path: Path, parts: Path, train_in_ranks: Callable[[int, Path, list[str]], None],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    given = options(corpus, "--optim.name", f"{parts}:Lion", "--optim.decay_steps", "6")
    train_in_ranks(1, tmp_path / "whole", given)
    train_in_ranks(2, out_dir := tmp_path / "run", [*given, "--parallel.zero", "3", "--optim.steps", "3"])
    stored = run_json(out_dir)
    assert stored["optim.name"] == "my_parts.py:Lion"
    ((name, digest),) = stored["starts"][0]["own_code"].items()
    assert name == "my_parts.py" and len(digest) == 64
    moved = tmp_path / "elsewhere/my_parts.py"  # another folder is the same file
    moved.parent.mkdir()
    moved.write_text(PARTS)
    given[given.index(f"{parts}:Lion")] = f"{moved}:Lion"
    train(load_config(TrainConfig, ["--out_dir", str(out_dir), *given, "--optim.steps", "4"]))
    assert "has changed" not in capsys.readouterr().out
    moved.write_text(PARTS + "\n# changed\n")
    train(load_config(TrainConfig, ["--out_dir", str(out_dir), *given]))
    said = capsys.readouterr().out
    assert f"my_parts.py has changed since the checkpoint was written (SHA-256 {digest[:12]} there, " in said
    assert losses(out_dir) == pytest.approx(losses(tmp_path / "whole"), rel=1e-9)
    (record,) = out_dir.glob("checkpoints/step-00000006/record.json")
    assert json.loads(record.read_text())["start"]["own_code"]["my_parts.py"] != digest


def test_a_schedule_of_a_file(corpus: Path, tmp_path: Path, parts: Path) -> None:
    given = options(corpus, "--optim.schedule", f"{parts}:waves", "--optim.lr", "0.01")
    train(load_config(TrainConfig, ["--out_dir", str(tmp_path / "run"), *given, "--checkpoint.every", "3"]))
    rates = dict(metric_values(tmp_path / "run", "step", "lr"))
    expected = {1: 0.005, 2: 0.01}  # the warm-up is ours
    expected |= {step + 1: 0.01 * (1 + math.cos(step)) / 2 * (1 - step / 6) for step in range(2, 6)}
    assert rates == pytest.approx(expected)
    longer = load_config(TrainConfig, ["--out_dir", str(tmp_path / "run"), *given, "--optim.steps", "8"])
    with pytest.raises(UsageError, match=r"decays until step 6, .* give --optim.decay_steps 6 to keep it"):
        train(longer)
    start = ["--branch_from", str(tmp_path / "run/checkpoints/step-00000003"), "--out_dir", str(tmp_path / "branch")]
    other = [*options(corpus), "--optim.lr", "0.01", *start]
    with pytest.raises(UsageError, match="would jump"):  # the file has run in this process, and so may again
        train(load_config(TrainConfig, other))
    train(load_config(TrainConfig, [*other, "--allow_lr_jump", "true"]))
    (change,) = run_json(tmp_path / "branch")["interventions"]
    assert change["after_step"] == 3 and change["learning_rate"][0] == pytest.approx(rates[3])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--optim.name none.py:Lion", "there is no file none.py; expected FILE.py:NAME"),
        ("--optim.name PARTS:Lyon", r"my_parts.py has no class 'Lyon'; did you mean Lion\?"),
        ("--optim.name PARTS:NoOptimizer", r"derives from OwnOptimizer; expected class NoOptimizer\(OwnOptimizer\)"),
        ("--optim.name PARTS:waves", "waves of .*my_parts.py is no class that derives from OwnOptimizer"),
        ("--optim.name PARTS:Mixing", "direction of .*Mixing is another one for a part of a parameter"),
        ("--optim.name PARTS:Broken", r"my_parts.py:Broken fails: AttributeError: .* \(.*my_parts.py, line \d+\)"),
        ("--optim.name lion", "optim.name is lion; .*adamw, muon, sgd, and FILE.py:CLASS is one of yours"),
        ("--optim.name PARTS:Lion --memory.optimizer cpu", "it updates on the device alone; try"),
        ("--optim.schedule PARTS:negative", "returned -1.0 for step 2; expected a learning rate, a number"),
        ("--optim.schedule PARTS:wave", r"has no class or function 'wave'; did you mean waves\?"),
        ("--optim.schedule PARTS:wave --optim.warmup_steps 9", r"has no class or function 'wave'"),
        ("--optim.schedule cosin", r"optim.schedule is cosin; did you mean cosine\?"),
        ("--optim.name BAD:Lion", r"bad.py cannot be run: SyntaxError: .*line 1"),
    ],
)  # fmt: skip
def test_what_is_refused_is_refused_in_one_sentence(
    corpus: Path, tmp_path: Path, parts: Path, given: str, said: str
) -> None:
    (tmp_path / "bad.py").write_text("class Lion(:\n")
    words = given.replace("PARTS", str(parts)).replace("BAD", str(tmp_path / "bad.py")).split()
    with pytest.raises(UsageError, match=said) as refused:
        train(load_config(TrainConfig, ["--out_dir", str(tmp_path / "run"), *options(corpus), *words]))
    assert "\n" not in str(refused.value)
