"""Llama (Touvron et al. 2023): LlamaForCausalLM."""

from training.hugging_face.family import ATTENTION_BIAS, ROPE, ROPE_DEFAULTS, ModelFamily, TensorRow

TENSORS = (
    TensorRow("model.embed_tokens", "embed.tokens"),
    TensorRow("model.layers.{}.input_layernorm", "blocks.{}.attention_norm"),
    TensorRow("model.layers.{}.self_attn.q_proj", "blocks.{}.attention.q"),
    TensorRow("model.layers.{}.self_attn.k_proj", "blocks.{}.attention.k"),
    TensorRow("model.layers.{}.self_attn.v_proj", "blocks.{}.attention.v"),
    TensorRow("model.layers.{}.self_attn.o_proj", "blocks.{}.attention.o"),
    TensorRow("model.layers.{}.post_attention_layernorm", "blocks.{}.mlp_norm"),
    TensorRow("model.layers.{}.mlp.gate_proj", "blocks.{}.mlp.gate"),
    TensorRow("model.layers.{}.mlp.up_proj", "blocks.{}.mlp.up"),
    TensorRow("model.layers.{}.mlp.down_proj", "blocks.{}.mlp.down"),
    TensorRow("model.norm", "norm"),
    TensorRow("lm_head", "head"),
)
FIELDS = {
    "layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "ffn_width": "intermediate_size", "vocab_size": "vocab_size",
    "context": "max_position_embeddings", "norm_eps": "rms_norm_eps", "init_std": "initializer_range",
    "tied": "tie_word_embeddings", "mlp_bias": "mlp_bias", "head_dim": "head_dim",
}  # fmt: skip
FIELDS_BUT_BIAS = {ours: theirs for ours, theirs in FIELDS.items() if ours != "mlp_bias"}
"""Of models whose MLP has no biases to choose."""
DEFAULTS = {
    "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": None,
    "intermediate_size": 11_008, "vocab_size": 32_000, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
    "initializer_range": 0.02, "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False,
    "mlp_bias": False, "head_dim": None, **ROPE_DEFAULTS,
}  # fmt: skip


FAMILY = ModelFamily(
    model_type="llama",
    architecture="LlamaForCausalLM",
    preset="llama",
    body="model.",
    tensors=TENSORS,
    parts={"norm": "rms", "positions": "rope", "mlp": "swiglu", "bias": False},
    fields=FIELDS,
    defaults=DEFAULTS,
    accepted={"hidden_act": ("silu",)},
    ignored=frozenset({"attention_dropout", "pretraining_tp"}),
    buffers=(".rotary_emb.inv_freq",),
    groups=(ROPE, ATTENTION_BIAS),
)
