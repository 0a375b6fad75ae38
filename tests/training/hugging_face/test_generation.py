"""transformers generates from an exported folder the text that our sampler does."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from gristmill.io.token_shards import Manifest
from tests.training.conftest import write_shards
from tests.training.hf_models import MODELS, save
from tests.training.hugging_face.test_tokenizer_json import train
from training.distributed.process_group import init_distributed
from training.experimental.parallel_config import ParallelConfig
from training.hugging_face.export_hf import export_hf
from training.model.decoder import Decoder, meta_decoder
from training.model.model_config import ModelConfig
from training.parallel.mesh import build_world
from training.parallel.parallel_model import ParallelModel
from training.parallel.parallelize import parallelize
from training.reporting.reporting_config import EvalConfig
from training.reporting.sample import Sampler

# one model of each family
GENERATED = [
    "llama, yarn",
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen3_moe",
    "olmoe",
    "deepseek_v3",
    "gpt_oss",
    "gpt2",
    "gpt_neox",
    "bloom, 3 heads",
    "opt",
]
PROMPT, TOKENS = "the miller\n  carries 水", 12


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of token shards, with the tokenizer beside it."""
    folder = tmp_path_factory.mktemp("tokens")
    path = folder / "lossless.model"
    path.write_bytes(train().serialized_model_proto())
    size = train().vocab_size()
    return write_shards(folder / "train", [[[5, 6, 2]]], path, size)


def random_model(config: ModelConfig, vocab_size: int) -> ParallelModel:
    """Its ids beyond the tokenizer's are the most probable, and bytes improbable: alone they are no text."""
    config = replace(config, vocab_size=vocab_size + 3).resolve(vocab_size, 64)
    layout = ParallelConfig().resolve(1, config, 64)
    model = parallelize(meta_decoder(config), layout, build_world(layout, torch.device("cpu")), seed=1)
    (part,) = model.parts
    with torch.no_grad():
        for matrix in {part.get_parameter("embed.tokens.weight"), part.get_parameter("head.weight")}:
            matrix[3:259] = 0
            matrix[vocab_size:] *= 3
    return model


@pytest.mark.parametrize("name", GENERATED)
def test_generated_text_is_the_sampler_s(tmp_path: Path, tokens: Path, name: str) -> None:
    manifest = Manifest.load(tokens)
    with init_distributed("cpu"):
        model = random_model(MODELS[name], manifest.tokenizer.vocab_size)
        (part,) = model.parts
        assert isinstance(part, Decoder)
        config = EvalConfig(sample_tokens=TOKENS, prompt=PROMPT, temperature=0.0)
        expected = Sampler(tokens, manifest, config, seed=1).sample(model)
        run = save(part, tmp_path / "run", manifest.tokenizer)
    said = export_hf(run, tmp_path / "hf", tokens)
    own = "read its tokenizer by PreTrainedTokenizerFast" in said  # AutoTokenizer knows better for a type of model
    reader = transformers.PreTrainedTokenizerFast if own else transformers.AutoTokenizer
    assert own == name.startswith("qwen2")
    tokenizer = reader.from_pretrained(tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    found = theirs.generate(**tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=TOKENS, do_sample=False)
    text = tokenizer.decode(found[0], skip_special_tokens=True)
    assert text == expected and len(text) > len(PROMPT) + TOKENS // 2
    assert hashlib.sha256((tmp_path / "hf/tokenizer.model").read_bytes()).hexdigest() == manifest.tokenizer.sha256
