"""What llama.cpp's converter (convert_hf_to_gguf.py) reads of a model's folder, exports have, as vLLM (test_vllm.py).

Their published expectations as of 2025, in our words: no program of theirs runs here. What the converter made of such
exports is in docs/guides/checkpoints.md.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch

from tests.training.generation.conftest import checkpoint_of
from tests.training.hf_models import MODELS
from tests.training.hugging_face.test_generation import GENERATED
from tests.training.hugging_face.test_vllm import READERS
from training.hugging_face.export_hf import export_hf
from training.hugging_face.hf_config import find_family, write_hf_config

__all__ = ["checkpoint_of"]

# of each number one of these names, by which either program looks it up
ONE_OF = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "width": ("hidden_size", "n_embd", "n_embed"),
    "heads": ("num_attention_heads", "n_head"),
    "context": ("max_position_embeddings", "n_positions", "n_ctx", "seq_length"),
}
LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "first_k_dense_replace")
SHARED = ("moe_intermediate_size", "n_routed_experts", "n_shared_experts", "routed_scaling_factor", "norm_topk_prob")
# architectures that the converter registers, and what it asks of each by name
CONVERTER: dict[str, tuple[str, ...]] = {
    "LlamaForCausalLM": ("intermediate_size", "rms_norm_eps", "num_key_value_heads"),
    "MistralForCausalLM": ("intermediate_size", "rms_norm_eps", "num_key_value_heads"),
    "MixtralForCausalLM": ("intermediate_size", "rms_norm_eps", "num_local_experts", "num_experts_per_tok"),
    "Qwen2ForCausalLM": ("intermediate_size", "rms_norm_eps", "num_key_value_heads"),
    "Qwen3ForCausalLM": ("intermediate_size", "rms_norm_eps", "num_key_value_heads", "head_dim"),
    "Qwen3MoeForCausalLM": ("moe_intermediate_size", "num_experts", "num_experts_per_tok", "rms_norm_eps"),
    "OlmoeForCausalLM": ("intermediate_size", "num_experts", "num_experts_per_tok", "rms_norm_eps"),
    "DeepseekV3ForCausalLM": ("intermediate_size", "rms_norm_eps", "num_experts_per_tok", *LATENT, *SHARED),
    "GptOssForCausalLM": ("intermediate_size", "sliding_window", "num_local_experts", "num_experts_per_tok"),
    "GPT2LMHeadModel": ("n_ctx", "n_embd", "n_head", "layer_norm_epsilon"),
    "GPTNeoXForCausalLM": ("max_position_embeddings", "intermediate_size", "rotary_pct", "layer_norm_eps"),
    "BloomForCausalLM": ("hidden_size", "n_head", "layer_norm_epsilon"),
}


def config_of(name: str) -> dict[str, Any]:
    """The config.json that the export of a small model has."""
    model = MODELS[name].resolve(300, 64)
    return write_hf_config(find_family(model), model, 2, torch.bfloat16)


@pytest.mark.parametrize("name", GENERATED)
def test_a_config_has_what_both_programs_read(name: str) -> None:
    config = config_of(name)
    model = MODELS[name].resolve(300, 64)
    (architecture,) = config["architectures"]
    assert architecture in READERS and config["model_type"]
    expected = {**asdict(model), "context": 64}
    for number, names in ONE_OF.items():
        found = {config[name] for name in names if name in config}
        assert found == {expected[number]}, (number, found)
    assert config["vocab_size"] == 300 and config["torch_dtype"] == "bfloat16"
    assert config["eos_token_id"] == 2  # the end of a text, also of vLLM's
    if architecture in CONVERTER:
        missing = [name for name in CONVERTER[architecture] if config.get(name) is None]
        assert not missing
    if model.positions == "rope":
        rope = config.get("rope_parameters") or {}
        assert config.get("rope_theta", rope.get("rope_theta")) == model.rope_base
    if architecture == "GPT2LMHeadModel":
        assert config["n_ctx"] == 64
    if architecture == "GPTNeoXForCausalLM":
        assert config["rotary_pct"] == config["rope_parameters"]["partial_rotary_factor"] == model.rope_fraction


def test_a_folder_has_files_that_both_programs_find(tmp_path: Path, checkpoint_of: Any) -> None:
    """Weights by name, and the SentencePiece model that the converter reads before any tokenizer.json."""
    run = checkpoint_of("llama")
    export_hf(run, tmp_path / "hf", run / "train")
    names = {path.name for path in (tmp_path / "hf").iterdir()}
    weights = [name for name in names if name.startswith("model") and name.endswith(".safetensors")]
    assert weights and {"config.json", "tokenizer.model", "tokenizer.json", "tokenizer_config.json"} <= names
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "hf/tokenizer.model"))
    assert pieces.vocab_size() <= json.loads((tmp_path / "hf/config.json").read_text())["vocab_size"]
