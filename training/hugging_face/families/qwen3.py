"""Qwen 3 (Qwen team 2025): Qwen3ForCausalLM, a Llama with norms of each head's query and key."""

from typing import Any

from training.hugging_face.families.llama import FIELDS_BUT_BIAS, TENSORS
from training.hugging_face.families.qwen2 import QWEN_DEFAULTS, read_window, write_window
from training.hugging_face.family import ModelFamily, TensorRow, read_rope, write_rope
from training.model.model_config import ModelConfig

QK_NORMS = tuple(
    TensorRow(f"model.layers.{{}}.self_attn.{name}", f"blocks.{{}}.attention.{name}") for name in ("q_norm", "k_norm")
)


def _read(config: dict[str, Any]) -> dict[str, Any]:
    bias = config["attention_bias"]
    return {**read_rope(config), **read_window(config), "bias": False, "qkv_bias": bias, "out_bias": bias}


def _write(model: ModelConfig) -> dict[str, Any]:
    return {**write_rope(model), **write_window(model), "attention_bias": model.qkv_bias}


FAMILY = ModelFamily(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    preset="llama",
    body="model.",
    tensors=TENSORS[:-2] + QK_NORMS + TENSORS[-2:],
    parts={"norm": "rms", "positions": "rope", "mlp": "swiglu", "qk_norm": True},
    fields=FIELDS_BUT_BIAS,
    defaults={**QWEN_DEFAULTS, "head_dim": 128, "attention_bias": False},
    accepted={"hidden_act": ("silu",)},
    ignored=frozenset({"attention_dropout"}),
    nullable=frozenset({"sliding_window"}),
    buffers=(".rotary_emb.inv_freq",),
    read=_read,
    write=_write,
)
