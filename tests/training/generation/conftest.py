"""Checkpoints of small random models, with a tokenizer, to write text with."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gristmill.io.token_shards import Manifest
from tests.training.conftest import write_shards
from tests.training.hf_models import MODELS, save
from tests.training.hugging_face.test_generation import random_model
from tests.training.hugging_face.test_tokenizer_json import train
from training.distributed.process_group import init_distributed
from training.model.decoder import Decoder


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`checkpoint_of(NAME)`: the folder of a run that has a checkpoint of a random model of hf_models, once made."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp("generation")
        (folder / "lossless.model").write_bytes(train().serialized_model_proto())
        tokens = write_shards(folder / "train", [[[5, 6, 2]]], folder / "lossless.model", train().vocab_size())
        tokenizer = Manifest.load(tokens).tokenizer
        with init_distributed("cpu"):
            (part,) = random_model(MODELS[name], tokenizer.vocab_size).parts
            assert isinstance(part, Decoder)
            save(part, folder, tokenizer)
        return folder

    def get(name: str) -> Path:
        if name not in made:
            made[name] = make(name)
        return made[name]

    return get
