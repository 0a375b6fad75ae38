"""BLOOM (BigScience 2022): BloomForCausalLM."""

from typing import Any

from gristmill.errors import UsageError
from training.hugging_face.family import QKV, FieldGroup, ModelFamily, TensorRow
from training.model.model_config import ModelConfig


def _read(config: dict[str, Any]) -> dict[str, Any]:
    if config["slow_but_exact"] and config["pretraining_tp"] > 1:  # these sums of transformers' leave out two biases
        raise UsageError(
            f"its slow_but_exact is {config['slow_but_exact']!r} and its pretraining_tp {config['pretraining_tp']}: "
            "with both transformers leaves out the biases of the outputs of attention and MLP, and our model has them; "
            "for the model with its biases set slow_but_exact to false"
        )
    return {"ffn_width": 4 * config["hidden_size"], "kv_heads": config["n_head"]}


def _write(model: ModelConfig) -> dict[str, Any]:
    return dict.fromkeys(("attention_dropout", "hidden_dropout"), model.dropout)


FAMILY = ModelFamily(
    model_type="bloom",
    architecture="BloomForCausalLM",
    preset="bloom",
    body="transformer.",
    tensors=(
        TensorRow("transformer.word_embeddings", "embed.tokens"),
        TensorRow("transformer.word_embeddings_layernorm", "embed.embed_norm"),
        TensorRow("transformer.h.{}.input_layernorm", "blocks.{}.attention_norm"),
        TensorRow("transformer.h.{}.self_attention.query_key_value", QKV, "per head"),
        TensorRow("transformer.h.{}.self_attention.dense", "blocks.{}.attention.o"),
        TensorRow("transformer.h.{}.post_attention_layernorm", "blocks.{}.mlp_norm"),
        TensorRow("transformer.h.{}.mlp.dense_h_to_4h", "blocks.{}.mlp.up"),
        TensorRow("transformer.h.{}.mlp.dense_4h_to_h", "blocks.{}.mlp.down"),
        TensorRow("transformer.ln_f", "norm"),
        TensorRow("lm_head", "head"),
    ),
    parts={"norm": "layer", "positions": "alibi", "mlp": "gelu", "bias": True, "embed_norm": True},
    fields={
        "layers": "n_layer", "width": "hidden_size", "heads": "n_head", "vocab_size": "vocab_size",
        "context": "seq_length", "norm_eps": "layer_norm_epsilon", "init_std": "initializer_range",
        "tied": "tie_word_embeddings",
    },
    defaults={
        "n_layer": 2, "hidden_size": 64, "n_head": 8, "vocab_size": 250_880, "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02, "tie_word_embeddings": True, "apply_residual_connection_post_layernorm": False,
        "slow_but_exact": False, "pretraining_tp": 1,
        "seq_length": 2048,  # transformers ignores it: ALiBi has no longest sequence
    },
    accepted={"apply_residual_connection_post_layernorm": (False,)},
    ignored=frozenset({
        "hidden_dropout", "attention_dropout", "attention_softmax_in_fp32",
        "bias_dropout_fusion", "masked_softmax_fusion", "offset_alibi", "skip_bias_add", "skip_bias_add_qkv",
    }),
    aliases={"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "n_embed": "hidden_size"},
    groups=(FieldGroup(_read, _write),),
)  # fmt: skip
