"""gpt-oss (OpenAI 2025): GptOssForCausalLM, of attention with sinks, and windows in every other layer."""

from typing import Any

from gristmill.errors import UsageError
from training.hugging_face.families.llama import TENSORS
from training.hugging_face.families.mixtral import EXPERT_FIELDS, EXPERT_WIDTH, LOSSES
from training.hugging_face.family import ROPE_DEFAULTS, FieldGroup, ModelFamily, TensorRow, read_rope, write_rope
from training.model.model_config import ModelConfig

_MLP = "model.layers.{}.mlp"
_EXPERTS = "blocks.{}.mlp.experts"
_WINDOW = "sliding_attention"
_FULL = "full_attention"
_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
DEFAULTS = {
    "num_hidden_layers": 36, "hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8,
    "intermediate_size": 2880, "vocab_size": 201_088, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
    "initializer_range": 0.02, "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": True,
    "head_dim": 64, "sliding_window": 128, "layer_types": None, "num_local_experts": 128, "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702, "swiglu_limit": 7.0, **ROPE_DEFAULTS,
}  # fmt: skip


def _read(config: dict[str, Any]) -> dict[str, Any]:
    bias = config["attention_bias"]
    window = config["sliding_window"]
    if not (config["rope_scaling"] or config["rope_parameters"]):
        config = config | {"rope_scaling": _ROPE}
    options = {**read_rope(config, 150_000.0), "qkv_bias": bias, "out_bias": bias}
    every = _full_every(config["layer_types"], config["num_hidden_layers"])
    if window is None or every == 1:
        return options
    return {**options, "window": window, "full_attention_every": every}


def _full_every(kinds: list[str] | None, layers: int) -> int:
    """Return every how many-th layer has no window; by default every second. Raises UsageError for another order."""
    if kinds is None:
        return 2
    every = kinds.index(_FULL) + 1 if _FULL in kinds else layers + 1
    if kinds != _kinds(every, layers):
        raise UsageError(f"its layer_types are {kinds}; our model implements {_FULL} in every n-th layer")
    return every


def _kinds(every: int, layers: int) -> list[str]:
    return [_WINDOW if (layer + 1) % every else _FULL for layer in range(layers)]


def _write(model: ModelConfig) -> dict[str, Any]:
    every = (model.full_attention_every or model.layers + 1) if model.window else 1
    return {
        **write_rope(model),
        "attention_bias": model.qkv_bias,
        "sliding_window": model.window or None,
        "layer_types": _kinds(every, model.layers),
    }


FAMILY = ModelFamily(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    preset="llama",
    body="model.",
    tensors=(
        *(row for row in TENSORS if ".mlp." not in row.theirs),
        TensorRow("model.layers.{}.self_attn.sinks", "blocks.{}.attention.sinks"),
        TensorRow(f"{_MLP}.router", "blocks.{}.mlp.router"),
        TensorRow(f"{_MLP}.experts.gate_up_proj", f"{_EXPERTS}.gate {_EXPERTS}.up", "experts"),
        TensorRow(f"{_MLP}.experts.down_proj", f"{_EXPERTS}.down", "experts"),
    ),
    parts={
        "norm": "rms", "positions": "rope", "mlp": "swiglu-clamped", "mlp_bias": True, "sinks": True,
        "router": "softmax", "router_bias": True, "router_normalize": True,
    },
    fields=EXPERT_FIELDS | {"experts": "num_local_experts", "head_dim": "head_dim"},
    defaults=DEFAULTS,
    accepted={"hidden_act": ("silu",), "swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
    ignored=LOSSES | {"initial_context_length"},
    nullable=frozenset({"sliding_window", "head_dim"}),
    aliases={"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
    groups=(EXPERT_WIDTH, FieldGroup(_read, _write)),
)  # fmt: skip
