"""OPT (Zhang et al. 2022): OPTForCausalLM; opt-350m, with its norms after the sublayers, is another model."""

from typing import Any

from gristmill.errors import UsageError
from training.hugging_face.family import FieldGroup, ModelFamily, TensorRow, read_activation, write_activation
from training.model.model_config import ModelConfig

_EPSILON = 1e-5  # of all norms, in no field


def _read(config: dict[str, Any]) -> dict[str, Any]:
    projected = config["word_embed_proj_dim"]
    if projected not in (None, config["hidden_size"]):
        raise UsageError(
            f"its word_embed_proj_dim is {projected!r} and its hidden_size {config['hidden_size']!r}; our model has "
            "no projections of the embedding"
        )
    return {"mlp": read_activation(config, "activation_function"), "kv_heads": config["num_attention_heads"]}


def _write(model: ModelConfig) -> dict[str, Any]:
    return {
        "activation_function": write_activation(model),
        "word_embed_proj_dim": model.width,
        **dict.fromkeys(("dropout", "attention_dropout"), model.dropout),
    }


FAMILY = ModelFamily(
    model_type="opt",
    architecture="OPTForCausalLM",
    preset="opt",
    body="model.",
    tensors=(
        TensorRow("model.decoder.embed_tokens", "embed.tokens"),
        TensorRow("model.decoder.embed_positions", "embed.positions"),
        TensorRow("model.decoder.layers.{}.self_attn_layer_norm", "blocks.{}.attention_norm"),
        TensorRow("model.decoder.layers.{}.self_attn.q_proj", "blocks.{}.attention.q"),
        TensorRow("model.decoder.layers.{}.self_attn.k_proj", "blocks.{}.attention.k"),
        TensorRow("model.decoder.layers.{}.self_attn.v_proj", "blocks.{}.attention.v"),
        TensorRow("model.decoder.layers.{}.self_attn.out_proj", "blocks.{}.attention.o"),
        TensorRow("model.decoder.layers.{}.final_layer_norm", "blocks.{}.mlp_norm"),
        TensorRow("model.decoder.layers.{}.fc1", "blocks.{}.mlp.up"),
        TensorRow("model.decoder.layers.{}.fc2", "blocks.{}.mlp.down"),
        TensorRow("model.decoder.final_layer_norm", "norm"),
        TensorRow("lm_head", "head"),
    ),
    parts={"norm": "layer", "positions": "learned", "position_offset": 2, "bias": True, "norm_eps": _EPSILON},
    fields={
        "layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads", "ffn_width": "ffn_dim",
        "vocab_size": "vocab_size", "context": "max_position_embeddings", "init_std": "init_std",
        "tied": "tie_word_embeddings",
    },
    defaults={
        "num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "ffn_dim": 3072, "vocab_size": 50_272,
        "max_position_embeddings": 2048, "init_std": 0.02, "tie_word_embeddings": True, "activation_function": "relu",
        "word_embed_proj_dim": None, "do_layer_norm_before": True, "_remove_final_layer_norm": False,
        "enable_bias": True, "layer_norm_elementwise_affine": True, "layerdrop": 0.0,
    },
    accepted={
        "do_layer_norm_before": (True,), "_remove_final_layer_norm": (False,), "enable_bias": (True,),
        "layer_norm_elementwise_affine": (True,), "layerdrop": (0.0,),
    },
    ignored=frozenset({"dropout", "attention_dropout", "activation_dropout"}),
    groups=(FieldGroup(_read, _write),),
)  # fmt: skip
