"""What vLLM reads of a model's folder, the export of each family has, with the values for which it computes the same.

No program of theirs runs here: the table has what its files say, in our words, each at the commit at which it was read.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

from tests.training.conftest import REPOSITORY
from tests.training.generation.conftest import checkpoint_of
from tests.training.hf_models import MODELS
from tests.training.hugging_face.test_generation import GENERATED
from training.hugging_face.export_hf import export_hf
from training.hugging_face.families import FAMILIES
from training.hugging_face.hf_config import find_family, write_hf_config

__all__ = ["checkpoint_of"]


@dataclass(frozen=True)
class Reader:
    """What one file of vLLM reads of a folder: fields by name, fixed ones, and the names of tensors."""

    file: str
    weights: str
    """Expression for the names of tensors, without the body's name and `.weight` or `.bias`; {} is a number."""
    fields: tuple[str, ...] = ()
    fixed: dict[str, Any] = field(default_factory=dict)
    """Fields that it does not read, or refuses with another value: it computes as if they had this one."""


NUMBERS = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "max_position_embeddings")
ROPE_MODEL = (*NUMBERS, "num_key_value_heads", "intermediate_size", "tie_word_embeddings")
RMS_MODEL = (*ROPE_MODEL, "rms_norm_eps")
ENDS = r"embed_tokens|norm|lm_head|layers\.{}\.(input_layernorm|post_attention_layernorm"
HEADS = r"|self_attn\.[qkvo]_proj"
DENSE = r"|mlp\.(gate|up|down)_proj"
EXPERTS = r"|mlp\.gate|mlp\.experts\.{}\.(gate|up|down)_proj"
LATENT = r"|self_attn\.(q_a_proj|q_a_layernorm|q_b_proj|q_proj|kv_a_proj_with_mqa|kv_a_layernorm|kv_b_proj|o_proj)"
SHARED = r"|mlp\.gate\.e_score_correction_bias|mlp\.shared_experts\.(gate|up|down)_proj"
SILU = {"hidden_act": "silu"}
OWN_HEAD = {"tie_word_embeddings": False}  # it has a matrix for the output, and leaves it empty without a tensor of it

# files of vllm/model_executor/models by the architectures that registry.py (at 0002bff0) has them for
READERS = {
    "LlamaForCausalLM": Reader("llama.py at 0035bdf2", f"{ENDS}{HEADS}{DENSE})", RMS_MODEL, SILU),
    "MistralForCausalLM": Reader("llama.py at 0035bdf2", f"{ENDS}{HEADS}{DENSE})", RMS_MODEL, SILU),
    "Qwen2ForCausalLM": Reader("qwen2.py at 013a2792", f"{ENDS}{HEADS}{DENSE})", RMS_MODEL, SILU),
    "Qwen3ForCausalLM": Reader(
        "qwen3.py at 002456df", rf"{ENDS}{HEADS}{DENSE}|self_attn\.[qk]_norm)", (*RMS_MODEL, "head_dim"), SILU
    ),
    "MixtralForCausalLM": Reader(
        "mixtral.py at 005df92d",
        rf"{ENDS}{HEADS}|block_sparse_moe\.gate|block_sparse_moe\.experts\.{{}}\.w[123])",
        (*RMS_MODEL, "num_local_experts", "num_experts_per_tok", "sliding_window"),
        OWN_HEAD,
    ),
    "Qwen3MoeForCausalLM": Reader(
        "qwen3_moe.py at 002456df",
        rf"{ENDS}{HEADS}{DENSE}{EXPERTS}|self_attn\.[qk]_norm)",
        (
            *RMS_MODEL, "head_dim", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
            "mlp_only_layers", "decoder_sparse_step",
        ),
        SILU,
    ),
    "OlmoeForCausalLM": Reader(
        "olmoe.py at 048a32c7",
        rf"{ENDS}{HEADS}{EXPERTS}|self_attn\.[qk]_norm)",
        (*ROPE_MODEL, "num_experts", "num_experts_per_tok"),
        {**OWN_HEAD, "rms_norm_eps": 1e-5, "norm_topk_prob": False, "attention_bias": False, "clip_qkv": None},
    ),
    "DeepseekV3ForCausalLM": Reader(
        "deepseek_v2.py at 002d6073",
        rf"{ENDS}{LATENT}{DENSE}{EXPERTS}{SHARED})",
        (
            *RMS_MODEL, "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
            "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
            "n_group", "topk_group", "routed_scaling_factor", "first_k_dense_replace",
        ),
        {**SILU, **OWN_HEAD, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1},
    ),
    "GptOssForCausalLM": Reader(
        "gpt_oss.py at a6b6cfaa",
        rf"{ENDS}{HEADS}|self_attn\.sinks|mlp\.router|mlp\.experts\.(gate_up|down)_proj(_bias)?)",
        (*ROPE_MODEL, "head_dim", "num_local_experts", "num_experts_per_tok", "sliding_window", "rope_parameters"),
        {
            **OWN_HEAD, "rms_norm_eps": 1e-5, "attention_bias": True,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "GPT2LMHeadModel": Reader(
        "gpt2.py at 01768942",
        r"wte|wpe|ln_f|h\.{}\.(ln_1|ln_2|attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)",
        (*NUMBERS, "activation_function", "layer_norm_epsilon", "n_inner"),
        {
            "add_cross_attention": False, "scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False,
            "tie_word_embeddings": True,
        },
    ),
    "GPTNeoXForCausalLM": Reader(
        "gpt_neox.py at 002800f0",
        r"embed_in|embed_out|final_layer_norm|layers\.{}\.(input_layernorm|post_attention_layernorm|"
        r"attention\.query_key_value|attention\.dense|mlp\.dense_h_to_4h|mlp\.dense_4h_to_h)",
        (*NUMBERS, "intermediate_size", "hidden_act", "layer_norm_eps", "rotary_pct", "use_parallel_residual"),
        {**OWN_HEAD, "attention_bias": True},
    ),
    "BloomForCausalLM": Reader(
        "bloom.py at 01dbb081",
        r"word_embeddings|word_embeddings_layernorm|ln_f|h\.{}\.(input_layernorm|post_attention_layernorm|"
        r"self_attention\.query_key_value|self_attention\.dense|mlp\.dense_h_to_4h|mlp\.dense_4h_to_h)",
        # its feed-forward width is four times hidden_size, as in transformers: no field says another
        ("hidden_size", "n_head", "num_hidden_layers", "vocab_size", "layer_norm_epsilon"),
        {"apply_residual_connection_post_layernorm": False, "tie_word_embeddings": True},
    ),
    "OPTForCausalLM": Reader(
        "opt.py at 002a0ba9",
        r"decoder\.(embed_tokens|embed_positions|final_layer_norm|layers\.{}\.(self_attn\.([qkv]|out)_proj|"
        r"self_attn_layer_norm|fc1|fc2|final_layer_norm))",
        (
            *NUMBERS, "ffn_dim", "activation_function", "word_embed_proj_dim", "enable_bias", "do_layer_norm_before",
            "layer_norm_elementwise_affine", "_remove_final_layer_norm",
        ),
        {"tie_word_embeddings": True},
    ),
}  # fmt: skip
# options of ours for which vLLM computes the same, where it has other constants: the page names them
ASKED = {"olmoe": {"norm_eps": 1e-5, "router_normalize": False}, "gpt_oss": {"norm_eps": 1e-5}}


@pytest.mark.parametrize("name", GENERATED)
def test_transformers_reads_a_config_that_vllm_computes_as_we_do(tmp_path: Path, name: str) -> None:
    """vLLM reads config.json through transformers."""
    model = replace(MODELS[name], **ASKED.get(name, {})).resolve(300, 64)
    config = write_hf_config(find_family(model), model, 2, torch.bfloat16)
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = transformers.AutoConfig.from_pretrained(tmp_path)
    reader = READERS[config["architectures"][0]]
    missing = [wanted for wanted in reader.fields if wanted not in config and not hasattr(read, wanted)]
    assert not missing, reader.file
    different = {key: getattr(read, key, None) for key in reader.fixed if getattr(read, key, None) != reader.fixed[key]}
    assert not different, reader.file
    assert read.num_hidden_layers == model.layers and read.hidden_size == model.width


@pytest.mark.parametrize("name", GENERATED)
def test_vllm_knows_each_tensor_by_its_name(tmp_path: Path, checkpoint_of: Callable[[str], Path], name: str) -> None:
    run = checkpoint_of(name)
    export_hf(run, tmp_path / "hf", run / "train")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    reader = READERS[config["architectures"][0]]
    known = re.compile(reader.weights.replace("{}", r"\d+"))
    with safe_open(tmp_path / "hf/model.safetensors", "pt") as file:
        names = list(file.keys())
    bare = [re.sub(r"^(model|transformer|gpt_neox)\.|\.(weight|bias)$", "", key) for key in names]
    assert len(names) > 10
    assert [key for key in bare if not known.fullmatch(key)] == [], reader.file


def test_the_page_names_the_option_where_vllm_ties_the_output_matrix_or_does_not() -> None:
    table = (REPOSITORY / "docs/guides/checkpoints.md").read_text().partition("## vLLM")[2]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    asked = {family: row[3] for row in rows for family in re.findall(r"`(\w+)`", row[1])}
    assert set(asked) == set(FAMILIES)
    for family in FAMILIES.values():
        is_tied = READERS[family.architecture].fixed.get("tie_word_embeddings")
        named = re.findall(r"--model\.tied (\w+)", asked[family.model_type])
        assert named == ([] if is_tied is None else [str(is_tied).lower()]), family.model_type


def test_vllm_reads_a_gpt_oss_that_is_not_in_four_bits(tmp_path: Path) -> None:
    """Its experts are read by the names of ours only without quantization_config, whose `quant_method` it asks for."""
    model = MODELS["gpt_oss"].resolve(300, 64)
    config = write_hf_config(find_family(model), model, 2, torch.bfloat16)
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = transformers.AutoConfig.from_pretrained(tmp_path)
    assert not hasattr(read, "quantization_config")
    expected = {"rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow"}
    assert expected <= read.rope_parameters.keys()
