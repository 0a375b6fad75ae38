"""GPT-NeoX (Black et al. 2022) and Pythia (Biderman et al. 2023): GPTNeoXForCausalLM."""

from typing import Any

from training.hugging_face.family import (
    QKV,
    ROPE_DEFAULTS,
    FieldGroup,
    ModelFamily,
    TensorRow,
    read_activation,
    read_rope,
    write_activation,
)
from training.model.model_config import ModelConfig


def _read(config: dict[str, Any]) -> dict[str, Any]:
    parameters = dict(config["rope_parameters"] or {})
    fraction = parameters.pop("partial_rotary_factor", config["rotary_pct"])
    base = {"rope_theta": config["rotary_emb_base"]} if config["rotary_emb_base"] else {}
    residual = "parallel" if config["use_parallel_residual"] else "pre-norm"
    return {
        **read_rope({**config, "rope_parameters": base | parameters}),
        "rope_fraction": fraction,
        "residual": residual,
        "mlp": read_activation(config, "hidden_act"),
        "kv_heads": config["num_attention_heads"],
        **dict.fromkeys(("qkv_bias", "out_bias"), config["attention_bias"]),
    }


def _write(model: ModelConfig) -> dict[str, Any]:
    return {
        "rope_parameters": {
            "rope_type": "default", "rope_theta": model.rope_base, "partial_rotary_factor": model.rope_fraction,
        },
        "rotary_pct": model.rope_fraction,  # where llama.cpp's converter and transformers 4 look
        "use_parallel_residual": model.residual == "parallel",
        "hidden_act": write_activation(model),
        "attention_bias": model.qkv_bias,
        **dict.fromkeys(("attention_dropout", "hidden_dropout"), model.dropout),
    }  # fmt: skip


FAMILY = ModelFamily(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    preset="gpt-neox",
    body="gpt_neox.",
    tensors=(
        TensorRow("gpt_neox.embed_in", "embed.tokens"),
        TensorRow("gpt_neox.layers.{}.input_layernorm", "blocks.{}.attention_norm"),
        TensorRow("gpt_neox.layers.{}.attention.query_key_value", QKV, "per head"),
        TensorRow("gpt_neox.layers.{}.attention.dense", "blocks.{}.attention.o"),
        TensorRow("gpt_neox.layers.{}.post_attention_layernorm", "blocks.{}.mlp_norm"),
        TensorRow("gpt_neox.layers.{}.mlp.dense_h_to_4h", "blocks.{}.mlp.up"),
        TensorRow("gpt_neox.layers.{}.mlp.dense_4h_to_h", "blocks.{}.mlp.down"),
        TensorRow("gpt_neox.final_layer_norm", "norm"),
        TensorRow("embed_out", "head"),
    ),
    parts={"norm": "layer", "positions": "rope", "bias": True, "mlp_bias": True},
    fields={
        "layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads",
        "ffn_width": "intermediate_size", "vocab_size": "vocab_size", "context": "max_position_embeddings",
        "norm_eps": "layer_norm_eps", "init_std": "initializer_range", "tied": "tie_word_embeddings",
    },
    defaults={
        "num_hidden_layers": 44, "hidden_size": 6144, "num_attention_heads": 64, "intermediate_size": 24_576,
        "vocab_size": 50_432, "max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "initializer_range": 0.02,
        "tie_word_embeddings": False, "hidden_act": "gelu", "use_parallel_residual": True, "attention_bias": True,
        "rotary_pct": 0.25, "rotary_emb_base": None, **ROPE_DEFAULTS,
    },
    accepted={},
    ignored=frozenset({
        "attention_dropout", "hidden_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob",
    }),
    buffers=(".attention.bias", ".attention.masked_bias", ".attention.rotary_emb.inv_freq"),
    groups=(FieldGroup(_read, _write),),
)  # fmt: skip
