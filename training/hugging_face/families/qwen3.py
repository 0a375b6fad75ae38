"""Qwen 3 (Qwen team 2025): Qwen3ForCausalLM, a Llama with norms of each head's query and key."""

from dataclasses import replace

from training.hugging_face.families.llama import FAMILY as LLAMA
from training.hugging_face.families.llama import TENSORS
from training.hugging_face.families.qwen2 import FAMILY as QWEN2
from training.hugging_face.families.qwen2 import QWEN_DEFAULTS, QWEN_WINDOW
from training.hugging_face.family import ATTENTION_BIAS, ROPE, TensorRow

QK_NORMS = tuple(
    TensorRow(f"model.layers.{{}}.self_attn.{name}", f"blocks.{{}}.attention.{name}") for name in ("q_norm", "k_norm")
)


FAMILY = replace(
    QWEN2, model_type="qwen3", architecture="Qwen3ForCausalLM", tensors=TENSORS[:-2] + QK_NORMS + TENSORS[-2:],
    parts={**LLAMA.parts, "qk_norm": True}, defaults={**QWEN_DEFAULTS, "head_dim": 128, "attention_bias": False},
    forces_tokenizer=False, groups=(ROPE, QWEN_WINDOW, ATTENTION_BIAS),
)  # fmt: skip
