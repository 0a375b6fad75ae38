"""Qwen 3 (Qwen team 2025): Qwen3ForCausalLM, a Llama with norms of each head's query and key."""

from dataclasses import replace
from typing import Any

from training.hugging_face.families.llama import FAMILY as LLAMA
from training.hugging_face.families.llama import TENSORS
from training.hugging_face.families.qwen2 import FAMILY as QWEN2
from training.hugging_face.families.qwen2 import QWEN_DEFAULTS, read_window, write_window
from training.hugging_face.family import TensorRow, read_rope, write_rope
from training.model.model_config import ModelConfig

QK_NORMS = tuple(
    TensorRow(f"model.layers.{{}}.self_attn.{name}", f"blocks.{{}}.attention.{name}") for name in ("q_norm", "k_norm")
)


def _read(config: dict[str, Any]) -> dict[str, Any]:
    bias = config["attention_bias"]
    return {**read_rope(config), **read_window(config), "bias": False, "qkv_bias": bias, "out_bias": bias}


def _write(model: ModelConfig) -> dict[str, Any]:
    return {**write_rope(model), **write_window(model), "attention_bias": model.qkv_bias}


FAMILY = replace(
    QWEN2, model_type="qwen3", architecture="Qwen3ForCausalLM", tensors=TENSORS[:-2] + QK_NORMS + TENSORS[-2:],
    parts={**LLAMA.parts, "qk_norm": True}, defaults={**QWEN_DEFAULTS, "head_dim": 128, "attention_bias": False},
    forces_tokenizer=False, read=_read, write=_write,
)  # fmt: skip
