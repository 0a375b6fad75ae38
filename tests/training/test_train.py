import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gristmill.errors import InputError, OutputError, UsageError
from tests.patience import patience
from tests.training.conftest import LAUNCH, TORCHRUN
from training.checkpoint.checkpoint import open_checkpoint
from training.checkpoint.checkpoint_config import CheckpointConfig
from training.checkpoint.checkpoint_group import single_process_group
from training.config import TrainConfig
from training.experimental.parallel_config import ParallelConfig
from training.model.model_config import ModelConfig
from training.optim.stability import StabilityConfig
from training.reporting.metrics_file import METRICS, Summary, read_metrics
from training.train import main, train

REPOSITORY = Path(__file__).resolve().parents[2]
Start = Callable[..., subprocess.Popen[str]]


def losses(out_dir: Path) -> list[tuple[int, float]]:
    return [(r["step"], r["loss"]) for r in read_metrics(out_dir / METRICS) if r["kind"] == "step"]


def with_steps(config: TrainConfig, steps: int, **changes: Any) -> TrainConfig:
    return replace(config, optim=replace(config.optim, steps=steps), **changes)


def test_a_run_learns_and_writes_all_its_files(config: TrainConfig, capsys: pytest.CaptureFixture[str]) -> None:
    config = with_steps(config, 60, metrics=replace(config.metrics, tensorboard=True, peak_tflops=0.1))
    summary = train(config)
    assert summary.holdout_loss < summary.unigram_loss - 0.2
    assert summary == Summary(**json.loads((config.out_dir / "summary.json").read_text()))
    assert (Path(summary.checkpoint) / "record.json").is_file() and summary.steps == 60
    records = list(read_metrics(config.out_dir / METRICS))
    assert [r["kind"] for r in records] == ["run"] + ["step"] * 60 + ["eval"]
    assert records[0]["unigram_loss"] == summary.unigram_loss
    assert 0 < records[9]["mfu"] < 1 and records[9]["memory_bytes"] > 1e7 and records[9]["tokens_per_second"] > 0
    assert abs(records[-1]["bits_per_byte"] - records[-1]["loss"] / 2 / 0.6931471805599453) < 1e-9  # 2 bytes a token
    assert records[-1]["text"] and list((config.out_dir / "tensorboard").glob("events*"))
    said = capsys.readouterr().out
    assert "step 60/60  loss" in said and "bits per byte" in said and f"{summary.parameters:,} parameters" in said


@pytest.mark.parametrize("change", ["precision", "dropout", "gpt2"])
def test_resuming_gives_bit_for_bit_the_losses_of_an_uninterrupted_run(
    config: TrainConfig, change: str, tmp_path: Path
) -> None:
    models = {"dropout": replace(config.model, dropout=0.2), "gpt2": replace(config.model, preset="gpt2")}
    precision = "bf16" if change == "precision" else "fp32"
    config = replace(config, model=models.get(change, config.model), precision=precision)  # type: ignore[arg-type]
    config = replace(config, checkpoint=CheckpointConfig(every=5))
    train(config)
    through = losses(config.out_dir)
    interrupted = replace(config, out_dir=tmp_path / "interrupted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.trainer.Trainer.report", _stop_at(9))
        with pytest.raises(RuntimeError, match="stop"):
            train(interrupted)
    train(interrupted)
    assert losses(interrupted.out_dir) == through and len(through) == 12


def _stop_at(step: int) -> Callable[[Any], None]:
    from training.trainer import Trainer

    report = Trainer.report

    def report_or_stop(trainer: Trainer) -> None:
        if trainer.steps_done >= step:
            raise RuntimeError("stop")
        report(trainer)

    return report_or_stop


def test_a_finished_run_does_not_repeat_and_can_be_extended(config: TrainConfig) -> None:
    first = train(config)
    before = losses(config.out_dir)
    assert train(config).holdout_loss == first.holdout_loss and losses(config.out_dir) == before
    metrics = config.out_dir / METRICS
    recorded = metrics.read_bytes()
    metrics.write_bytes(b"damaged\n")
    with pytest.raises(InputError, match=r"metrics.jsonl has lost the steps .*more --optim.steps"):
        train(config)
    metrics.write_bytes(recorded)
    config = replace(config, optim=replace(config.optim, decay_steps=12))
    longer = train(with_steps(config, 16))
    assert longer.steps == 16 and losses(config.out_dir)[:12] == before and len(losses(config.out_dir)) == 16
    with pytest.raises(UsageError, match="longer, not shorter"):
        train(config)


def rates(out_dir: Path) -> list[float]:
    return [record["lr"] for record in read_metrics(out_dir / METRICS) if record["kind"] == "step"]


def test_the_learning_rate_of_a_longer_run_changes_as_it_is_told(
    config: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    config = with_steps(config, 4, eval=replace(config.eval, sample_tokens=0))
    train(config)
    with pytest.raises(
        UsageError, match=r"decays until step 4, and with --optim.steps 5 alone .*decay_steps 4 to keep"
    ):
        train(with_steps(config, 5))
    train(with_steps(replace(config, optim=replace(config.optim, decay_steps=4)), 6))
    assert rates(config.out_dir)[3:] == pytest.approx([config.optim.final_lr] * 3)
    said = capsys.readouterr().out
    assert "decays until" not in said and "the learning rate's decay" not in said
    train(with_steps(replace(config, optim=replace(config.optim, decay_steps=100)), 7))
    said = "decays until step 100 from now on, instead of step 4: the rate of step 7 is 9.96e-03 instead of 1.00e-04"
    printed = capsys.readouterr().out
    assert said in printed and rates(config.out_dir)[6] > 0.0099
    assert printed.count("decay ends at step 100, beyond this run's 7 steps: the rate of step 7 is 9.96e-03, not") == 1


def test_of_a_rate_that_does_not_fall_no_decay_is_told(config: TrainConfig, capsys: pytest.CaptureFixture[str]) -> None:
    config = replace(config, eval=replace(config.eval, sample_tokens=0), optim=replace(config.optim, min_lr=1e-2))
    train(with_steps(config, 2))
    train(with_steps(config, 3))
    assert "decays until" not in capsys.readouterr().out and rates(config.out_dir)[2] == 1e-2


def test_an_out_dir_that_holds_another_run_is_an_error_that_says_what_differs(config: TrainConfig) -> None:
    train(config)
    other = replace(config, model=replace(config.model, layers=1), seed=2)
    with pytest.raises(
        UsageError, match=r"model.layers \(2 there, 1 now\); seed \(1 there, 2 now\).*another --out_dir"
    ):
        train(other)
    train(replace(config, parallel=ParallelConfig(micro_batches=3)))  # how the work is shared is no difference


def test_a_run_of_an_earlier_release_resumes_under_the_new_names_of_its_options(config: TrainConfig) -> None:
    train(config)
    renamed = {"ffn_width": "hidden", "model.ffn_width": "model.hidden", "optim.max_grad_norm": "optim.clip"}
    (record,) = config.out_dir.glob("checkpoints/step-*12/record.json")
    for path in (config.out_dir / "run.json", record):
        text = path.read_text()
        for new, old in renamed.items():
            text = text.replace(f'"{new}"', f'"{old}"')
        path.write_text(re.sub(r',\s*"checksum": "\w*"', "", text))  # records had none then
    assert "clip" in (config.out_dir / "run.json").read_text() and "hidden" in record.read_text()
    other = replace(config, optim=replace(config.optim, max_grad_norm=7.0), model=replace(config.model, ffn_width=64))
    with pytest.raises(UsageError, match=r"model.ffn_width \(\d+ there, 64 now\); optim.max_grad_norm \(1.0"):
        train(other)
    with single_process_group() as group:
        _, found = open_checkpoint(record.parent, group, print)
        assert ModelConfig.from_record(found.model).ffn_width > 0 and "hidden" not in found.model
    longer = replace(config, optim=replace(config.optim, decay_steps=12))
    assert train(with_steps(longer, 16)).steps == 16
    assert "optim.max_grad_norm" in (config.out_dir / "run.json").read_text()


def test_two_runs_in_one_out_dir_are_an_error(config: TrainConfig) -> None:
    import fcntl

    config.out_dir.mkdir()
    with (config.out_dir / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(OutputError, match="in use by another training run"):
            train(config)


def test_different_tokenizers_are_an_error(config: TrainConfig, shards: Callable[..., Path], tmp_path: Path) -> None:
    holdout = shards(tmp_path / "holdout", [[list(range(100))]])
    with pytest.raises(UsageError, match=r"with the same tokenizer"):
        train(replace(config, data=replace(config.data, holdout=holdout)))


def test_a_loss_that_is_not_finite_ends_the_run_or_is_skipped(config: TrainConfig) -> None:
    bad = replace(config, optim=replace(config.optim, lr=1e30, max_grad_norm=0.0))
    with pytest.raises(UsageError, match=r"is (nan|inf) at step .*policy is stop; .*lower --optim.lr"):
        train(replace(bad, stability=StabilityConfig(policy="stop")))
    with pytest.raises(UsageError, match=r"5 of the last 1000 steps were skipped"):
        train(replace(bad, stability=StabilityConfig(max_skipped_steps=4)))


def test_a_diverged_model_replaces_no_checkpoint_and_its_files_are_json(config: TrainConfig) -> None:
    saving = replace(
        config, checkpoint=CheckpointConfig(every=1, keep=1), stability=StabilityConfig(max_skipped_steps=3)
    )
    bad = replace(saving, optim=replace(config.optim, lr=1e30, max_grad_norm=0.0))
    with pytest.raises(UsageError, match=r"4 of the last 1000 .*new run .*--init_from a checkpoint"):
        train(bad)
    assert [path.name for path in (config.out_dir / "checkpoints").glob("step-*")] == ["step-00000001"]
    worse = replace(bad, out_dir=config.out_dir / "worse", optim=replace(bad.optim, lr=1e300, steps=2))
    assert math.isnan(train(worse).holdout_loss)
    assert "NaN" not in (worse.out_dir / METRICS).read_text()
    assert json.loads((worse.out_dir / "summary.json").read_text())["holdout_loss"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--optim.stepz", "3"], "did you mean --optim.steps?"),
        (["--profile", "2:3"], "unknown option --profile; there are --profile.steps, --profile.ranks, --profile.times"),
        (["--optim.steps", "many"], "--optim.steps"),
        (["--optim.steps", "0"], "optim.steps is 0; expected 1 or more; try --optim.steps 1000"),
        (["--optim.betas", "nan", "1"], "expected a finite number, 0 or more; try --optim.betas 0.9 0.95"),
        (["--eval.prompt", "a\udcff"], "eval.prompt is 'a\\udcff', which is not UTF-8"),
        (["--timeout", "inf"], "timeout is inf; expected a finite number, 0 or more; try --timeout 0.0"),
        (["--timeout", "0.001"], "expected 1 or more seconds, or 0 for the default"),
        (["--data.batch_size", "10", "--parallel.micro_batches", "3"], "try --data.batch_size 12"),
        (["--parallel.tensor", "2d", "--compile", "true"], "compile and parallel.tensor 2d: blocks whose products"),
        (["--parallel.tensor", "2d", "--memory.recompute", "selective"], "try --memory.recompute full, or"),
        (["--data.seq_len", "100000"], "try a lower --data.seq_len"),
        (["--model.vocab_size", "20"], "below the tokenizer's 300"),
        (["--data.holdout", "nowhere"], "make them with gristmill run, or gristmill tokenize"),
    ],
)
def test_a_user_s_mistake_is_one_line_and_exit_code_2(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    folders = ["--data.train", f"{corpus}/tokens/train"]
    if "--data.holdout" not in options:
        folders += ["--data.holdout", f"{corpus}/tokens/holdout"]
    with pytest.raises(SystemExit) as end:
        main([*folders, "--out_dir", str(tmp_path / "run"), "--device", "cpu", *options])
    said = capfd.readouterr().err
    assert end.value.code == 2 and message in said and said.startswith("error: ") and said.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("launcher", [TORCHRUN, LAUNCH], ids=["torchrun", "launch"])  # launch passes --local-rank, too
def test_an_error_is_printed_once_under_a_launcher(start_training: Start, launcher: list[str], tmp_path: Path) -> None:
    wrong = start_training(launcher, tmp_path / "run", "--model.layerz", "3")
    said = wrong.communicate(timeout=patience(60))[0]
    wanted = "error: unknown option --model.layerz; did you mean --model.layers?"
    assert said.startswith(wanted) and said.count(wanted) == 2, said  # at once, and after torchrun's own traceback
    assert wanted in said.strip().splitlines()[-2] and 'File "' + "training" not in said and wrong.returncode != 0


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gpu_learns_and_resumes(config: TrainConfig, precision: str) -> None:
    config = with_steps(replace(config, device="cuda", precision=precision), 60)  # type: ignore[arg-type]
    summary = train(config)
    assert summary.holdout_loss < summary.unigram_loss - 0.2
    longer = replace(config, optim=replace(config.optim, decay_steps=60))
    assert train(with_steps(longer, 70)).steps == 70


@pytest.mark.parametrize("door", [["training/train.py"], ["-m", "training.train"]])
def test_every_way_to_start_training_prints_its_help(door: list[str]) -> None:
    shown = subprocess.run(
        [sys.executable, *door, "--help"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert "--optim.warmup_steps N" in shown.stdout


def test_every_file_of_a_run_has_the_mode_of_the_umask(config: TrainConfig) -> None:
    before = os.umask(0o027)
    try:
        train(replace(config, checkpoint=CheckpointConfig(every=2)))
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o777 for path in config.out_dir.rglob("*") if path.is_file()}
    assert any("checkpoints" in path.parts for path in modes) and config.out_dir / METRICS in modes
    assert not {path: oct(mode) for path, mode in modes.items() if mode != 0o640}
