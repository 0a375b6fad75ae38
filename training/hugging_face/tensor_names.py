"""Tensor names: maps parameters and configuration to Hugging Face's LlamaForCausalLM and GPT2LMHeadModel.

Export and import use the same tables: our parameters are views of the Hugging Face (HF) tensors.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from gristmill.config import check_ranges
from gristmill.errors import InputError, UsageError
from training.model.decoder import meta_decoder
from training.model.model_config import ModelConfig

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILE = "tokenizer.model"

# (HF name, our name or names, True for a Conv1D). {} is the layer's number. A Conv1D's weight is (inputs, outputs),
# nn.Linear's (outputs, inputs). One HF tensor holds several of our parameters concatenated along the outputs.
TENSOR_TABLES: dict[str, tuple[tuple[str, str, bool], ...]] = {
    "llama": (
        ("model.embed_tokens", "embed.tokens", False),
        ("model.layers.{}.input_layernorm", "blocks.{}.attention_norm", False),
        ("model.layers.{}.self_attn.q_proj", "blocks.{}.attention.q", False),
        ("model.layers.{}.self_attn.k_proj", "blocks.{}.attention.k", False),
        ("model.layers.{}.self_attn.v_proj", "blocks.{}.attention.v", False),
        ("model.layers.{}.self_attn.o_proj", "blocks.{}.attention.o", False),
        ("model.layers.{}.post_attention_layernorm", "blocks.{}.mlp_norm", False),
        ("model.layers.{}.mlp.gate_proj", "blocks.{}.mlp.gate", False),
        ("model.layers.{}.mlp.up_proj", "blocks.{}.mlp.up", False),
        ("model.layers.{}.mlp.down_proj", "blocks.{}.mlp.down", False),
        ("model.norm", "norm", False),
        ("lm_head", "head", False),
    ),
    "gpt2": (
        ("transformer.wte", "embed.tokens", False),
        ("transformer.wpe", "embed.positions", False),
        ("transformer.h.{}.ln_1", "blocks.{}.attention_norm", False),
        ("transformer.h.{}.attn.c_attn", "blocks.{}.attention.q blocks.{}.attention.k blocks.{}.attention.v", True),
        ("transformer.h.{}.attn.c_proj", "blocks.{}.attention.o", True),
        ("transformer.h.{}.ln_2", "blocks.{}.mlp_norm", False),
        ("transformer.h.{}.mlp.c_fc", "blocks.{}.mlp.up", True),
        ("transformer.h.{}.mlp.c_proj", "blocks.{}.mlp.down", True),
        ("transformer.ln_f", "norm", False),
        ("lm_head", "head", False),
    ),
}
# values that fields of ModelConfig must have, for each architecture
REQUIRED_OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {"norm": "rms", "positions": "rope", "mlp": "swiglu"},
    "gpt2": {"norm": "layer", "positions": "learned", "mlp": "gelu", "bias": True},
}
# field of ModelConfig: field of config.json
CONFIG_FIELDS: dict[str, dict[str, str]] = {
    "llama": {
        "layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads", "ffn_width": "intermediate_size", "vocab_size": "vocab_size",
        "context": "max_position_embeddings", "norm_eps": "rms_norm_eps", "init_std": "initializer_range",
        "tied": "tie_word_embeddings", "rope_base": "rope_theta", "qkv_bias": "attention_bias",
        "mlp_bias": "mlp_bias", "head_dim": "head_dim",
    },
    "gpt2": {
        "layers": "n_layer", "width": "n_embd", "heads": "n_head", "ffn_width": "n_inner", "vocab_size": "vocab_size",
        "context": "n_positions", "norm_eps": "layer_norm_epsilon", "init_std": "initializer_range",
        "tied": "tie_word_embeddings",
    },
}  # fmt: skip
# field of config.json: values that our model implements; the first is the default
ACCEPTED_VALUES: dict[str, dict[str, tuple[Any, ...]]] = {
    "llama": {"hidden_act": ("silu",), "rope_scaling": (None,)},
    "gpt2": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"), "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,),
    },
}  # fmt: skip
# default values of fields that config.json may omit
CONFIG_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "tie_word_embeddings": False,
        "rope_theta": 10_000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": 0.02,
    },
    "gpt2": {"tie_word_embeddings": True, "layer_norm_epsilon": 1e-5, "n_inner": None, "initializer_range": 0.02},
}
BODY_PREFIXES = {
    "llama": "model.",
    "gpt2": "transformer.",
}  # omitted from names by a model without head
# buffers that some files contain; ignored, they are computed from the configuration
IGNORED_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel"}
# without effect on the exported model, or checked separately
_NOT_COMPARED = {"preset", "dropout", "kv_heads", "head_dim", "bias", "qkv_bias", "out_bias", "mlp_bias"}


@dataclass(frozen=True)
class HFTensor:
    """A Hugging Face tensor: holds one or more of our parameters, concatenated along the last dimension."""

    name: str
    shape: tuple[int, ...]
    parameters: tuple[str, ...]
    transposed: bool

    def views(self, tensor: Tensor) -> dict[str, Tensor]:
        """Return our parameters as views of the tensor, by name: writing to a view writes to the tensor."""
        parts = tensor.chunk(len(self.parameters), dim=-1)
        return {name: part.T if self.transposed else part for name, part in zip(self.parameters, parts, strict=True)}


def hf_tensors(architecture: str, model: ModelConfig) -> list[HFTensor]:
    """List the HF tensors of a model, in the table's order. Raises UsageError for a parameter that it lacks."""
    shapes = {name: tuple(parameter.shape) for name, parameter in meta_decoder(model).named_parameters()}
    found = [tensor for row in TENSOR_TABLES[architecture] for tensor in _expand_row(row, model.layers, shapes)]
    unmapped = shapes.keys() - {name for tensor in found for name in tensor.parameters}
    if unmapped:
        raise UsageError(f"{_ARCHITECTURES[architecture]} has no place for {', '.join(sorted(unmapped))}")
    return found


def _expand_row(row: tuple[str, str, bool], layers: int, shapes: dict[str, tuple[int, ...]]) -> Iterable[HFTensor]:
    """Expand a row of the table to the weight and bias of every layer."""
    theirs, ours, conv1d = row
    for layer in range(layers if "{}" in theirs else 1):
        for kind in ("weight", "bias"):
            names = tuple(f"{name.format(layer)}.{kind}" for name in ours.split())
            if names[0] in shapes:
                transposed = conv1d and kind == "weight"
                shape = shapes[names[0]][::-1] if transposed else shapes[names[0]]
                shape = (*shape[:-1], shape[-1] * len(names)) if len(names) > 1 else shape
                yield HFTensor(f"{theirs.format(layer)}.{kind}", shape, names, transposed)


def find_architecture(model: ModelConfig) -> str:
    """Return the architecture of a model, llama or gpt2. Raises UsageError if it is neither, with the differences."""
    differences = {architecture: [*_differences(architecture, model)] for architecture in REQUIRED_OPTIONS}
    for architecture, found in differences.items():
        if not found:
            return architecture
    reasons = "; ".join(f"{_ARCHITECTURES[name]} has {', '.join(found)}" for name, found in differences.items())
    raise UsageError(
        f"no Hugging Face architecture has this mixture of parts: {reasons}. Only a Llama or a GPT-2 can be exported"
    )


def _differences(architecture: str, model: ModelConfig) -> Iterable[str]:
    for name, wanted in REQUIRED_OPTIONS[architecture].items():
        if getattr(model, name) != wanted:
            yield f"{name} {wanted!r} and not {getattr(model, name)!r}"
    if architecture == "gpt2" and model.kv_heads != model.heads:
        yield f"kv_heads {model.heads} (= heads) and not {model.kv_heads}"
    if architecture == "gpt2" and model.q_width != model.width:
        yield f"head_dim {model.width // model.heads} (= width / heads) and not {model.head_dim}"
    if architecture == "gpt2" and not (model.qkv_bias and model.out_bias and model.mlp_bias):
        yield "biases in all linear layers"
    if architecture == "llama" and model.qkv_bias != model.out_bias:
        yield f"qkv_bias equal to out_bias, and not {model.qkv_bias} and {model.out_bias}"
    known = (
        REQUIRED_OPTIONS[architecture].keys()
        | CONFIG_FIELDS[architecture].keys()
        | REQUIRED_OPTIONS["llama"].keys()
        | {"rope_base"}
        | _NOT_COMPARED
    )
    for field in fields(ModelConfig):
        if field.name not in known and getattr(model, field.name) != field.default:
            yield f"no {field.name} {getattr(model, field.name)!r}"


def to_hf_config(architecture: str, model: ModelConfig, end: int, dtype: torch.dtype) -> dict[str, Any]:
    """Build config.json; `end`: id of the end-of-document token, which is also the first token of a text; or -1."""
    config = {
        "architectures": [_ARCHITECTURES[architecture]],
        "model_type": architecture,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **dict.fromkeys(("bos_token_id", "eos_token_id"), end if end >= 0 else None),
        **{theirs: values[0] for theirs, values in ACCEPTED_VALUES[architecture].items()},
        **{theirs: getattr(model, ours) for ours, theirs in CONFIG_FIELDS[architecture].items()},
    }
    if architecture == "gpt2":
        return config | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout)
    return config


def from_hf_config(config: dict[str, Any]) -> tuple[str, ModelConfig]:
    """Convert config.json to the architecture and our ModelConfig.

    Raises UsageError for options that our model does not implement, InputError for sizes that do not fit together.
    """
    architecture = config.get("model_type", "")
    if not isinstance(architecture, str) or architecture not in TENSOR_TABLES:
        raise UsageError(f"its model_type is {architecture!r}; wanted one of {', '.join(TENSOR_TABLES)}")
    config = CONFIG_DEFAULTS[architecture] | config
    if architecture == "llama":
        config |= _convert_rope(config)
    for theirs, accepted in ACCEPTED_VALUES[architecture].items():
        if config.get(theirs, accepted[0]) not in accepted:
            raise UsageError(f"its {theirs} is {config[theirs]!r}; our model implements {accepted[0]!r} only")
    try:
        table = CONFIG_FIELDS[architecture].items()
        values = {ours: config[theirs] for ours, theirs in table if config.get(theirs) is not None}
        values = {"preset": architecture, "bias": False, **values, **REQUIRED_OPTIONS[architecture]}
        values |= {"out_bias": values["qkv_bias"]} if "qkv_bias" in values else {}
        model = msgspec.convert(values, ModelConfig)
        check_ranges(model, "model.")
        model = replace(model, ffn_width=model.ffn_width or 4 * model.width)
        model = model.resolve(model.vocab_size, model.context)
    except (msgspec.ValidationError, TypeError, ValueError, ZeroDivisionError) as error:
        raise InputError(f"its sizes do not fit together ({error})") from error
    return architecture, model


def _convert_rope(config: dict[str, Any]) -> dict[str, Any]:
    """Convert transformers 5's rope_parameters to transformers 4's rope_theta and rope_scaling."""
    parameters = config.get("rope_parameters") or {}
    if not isinstance(parameters, dict):
        raise UsageError(f"its rope_parameters is {parameters!r}; wanted fields such as rope_theta")
    parameters = dict(parameters)
    found = {"rope_theta": parameters.pop("rope_theta", config["rope_theta"])}
    kind = parameters.pop("rope_type", "default")
    rest = {key: value for key, value in parameters.items() if (key, value) != ("partial_rotary_factor", 1.0)}
    return found | ({"rope_scaling": parameters | {"rope_type": kind}} if rest or kind != "default" else {})
