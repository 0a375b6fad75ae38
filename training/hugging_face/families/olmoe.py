"""OLMoE (Muennighoff et al. 2024): OlmoeForCausalLM, a Llama with experts and norms of all queries and all keys."""

from dataclasses import replace

from training.hugging_face.families.llama import FAMILY as LLAMA
from training.hugging_face.families.llama import TENSORS
from training.hugging_face.families.mixtral import EXPERT_FIELDS, EXPERT_WIDTH, LOSSES, expert_rows
from training.hugging_face.families.qwen3 import QK_NORMS
from training.hugging_face.family import ATTENTION_BIAS, ROPE, ROPE_DEFAULTS

DEFAULTS = {
    "num_hidden_layers": 16, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": None,
    "intermediate_size": 2048, "vocab_size": 50_304, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "initializer_range": 0.02, "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False,
    "clip_qkv": None, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False, **ROPE_DEFAULTS,
}  # fmt: skip


FAMILY = replace(
    LLAMA, model_type="olmoe", architecture="OlmoeForCausalLM",
    tensors=(
        *(row for row in TENSORS if ".mlp." not in row.theirs),
        *QK_NORMS,
        *expert_rows("model.layers.{}.mlp", ("gate_proj", "up_proj", "down_proj")),
    ),
    parts={**LLAMA.parts, "qk_norm": True, "qk_norm_joint": True, "router": "softmax"},
    fields=EXPERT_FIELDS | {"experts": "num_experts", "router_normalize": "norm_topk_prob"}, defaults=DEFAULTS,
    accepted={"hidden_act": ("silu",), "clip_qkv": (None,)}, ignored=LOSSES,
    aliases={"num_local_experts": "num_experts"}, groups=(EXPERT_WIDTH, ROPE, ATTENTION_BIAS),
)  # fmt: skip
