"""Qwen 2 and 2.5 (Qwen team 2024): Qwen2ForCausalLM, a Llama with biases of the queries, keys and values."""

from dataclasses import replace
from typing import Any

from gristmill.errors import UsageError
from training.hugging_face.families.llama import FAMILY as LLAMA
from training.hugging_face.families.llama import FIELDS_BUT_BIAS
from training.hugging_face.family import ROPE, ROPE_DEFAULTS, FieldGroup
from training.model.model_config import ModelConfig

QWEN_DEFAULTS = {
    "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 32,
    "intermediate_size": 22_016, "vocab_size": 151_936, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6,
    "initializer_range": 0.02, "tie_word_embeddings": False, "hidden_act": "silu", "use_sliding_window": False,
    "sliding_window": 4096, "max_window_layers": 28, "layer_types": None, **ROPE_DEFAULTS,
}  # fmt: skip
_KINDS = ("full_attention", "sliding_attention")


def _read_window(config: dict[str, Any]) -> dict[str, Any]:
    """Return the window, if all layers have it. Raises UsageError where some do: ours has one kind of attention."""
    window = config["sliding_window"]
    kinds = config["layer_types"]
    if not config["use_sliding_window"] or window is None:
        return {}
    if kinds is None:
        kinds = [_KINDS[i >= config["max_window_layers"]] for i in range(config["num_hidden_layers"])]
    if unknown := [kind for kind in kinds if kind not in _KINDS]:
        raise UsageError(f"its layer_types has {unknown[0]!r}; our model implements {' and '.join(_KINDS)}")
    if len(set(kinds)) > 1:
        raise UsageError("only some of its layers have a sliding_window; our model has the same attention in all")
    return {"window": window} if _KINDS[1] in kinds else {}


def _write_window(model: ModelConfig) -> dict[str, Any]:
    """Return the window of all layers, or none."""
    return {
        "use_sliding_window": bool(model.window),
        "sliding_window": model.window or None,
        "max_window_layers": 0 if model.window else model.layers,
        "layer_types": [_KINDS[bool(model.window)]] * model.layers,
    }


QWEN_WINDOW = FieldGroup(_read_window, _write_window)
FAMILY = replace(
    LLAMA, model_type="qwen2", architecture="Qwen2ForCausalLM", parts={**LLAMA.parts, "qkv_bias": True},
    fields=FIELDS_BUT_BIAS, defaults={**QWEN_DEFAULTS, "head_dim": None}, ignored=frozenset({"attention_dropout"}),
    nullable=frozenset({"sliding_window"}), forces_tokenizer=True, groups=(ROPE, QWEN_WINDOW),
)  # fmt: skip
