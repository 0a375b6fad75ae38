"""Positions and windows of an imported model come out of its export as they came in, whatever it is trained on."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gristmill.errors import UsageError
from tests.training.hf_models import build_theirs
from training.config import TrainConfig
from training.hugging_face.export_hf import export_hf
from training.hugging_face.import_hf import import_hf
from training.model.model_config import ModelConfig
from training.train import train

POSITIONS = 40
FIELDS = {"gpt2": "n_positions"}


def stage(config: TrainConfig, out_dir: Path, source: Path, seq_len: int) -> TrainConfig:
    data = replace(config.data, seq_len=seq_len, batch_size=2)
    optim = replace(config.optim, steps=1, warmup_steps=0)
    run = replace(config, out_dir=out_dir, init_from=source, model=ModelConfig(), data=data, optim=optim)
    return replace(run, eval=replace(config.eval, sample_tokens=0, sequences=2))


def exported(run: Path, out_dir: Path) -> dict[str, Any]:
    export_hf(run, out_dir)
    config: dict[str, Any] = json.loads((out_dir / "config.json").read_text())
    return config


@pytest.mark.parametrize("name", ["llama", "llama, scaled", "mistral", "gpt2", "gpt_neox", "qwen3_moe"])
def test_a_model_keeps_its_positions_over_shorter_stages(tmp_path: Path, config: TrainConfig, name: str) -> None:
    length = FIELDS.get(name, "max_position_embeddings")
    build_theirs(name, tmp_path / "hf", **{length: POSITIONS, "vocab_size": 300})
    import_hf(tmp_path / "hf", tmp_path / "start")
    source = tmp_path / "start"
    for number, seq_len in enumerate((16, 32)):
        train(stage(config, tmp_path / f"run-{number}", source, seq_len))
        source = tmp_path / f"run-{number}"
        theirs = json.loads((tmp_path / "hf/config.json").read_text())
        ours = exported(source, tmp_path / f"exported-{number}")
        assert ours[length] == theirs[length] == POSITIONS
        assert ours.get("sliding_window") == theirs.get("sliding_window")


def test_sequences_beyond_the_positions_are_said_and_exported(
    tmp_path: Path, config: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    build_theirs("llama", tmp_path / "hf", max_position_embeddings=POSITIONS, vocab_size=300)
    import_hf(tmp_path / "hf", tmp_path / "start")
    longer = stage(config, tmp_path / "run", tmp_path / "start", 48)
    train(longer)
    assert f"data.seq_len 48 is longer than the {POSITIONS} positions of the model" in capsys.readouterr().out
    assert exported(tmp_path / "run", tmp_path / "exported")["max_position_embeddings"] == 48
    train(replace(longer, optim=replace(longer.optim, steps=2, decay_steps=1)))  # resumes
    assert exported(tmp_path / "run", tmp_path / "again")["max_position_embeddings"] == 48


def test_learned_positions_have_no_longer_sequences(tmp_path: Path, config: TrainConfig) -> None:
    build_theirs("gpt2", tmp_path / "hf", n_positions=POSITIONS, vocab_size=300)
    import_hf(tmp_path / "hf", tmp_path / "start")
    with pytest.raises(UsageError, match=rf"{POSITIONS} positions, which are learned; try --data.seq_len {POSITIONS}"):
        train(stage(config, tmp_path / "run", tmp_path / "start", 48))
    train(stage(config, tmp_path / "run", tmp_path / "start", POSITIONS))  # as it advises
