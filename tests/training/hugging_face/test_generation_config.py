"""generation_config.json of an export says what the imported model's files said of its tokens."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.training.hf_models import build_theirs
from training.config import TrainConfig
from training.hugging_face.export_hf import export_hf
from training.hugging_face.import_hf import import_hf
from training.model.model_config import ModelConfig
from training.train import train

IDS = {"bos_token_id": 3, "eos_token_id": [5, 7], "pad_token_id": 9}


def again(root: Path, generation: dict[str, Any] | None, **config: Any) -> dict[str, Any]:
    """The generation_config.json of a model that is imported and exported; None: it came without one."""
    build_theirs("llama", root / "hf")
    path = root / "hf/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | IDS | config))
    (root / "hf/generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (root / "hf/generation_config.json").write_text(json.dumps(generation))
    import_hf(root / "hf", root / "start")
    export_hf(root / "start", root / "exported")
    exported: dict[str, Any] = json.loads((root / "exported/generation_config.json").read_text())
    return exported


@pytest.mark.parametrize("generation", [None, {}], ids=["none", "empty"])
def test_without_one_it_has_the_tokens_of_the_config(tmp_path: Path, generation: dict[str, Any] | None) -> None:
    assert again(tmp_path, generation) == IDS


def test_a_token_that_the_config_has_as_null_is_not_one(tmp_path: Path) -> None:
    exported = again(tmp_path, None, pad_token_id=None)
    assert exported == IDS | {"pad_token_id": 5}  # the first end pads


def test_its_own_values_are_kept(tmp_path: Path) -> None:
    generation = {"eos_token_id": 5, "temperature": 0.5, "suppress_tokens": [4, 8]}
    assert again(tmp_path, generation) == generation


def test_suppressed_tokens_are_joined_with_the_padding(tmp_path: Path, config: TrainConfig) -> None:
    build_theirs("llama", tmp_path / "hf", vocab_size=303)  # and data.train has tokens of a vocabulary of 300
    (tmp_path / "hf/generation_config.json").write_text(json.dumps({"suppress_tokens": [4, 8]}))
    import_hf(tmp_path / "hf", tmp_path / "start")
    optim = replace(config.optim, steps=1, warmup_steps=0)
    train(replace(config, init_from=tmp_path / "start", model=ModelConfig(), optim=optim))
    export_hf(config.out_dir, tmp_path / "exported")
    exported = json.loads((tmp_path / "exported/generation_config.json").read_text())
    assert exported["suppress_tokens"] == [4, 8, 300, 301, 302]
