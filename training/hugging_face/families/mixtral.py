"""Mixtral (Jiang et al. 2024): MixtralForCausalLM, a Mistral whose MLPs are experts."""

from dataclasses import replace
from functools import partial

from training.hugging_face.families.llama import FAMILY as LLAMA
from training.hugging_face.families.llama import FIELDS_BUT_BIAS, TENSORS
from training.hugging_face.family import ROPE_DEFAULTS, WINDOW, FieldGroup, TensorRow, read_rope, write_rope

_LAYER = "model.layers.{}.block_sparse_moe"
EXPERT_FIELDS = {
    **{ours: theirs for ours, theirs in FIELDS_BUT_BIAS.items() if ours != "head_dim"},
    "experts_per_token": "num_experts_per_tok",
}
"""Of models whose experts have the width that a dense model's MLP has; all layers are sparse."""
DEFAULTS = {
    "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14_336, "vocab_size": 32_000, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
    "initializer_range": 0.02, "tie_word_embeddings": False, "hidden_act": "silu", "head_dim": None,
    "sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2, "router_jitter_noise": 0.0,
    **ROPE_DEFAULTS,
}  # fmt: skip
LOSSES = frozenset({"attention_dropout", "output_router_logits", "router_aux_loss_coef"})
"""Fields of sparse models that change the loss of training alone."""


def expert_rows(layer: str, names: tuple[str, str, str]) -> tuple[TensorRow, ...]:
    """Return the rows of a sparse layer, whose matrices of gate, up and down have these `names`."""
    parts = zip(names, ("gate", "up", "down"), strict=True)
    experts = (TensorRow(f"{layer}.experts.{{}}.{name}", f"blocks.{{}}.mlp.experts.{part}") for name, part in parts)
    return TensorRow(f"{layer}.gate", "blocks.{}.mlp.router"), *experts


EXPERT_WIDTH = FieldGroup(lambda _: {}, lambda model: {"intermediate_size": model.expert_width})
"""Where no layer is dense `ffn_width` means nothing, and may be another one."""
_ROPE = FieldGroup(partial(read_rope, default_base=1_000_000.0), write_rope)
_HEAD_DIM = FieldGroup(
    lambda config: {} if config["head_dim"] is None else {"head_dim": config["head_dim"]},
    lambda model: {"head_dim": model.head_dim},
)
FAMILY = replace(
    LLAMA, model_type="mixtral", architecture="MixtralForCausalLM",
    tensors=(*(row for row in TENSORS if ".mlp." not in row.theirs), *expert_rows(_LAYER, ("w1", "w3", "w2"))),
    parts={**LLAMA.parts, "router": "softmax", "router_normalize": True},
    fields=EXPERT_FIELDS | {"experts": "num_local_experts"}, defaults=DEFAULTS,
    accepted={"hidden_act": ("silu",), "router_jitter_noise": (0.0,)}, ignored=LOSSES,
    nullable=frozenset({"sliding_window"}), aliases={"num_experts": "num_local_experts"},
    groups=(EXPERT_WIDTH, _ROPE, _HEAD_DIM, WINDOW),
)  # fmt: skip
