"""Qwen 3 with experts (Qwen team 2025): Qwen3MoeForCausalLM; some layers may be dense."""

from dataclasses import replace
from typing import Any

from gristmill.errors import UsageError
from training.hugging_face.families.llama import FAMILY as LLAMA
from training.hugging_face.families.llama import FIELDS_BUT_BIAS, TENSORS
from training.hugging_face.families.mixtral import LOSSES, expert_rows
from training.hugging_face.families.qwen3 import QK_NORMS
from training.hugging_face.family import ROPE, ROPE_DEFAULTS, FieldGroup
from training.model.model_config import ModelConfig

DEFAULTS = {
    "num_hidden_layers": 24, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
    "intermediate_size": 6144, "vocab_size": 151_936, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6,
    "initializer_range": 0.02, "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False,
    "use_sliding_window": False, "sliding_window": 4096, "head_dim": None, "decoder_sparse_step": 1,
    "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_local_experts": 128, "norm_topk_prob": False,
    "mlp_only_layers": None, **ROPE_DEFAULTS,
}  # fmt: skip


def _read(config: dict[str, Any]) -> dict[str, Any]:
    bias = config["attention_bias"]
    dense = config["mlp_only_layers"] or []
    if dense != list(range(len(dense))):
        raise UsageError(f"its mlp_only_layers are {dense}; our model implements the first layers only")
    window = config["sliding_window"] if config["use_sliding_window"] else None
    options: dict[str, Any] = {"dense_layers": len(dense)} if dense else {}
    options |= {"window": window} if window is not None else {}
    return {**options, "qkv_bias": bias, "out_bias": bias}


def _write(model: ModelConfig) -> dict[str, Any]:
    return {
        "num_experts": model.experts,  # its name in transformers 4
        "attention_bias": model.qkv_bias,
        "mlp_only_layers": list(range(model.dense_layers)),
        "use_sliding_window": bool(model.window),
        "sliding_window": model.window or None,
    }


FAMILY = replace(
    LLAMA, model_type="qwen3_moe", architecture="Qwen3MoeForCausalLM",
    tensors=(*TENSORS, *QK_NORMS, *expert_rows("model.layers.{}.mlp", ("gate_proj", "up_proj", "down_proj"))),
    parts={**LLAMA.parts, "qk_norm": True, "router": "softmax"},
    fields=FIELDS_BUT_BIAS
    | {
        "experts": "num_local_experts", "experts_per_token": "num_experts_per_tok",
        "expert_width": "moe_intermediate_size", "sparse_every": "decoder_sparse_step",
        "router_normalize": "norm_topk_prob",
    },
    defaults=DEFAULTS, ignored=LOSSES | {"max_window_layers"}, nullable=frozenset({"sliding_window"}),
    aliases={"num_experts": "num_local_experts"}, groups=(ROPE, FieldGroup(_read, _write)),
)  # fmt: skip
