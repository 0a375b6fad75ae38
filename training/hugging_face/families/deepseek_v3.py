"""DeepSeek-V3 (DeepSeek-AI 2024): DeepseekV3ForCausalLM, of latent attention, with shared experts."""

import math
from typing import Any

from training.hugging_face.families.llama import FIELDS_BUT_BIAS, TENSORS
from training.hugging_face.families.mixtral import LOSSES, expert_rows
from training.hugging_face.family import ROPE_DEFAULTS, FieldGroup, ModelFamily, TensorRow, read_rope, write_rope
from training.model.model_config import ModelConfig

_ATTENTION = "model.layers.{}.self_attn"
_MLP = "model.layers.{}.mlp"
_MATRICES = ("gate_proj", "up_proj", "down_proj")
DEFAULTS = {
    "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128,
    "intermediate_size": 18_432, "vocab_size": 129_280, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    "initializer_range": 0.02, "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
    "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "rope_interleave": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1,
    **ROPE_DEFAULTS,
}  # fmt: skip


def _read(config: dict[str, Any]) -> dict[str, Any]:
    scaling = dict(config["rope_scaling"] or config["rope_parameters"] or {})
    mscale = scaling.pop("mscale", None)
    of_scores = scaling.pop("mscale_all_dim", None)
    options = read_rope(config | {"rope_scaling": scaling})
    if of_scores and options["rope_scaling"] != "none":
        options["rope_mscale_all_dim"] = of_scores
        growth = [0.1 * factor * math.log(scaling["factor"]) + 1 for factor in (mscale or 0, of_scores)]
        options |= (
            {"rope_attention_factor": growth[0] / growth[1]} if mscale and "attention_factor" not in scaling else {}
        )
    for name in ("first_k_dense_replace", "q_lora_rank"):  # without a dense layer, or a vector of queries
        options |= {_OWN[name]: config[name]} if config[name] else {}
    return options


def _write(model: ModelConfig) -> dict[str, Any]:
    rope = write_rope(model)
    if model.rope_mscale_all_dim:
        rope["rope_scaling"]["mscale_all_dim"] = model.rope_mscale_all_dim
        if model.rope_attention_factor == 1:  # also for readers that know no attention_factor
            rope["rope_scaling"]["mscale"] = model.rope_mscale_all_dim
    own = {theirs: getattr(model, ours) for theirs, ours in _OWN.items()}
    return {**rope, **own, "q_lora_rank": model.q_lora_rank or None, "num_nextn_predict_layers": 0}


_OWN = {"first_k_dense_replace": "dense_layers", "q_lora_rank": "q_lora_rank"}
FAMILY = ModelFamily(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    preset="llama",
    body="model.",
    tensors=(
        *(row for row in TENSORS if row.theirs.rpartition(".")[2] not in ("q_proj", "k_proj", "v_proj")),
        TensorRow(f"{_ATTENTION}.q_proj", "blocks.{}.attention.q", "rotated heads"),
        TensorRow(f"{_ATTENTION}.q_a_proj", "blocks.{}.attention.q_a"),
        TensorRow(f"{_ATTENTION}.q_a_layernorm", "blocks.{}.attention.q_a_norm"),
        TensorRow(f"{_ATTENTION}.q_b_proj", "blocks.{}.attention.q_b", "rotated heads"),
        TensorRow(f"{_ATTENTION}.kv_a_proj_with_mqa", "blocks.{}.attention.kv_a", "rotated"),
        TensorRow(f"{_ATTENTION}.kv_a_layernorm", "blocks.{}.attention.kv_a_norm"),
        TensorRow(f"{_ATTENTION}.kv_b_proj", "blocks.{}.attention.kv_b"),
        *expert_rows(_MLP, _MATRICES),
        TensorRow(f"{_MLP}.gate.e_score_correction_bias", "blocks.{}.mlp.router.choice_bias", "buffer"),
        *(
            TensorRow(f"{_MLP}.shared_experts.{name}", f"blocks.{{}}.mlp.shared.{name.removesuffix('_proj')}")
            for name in _MATRICES
        ),
    ),
    parts={"norm": "rms", "positions": "rope", "mlp": "swiglu", "router": "sigmoid", "balance": "bias", "bias": False},
    fields={ours: theirs for ours, theirs in FIELDS_BUT_BIAS.items() if ours != "head_dim"}
    | {
        "kv_lora_rank": "kv_lora_rank", "qk_nope_head_dim": "qk_nope_head_dim", "qk_rope_head_dim": "qk_rope_head_dim",
        "v_head_dim": "v_head_dim", "experts": "n_routed_experts", "shared_experts": "n_shared_experts",
        "experts_per_token": "num_experts_per_tok", "expert_width": "moe_intermediate_size",
        "expert_groups": "n_group", "groups_per_token": "topk_group", "router_normalize": "norm_topk_prob",
        "router_scale": "routed_scaling_factor",
    },
    defaults=DEFAULTS,
    accepted={
        "hidden_act": ("silu",), "attention_bias": (False,), "rope_interleave": (True,), "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",), "moe_layer_freq": (1,),
    },
    ignored=LOSSES
    | {
        "head_dim", "qk_head_dim", "num_nextn_predict_layers", "pretraining_tp", "ep_size", "aux_loss_alpha", "seq_aux",
    },
    nullable=frozenset({"q_lora_rank"}),
    aliases={"num_local_experts": "n_routed_experts"},
    buffers=(".rotary_emb.inv_freq",),
    beyond="model.layers.{}.",
    groups=(FieldGroup(_read, _write),),
)  # fmt: skip
