"""Mistral (Jiang et al. 2023): MistralForCausalLM, a Llama with sliding-window attention."""

from dataclasses import replace

from training.hugging_face.families.llama import FAMILY as LLAMA
from training.hugging_face.families.llama import FIELDS_BUT_BIAS
from training.hugging_face.family import ROPE, ROPE_DEFAULTS, WINDOW

DEFAULTS = {
    "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14_336, "vocab_size": 32_000, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6,
    "initializer_range": 0.02, "tie_word_embeddings": False, "hidden_act": "silu", "head_dim": None,
    "sliding_window": 4096, **ROPE_DEFAULTS,
}  # fmt: skip


FAMILY = replace(
    LLAMA, model_type="mistral", architecture="MistralForCausalLM", fields=FIELDS_BUT_BIAS, defaults=DEFAULTS,
    ignored=frozenset({"attention_dropout"}), nullable=frozenset({"sliding_window"}), groups=(ROPE, WINDOW),
)  # fmt: skip
