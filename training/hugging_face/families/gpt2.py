"""GPT-2 (Radford et al. 2019): GPT2LMHeadModel."""

from typing import Any

from training.hugging_face.family import QKV, FieldGroup, ModelFamily, TensorRow, read_activation, write_activation
from training.model.model_config import ModelConfig

_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


def _read(config: dict[str, Any]) -> dict[str, Any]:
    activation = read_activation(config, "activation_function")
    return {"mlp": activation, "ffn_width": config["n_inner"] or 4 * config["n_embd"], "kv_heads": config["n_head"]}


def _write(model: ModelConfig) -> dict[str, Any]:
    dropouts = dict.fromkeys(_DROPOUTS, model.dropout)
    sizes = {"n_inner": model.ffn_width, "n_ctx": model.context}  # llama.cpp's converter reads n_ctx
    return {**dropouts, "activation_function": write_activation(model), **sizes}


FAMILY = ModelFamily(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    preset="gpt2",
    body="transformer.",
    tensors=(
        TensorRow("transformer.wte", "embed.tokens"),
        TensorRow("transformer.wpe", "embed.positions"),
        TensorRow("transformer.h.{}.ln_1", "blocks.{}.attention_norm"),
        TensorRow("transformer.h.{}.attn.c_attn", QKV, "conv1d"),
        TensorRow("transformer.h.{}.attn.c_proj", "blocks.{}.attention.o", "conv1d"),
        TensorRow("transformer.h.{}.ln_2", "blocks.{}.mlp_norm"),
        TensorRow("transformer.h.{}.mlp.c_fc", "blocks.{}.mlp.up", "conv1d"),
        TensorRow("transformer.h.{}.mlp.c_proj", "blocks.{}.mlp.down", "conv1d"),
        TensorRow("transformer.ln_f", "norm"),
        TensorRow("lm_head", "head"),
    ),
    parts={"norm": "layer", "positions": "learned", "bias": True},
    fields={
        "layers": "n_layer", "width": "n_embd", "heads": "n_head", "vocab_size": "vocab_size",
        "context": "n_positions", "norm_eps": "layer_norm_epsilon", "init_std": "initializer_range",
        "tied": "tie_word_embeddings",
    },
    defaults={
        "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50_257, "n_positions": 1024, "n_inner": None,
        "layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "tie_word_embeddings": True,
        "activation_function": "gelu_new", "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    accepted={
        "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,),
    },
    ignored=frozenset({
        *_DROPOUTS, "n_ctx", "reorder_and_upcast_attn", "summary_type", "summary_use_proj", "summary_activation",
        "summary_proj_to_labels", "summary_first_dropout",
    }),
    aliases={
        "num_hidden_layers": "n_layer", "hidden_size": "n_embd", "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    },
    buffers=(".attn.bias", ".attn.masked_bias"),
    groups=(FieldGroup(_read, _write),),
)  # fmt: skip
