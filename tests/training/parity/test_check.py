"""`gristmill check` compares two runs of one training, and names the step and the tensor in which they first differ."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import training.train_step
from gristmill.errors import GristmillError, InputError, UsageError
from gristmill_parity.gates.check import check
from gristmill_parity.gates.recorded_run import describe_setting
from tests.gristmill_cli.documentation import commands, shell
from tests.training.conftest import small_run, train_with_options
from training.trainer import Trainer

Patch = pytest.MonkeyPatch
TRAINING = [
    "--optim.steps", "6", "--optim.warmup_steps", "2", "--checkpoint.every", "2", "--checkpoint.keep", "9",
    "--eval.every", "3", "--eval.sample_tokens", "0", "--metrics.tensorboard", "false",
]  # fmt: skip


class Crash(Exception):
    """The end of a process in the middle of a run."""


def crash_before_step_4(out_dir: Path, options: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        right = Trainer.step

        def step(self: Trainer, number: int, *rest: Any) -> bool:
            if number == 4:
                raise Crash
            return right(self, number, *rest)

        patch.setattr(Trainer, "step", step)
        with pytest.raises(Crash):
            train_with_options(out_dir, options)


def resume_without_moments(out_dir: Path, options: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        right = Trainer._state

        def state(self: Trainer, stored: Any = None) -> Any:
            found = right(self, stored)
            return found if stored is None else {key: held for key, held in found.items() if "optim." not in key}

        patch.setattr(Trainer, "_state", state)
        train_with_options(out_dir, options)


def train_without_clipping(out_dir: Path, options: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        right = training.train_step.scale_gradients
        patch.setattr(training.train_step, "scale_gradients", lambda params, factor: right(params, 0.5 * factor))
        train_with_options(out_dir, options)


RunRanks = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def runs(corpus: Path, rank_pool: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one training: `one`, `again`, and `two` and `tp` in other layouts."""
    folder = tmp_path_factory.mktemp("runs")
    options = [*small_run(corpus), *TRAINING]
    for name, processes, more in (("one", 1, []), ("again", 1, []), ("two", 2, []), ("tp", 2, ["--parallel.tp", "2"])):
        rank_pool.run(processes, train_with_options, folder / name, [*options, *more])
    return folder


def test_the_same_layout_twice_is_equal_bit_for_bit(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(runs / "one", runs / "again")
    shown = capsys.readouterr().out
    assert "one layout: every number of steps 1 to 6 must be equal bit for bit" in shown
    assert "6 steps agree, losses to 0.0e+00 and gradient norms to 0.0e+00; 3 checkpoints compared bit for bit" in shown


def test_another_layout_agrees_to_rounding(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(runs / "one", runs / "tp")
    shown = capsys.readouterr().out
    assert (
        "started after step 0 as 2 processes (cpu, tp 2)" in shown
        and "loss and gradient norm of step 1 may differ by 1.0e-05, later losses by 1.0e-04" in shown
    )
    assert "6 steps agree" in shown and "weights after step 2 differ the most in " in shown
    with pytest.raises(GristmillError, match="differ, first in grad_norm of step 1"):
        check(runs / "two", runs / "tp", tolerance=1e-15)


def test_a_resumed_run_is_equal_to_one_that_was_never_stopped(
    runs: Path, corpus: Path, run_ranks: RunRanks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under the same layout bit for bit, under another one until it resumed."""
    options = [*small_run(corpus), *TRAINING]
    run_ranks(1, crash_before_step_4, tmp_path / "resumed", options)
    shutil.copytree(tmp_path / "resumed", tmp_path / "other")
    shutil.copytree(tmp_path / "resumed", tmp_path / "faulty")
    run_ranks(1, train_with_options, tmp_path / "resumed", options)
    check(runs / "one", tmp_path / "resumed")
    shown = capsys.readouterr().out
    assert "resumed after step 2 as 1 process (cpu)" in shown and "3 checkpoints compared bit for bit" in shown
    run_ranks(2, train_with_options, tmp_path / "other", options)
    check(runs / "one", tmp_path / "other")
    shown = capsys.readouterr().out
    assert "one layout until step 2" in shown and "1 checkpoint compared bit for bit" in shown

    run_ranks(1, resume_without_moments, tmp_path / "faulty", options)
    with pytest.raises(GristmillError, match=r"differ, first in the evaluation.s loss of step 3; see above"):
        check(runs / "one", tmp_path / "faulty")
    shown = capsys.readouterr().out
    assert "first difference in loss of step 4: " in shown and "expected every bit to be equal" in shown  # the next one
    assert (
        "first difference in model.embed" in shown and "of step 4: " in shown and " elements differ, most at" in shown
    )


def test_branches_of_one_checkpoint_agree(
    runs: Path, corpus: Path, run_ranks: RunRanks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one layout bit for bit, in another but for rounding."""
    branch = [*small_run(corpus), *TRAINING, "--branch_from", str(runs / "one/checkpoints/step-00000002")]
    for name, processes in (("first", 2), ("second", 2), ("alone", 1)):
        run_ranks(processes, train_with_options, tmp_path / name, branch)
    check(tmp_path / "first", tmp_path / "second")
    shown = capsys.readouterr().out
    assert "every number of steps 3 to 6 must be equal bit for bit" in shown and "2 checkpoints compared" in shown
    check(tmp_path / "first", tmp_path / "alone")
    assert "4 steps agree" in capsys.readouterr().out
    with pytest.raises(
        UsageError, match="training: the first began from new weights and the second from --branch_from "
    ):
        check(runs / "one", tmp_path / "alone")


def test_a_fault_of_one_layout_is_found_at_its_first_step(
    runs: Path, corpus: Path, run_ranks: RunRanks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_ranks(2, train_without_clipping, tmp_path / "faulty", [*small_run(corpus), *TRAINING, "--optim.name", "adamw"])
    with pytest.raises(GristmillError, match="differ, first in "):
        check(runs / "two", tmp_path / "faulty")
    shown = capsys.readouterr().out
    assert "first difference in model.embed" in shown and ".weight of step 2: " in shown


def test_what_cannot_be_compared_is_told_in_a_sentence(
    runs: Path, corpus: Path, run_ranks: RunRanks, tmp_path: Path
) -> None:
    one = runs / "one"
    with pytest.raises(UsageError, match=r"expected the --out_dir of a training run, got no run.json in it"):
        check(one, corpus)
    with pytest.raises(UsageError, match="is given twice; expected the folders of two runs"):
        check(one, runs / "tp" / ".." / "one")
    run_ranks(
        1, train_with_options, tmp_path / "seed", [*small_run(corpus), *TRAINING, "--seed", "2", "--optim.lr", "1"]
    )
    with pytest.raises(
        UsageError, match=r"not runs of one training: seed is 1 .* and 2 .*, and 1 more option differs;"
    ):
        check(one, tmp_path / "seed")
    shutil.copytree(one, tmp_path / "empty")
    (tmp_path / "empty" / "metrics.jsonl").write_text("")
    with pytest.raises(UsageError, match="records no step"):
        check(one, tmp_path / "empty")
    shutil.copytree(one, tmp_path / "damaged")
    (tmp_path / "damaged" / "metrics.jsonl").write_text("{\n" + (one / "metrics.jsonl").read_text())
    with pytest.raises(InputError, match="has 1 damaged line"):
        check(one, tmp_path / "damaged")
    with pytest.raises(UsageError, match="--steps is -1"):
        check(one, runs / "again", steps=-1)


def test_the_folder_of_a_run_of_data_is_none_of_training(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"corpus": "c"}')
    with pytest.raises(UsageError, match=r"belongs to a run of the data pipeline; expected that of a training run$"):
        check(tmp_path, tmp_path / "other")


def test_a_setting_names_what_divides_sequences() -> None:
    layout = {"dp": 1, "zero": 0, "micro_batches": 1, "tp": 2, "cp": 2, "context": "ulysses"}
    layout["sequence_parallel"] = True
    words = describe_setting({"processes": 4, "device": "cpu", "layout": layout})
    assert words == "4 processes (cpu, tp 2 with sequence parallelism, cp 2 (ulysses))"


def rewrite(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> Path:
    path = folder / "metrics.jsonl"
    records = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(record) + "\n" for record in records if record))
    return folder


def test_a_step_that_is_missing_or_evaluated_otherwise_is_named(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = runs / "one"
    lost = rewrite(
        shutil.copytree(one, tmp_path / "lost"), lambda r: None if (r["kind"], r["step"]) == ("step", 3) else r
    )
    with pytest.raises(GristmillError, match="first in the record of step 3"):
        check(one, lost)
    other = rewrite(
        shutil.copytree(one, tmp_path / "other"), lambda r: r | {"loss": r["loss"] + 1e-9} if r["kind"] == "eval" else r
    )
    with pytest.raises(GristmillError, match="first in the evaluation's loss of step 3"):
        check(one, other)
    assert "a relative difference of " in capsys.readouterr().out
    check(one, lost, steps=2)


def test_the_commands_of_the_page(runs: Path) -> None:
    (block,) = commands("guides/check.md")
    done = shell(block, OUT=str(runs))
    assert done.returncode == 0 and "6 steps agree, losses to " in done.stdout, done.stderr


def test_the_command_line(runs: Path) -> None:
    run = [sys.executable, "-m", "gristmill_cli", "check", runs / "one", runs / "again", "--steps", "4"]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 0 and "4 steps agree" in done.stdout and "2 checkpoints" in done.stdout, done.stderr
    run = [sys.executable, "-m", "gristmill_cli", "check", runs / "one", runs / "two", "--tolerance", "1e-16"]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr and "differ, first in " in done.stderr
