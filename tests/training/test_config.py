from dataclasses import replace
from pathlib import Path

import pytest

from gristmill.config import load_config
from gristmill.errors import UsageError
from training.checkpoint.checkpoint import CheckpointConfig
from training.config import TrainConfig
from training.data.batches import DataConfig
from training.model.model_config import ModelConfig
from training.optim.optim_config import OptimConfig
from training.optim.stability import StabilityConfig


def test_resolve_fills_in_all_defaults() -> None:
    llama = ModelConfig(width=96, heads=6).resolve(1000, 64)
    assert (llama.kv_heads, llama.ffn_width, llama.vocab_size, llama.context) == (6, 256, 1000, 64)
    assert (llama.norm, llama.positions, llama.mlp, llama.bias, llama.tied) == ("rms", "rope", "swiglu", False, False)
    gpt2 = ModelConfig(preset="gpt2", width=96, tied=False).resolve(1000, 64)
    assert (gpt2.ffn_width, gpt2.norm, gpt2.positions, gpt2.tied) == (384, "layer", "learned", False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 100, "heads": 3}, "try --model.width 102"),
        ({"heads": 4, "kv_heads": 3}, "kv_heads 3"),
        ({"width": 12, "heads": 4}, "even number of features"),
        ({"vocab_size": 50}, "below the tokenizer's 99"),
        ({"context": 8}, "below data.seq_len 16"),
        ({"layers": 0}, "above 0"),
        ({"dropout": 1.0}, "dropout"),
    ],
)
def test_inconsistent_model_sizes_are_errors(changes: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ModelConfig(**changes).resolve(99, 16)  # type: ignore[arg-type]


def test_the_old_name_of_async_save_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--out_dir", "out", "--data.train", "a", "--data.holdout", "b", "--checkpoint.beside", "false"]
    assert not load_config(TrainConfig, given).checkpoint.async_save
    assert "checkpoint.beside is now called checkpoint.async_save" in capsys.readouterr().err


def test_values_out_of_range_are_errors() -> None:
    config = TrainConfig(Path("out"), DataConfig(Path("a"), Path("b")))
    config.check()
    for wrong, key in [
        (replace(config, optim=OptimConfig(steps=0)), "optim.steps is 0"),
        (replace(config, checkpoint=CheckpointConfig(keep=0)), "checkpoint.keep is 0"),
        (replace(config, stability=StabilityConfig(min_loss_scale=0.0)), "stability.min_loss_scale 0.0"),
    ]:
        with pytest.raises(UsageError, match=key):
            wrong.check()


def test_old_names_of_options_are_accepted_with_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    old = "--optim.clip 2 --model.hidden 64 --stability.budget 3 --stability.leap 5 --stability.loss_scale 8"
    old += " --stability.growth 7 --stability.floor 4"
    required = ["--out_dir", "out", "--data.train", "a", "--data.holdout", "b"]
    config = load_config(TrainConfig, [*required, *old.split()])
    assert (config.optim.max_grad_norm, config.model.ffn_width) == (2.0, 64)
    assert config.stability == StabilityConfig("skip", 3, 5.0, 8.0, 7, 4.0)
    assert "optim.clip is now called optim.max_grad_norm" in capsys.readouterr().err
