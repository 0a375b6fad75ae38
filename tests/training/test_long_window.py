"""A window longer than the sequence has no effect: the model trains as without one, and this is said."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from training.config import TrainConfig
from training.reporting.metrics_file import METRICS, read_metrics
from training.train import train


def losses(out_dir: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(out_dir / METRICS) if record["kind"] == "step"]


@pytest.mark.parametrize("mask_documents", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"sinks": True}, {"dropout": 0.1}, {"full_attention_every": 2}],
    ids=["plain", "sinks", "dropout", "every"],
)
def test_a_window_that_is_longer_than_the_sequence_has_no_effect(
    config: TrainConfig, capsys: pytest.CaptureFixture[str], options: dict[str, Any], mask_documents: bool
) -> None:
    short = replace(
        config, optim=replace(config.optim, steps=3, warmup_steps=0), eval=replace(config.eval, sample_tokens=0)
    )
    data = replace(config.data, mask_documents=mask_documents)
    found = []
    for window in (0, 15, 16, 17, 4096):
        given = options if window else {key: value for key, value in options.items() if key != "full_attention_every"}
        model = replace(config.model, window=window, **given)
        run = replace(short, out_dir=config.out_dir / str(window), model=model, data=data)
        train(run)
        is_said = f"model.window {window} has no effect with data.seq_len 16" in capsys.readouterr().out
        assert is_said == (window >= 16)
        found.append(losses(run.out_dir))
    without, just_shorter, *others = found
    assert all(other == without for other in others)
    assert just_shorter != without or mask_documents


def test_the_window_of_a_published_model_may_be_longer(
    config: TrainConfig, train_in_ranks: Callable[[int, Path, list[str]], None], tmp_path: Path
) -> None:
    words = ["--model.preset", "mistral-7b", "--model.layers", "2", "--model.width", "32", "--model.heads", "4"]
    words += ["--model.kv_heads", "2", "--model.ffn_width", "64", "--model.vocab_size", "300", "--data.seq_len", "16"]
    words += ["--model.head_dim", "8", "--model.context", "16", "--data.batch_size", "4", "--optim.steps", "2"]
    words += ["--data.train", str(config.data.train_folders[0]), "--data.holdout", str(config.data.holdout)]
    words += ["--device", "cpu", "--eval.sample_tokens", "0", "--precision", "fp32"]
    train_in_ranks(2, tmp_path / "ring", [*words, "--parallel.cp", "2"])
    train_in_ranks(2, tmp_path / "without", [*words, "--parallel.cp", "2", "--model.window", "0"])
    assert losses(tmp_path / "ring") == losses(tmp_path / "without")
