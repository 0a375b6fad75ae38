"""Hugging Face's forms of our model: which tensor of theirs holds which parameters of ours, and config.json.

Llama (LlamaForCausalLM) and GPT-2 (GPT2LMHeadModel). Both directions read one table, as a tensor of
theirs is looked at through views that are parameters of ours.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from gristmill.errors import InputError, UsageError
from training.model.decoder import Decoder
from training.model.model_config import ModelConfig

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.model"

# theirs, ours, whether it is a Conv1D: (inputs, outputs), where nn.Linear has (outputs, inputs). {} is the layer.
# Several of ours lie side by side along the outputs.
TABLES: dict[str, tuple[tuple[str, str, bool], ...]] = {
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
# the parts a form is made of: our configuration's field, the value it must have
PARTS: dict[str, dict[str, Any]] = {
    "llama": {"norm": "rms", "positions": "rope", "mlp": "swiglu"},
    "gpt2": {"norm": "layer", "positions": "learned", "mlp": "gelu", "bias": True},
}
# our field, theirs
SIZES: dict[str, dict[str, str]] = {
    "llama": {
        "layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads", "ffn_width": "intermediate_size", "vocab_size": "vocab_size",
        "context": "max_position_embeddings", "norm_eps": "rms_norm_eps", "init_std": "initializer_range",
        "tied": "tie_word_embeddings", "rope_base": "rope_theta", "bias": "attention_bias",
    },
    "gpt2": {
        "layers": "n_layer", "width": "n_embd", "heads": "n_head", "ffn_width": "n_inner", "vocab_size": "vocab_size",
        "context": "n_positions", "norm_eps": "layer_norm_epsilon", "init_std": "initializer_range",
        "tied": "tie_word_embeddings",
    },
}  # fmt: skip
# theirs, the values under which it computes what ours does; the first is what it is where nothing is said
FIXED: dict[str, dict[str, tuple[Any, ...]]] = {
    "llama": {"hidden_act": ("silu",), "rope_scaling": (None,)},
    "gpt2": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"), "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,),
    },
}  # fmt: skip
# theirs, where config.json leaves it out
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False, "rope_theta": 10_000.0, "attention_bias": False, "initializer_range": 0.02},
    "gpt2": {"tie_word_embeddings": True, "layer_norm_epsilon": 1e-5, "n_inner": None, "initializer_range": 0.02},
}
BODIES = {"llama": "model.", "gpt2": "transformer."}  # what a model without its head leaves out of the names
# buffers, which some files hold: they follow from the configuration
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel"}
_WITHOUT_A_TRACE = {"preset", "dropout", "kv_heads"}  # fields that decide nothing, or are looked at by themselves


@dataclass(frozen=True)
class Theirs:
    """A tensor of theirs: its name and shape, and the parameters of ours that it holds, by name."""

    name: str
    shape: tuple[int, ...]
    ours: tuple[str, ...]
    transposed: bool

    def views(self, tensor: Tensor) -> dict[str, Tensor]:
        """Each of our parameters as a view of the tensor: writing to it writes there."""
        parts = tensor.chunk(len(self.ours), dim=-1)
        return {name: part.T if self.transposed else part for name, part in zip(self.ours, parts, strict=True)}


def their_tensors(form: str, model: ModelConfig) -> list[Theirs]:
    """Every tensor of a model in a form, in the table's order. UsageError for a parameter that has no place there."""
    with torch.device("meta"):
        shapes = {name: tuple(parameter.shape) for name, parameter in Decoder(model).named_parameters()}
    found = [theirs for row in TABLES[form] for theirs in _expand(row, model.layers, shapes)]
    homeless = shapes.keys() - {name for theirs in found for name in theirs.ours}
    if homeless:
        raise UsageError(f"{_ARCHITECTURES[form]} has no place for {', '.join(sorted(homeless))}")
    return found


def _expand(row: tuple[str, str, bool], layers: int, shapes: dict[str, tuple[int, ...]]) -> Iterable[Theirs]:
    theirs, ours, conv1d = row
    for layer in range(layers if "{}" in theirs else 1):
        for kind in ("weight", "bias"):
            names = tuple(f"{name.format(layer)}.{kind}" for name in ours.split())
            if names[0] in shapes:
                transposed = conv1d and kind == "weight"
                shape = shapes[names[0]][::-1] if transposed else shapes[names[0]]
                shape = (*shape[:-1], shape[-1] * len(names)) if len(names) > 1 else shape
                yield Theirs(f"{theirs.format(layer)}.{kind}", shape, names, transposed)


def form_of(model: ModelConfig) -> str:
    """Which form holds a model. UsageError where none does, which says for each what stands in its way."""
    faults = {form: [*_part_faults(form, model)] for form in PARTS}
    for form, found in faults.items():
        if not found:
            return form
    told = "; ".join(f"{_ARCHITECTURES[form]} has {', '.join(found)}" for form, found in faults.items())
    raise UsageError(f"Hugging Face has no form for this mixture of parts: {told}. Only such models can be exported")


def _part_faults(form: str, model: ModelConfig) -> Iterable[str]:
    for name, wanted in PARTS[form].items():
        if getattr(model, name) != wanted:
            yield f"{name} {wanted!r} and not {getattr(model, name)!r}"
    if form == "gpt2" and model.kv_heads != model.heads:
        yield f"as many key heads as heads ({model.heads}) and not {model.kv_heads}"
    known = PARTS[form].keys() | SIZES[form].keys() | PARTS["llama"].keys() | {"rope_base"} | _WITHOUT_A_TRACE
    for field in fields(ModelConfig):
        if field.name not in known and getattr(model, field.name) != field.default:
            yield f"no {field.name} {getattr(model, field.name)!r}"


def to_config(form: str, model: ModelConfig, end: int, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of a model whose documents end with the token `end`, which also begins a text."""
    config = {
        "architectures": [_ARCHITECTURES[form]],
        "model_type": form,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": end,
        "eos_token_id": end,
        **{theirs: values[0] for theirs, values in FIXED[form].items()},
        **{theirs: getattr(model, ours) for ours, theirs in SIZES[form].items()},
    }
    if form == "gpt2":
        return config | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout)
    return config | {"mlp_bias": model.bias, "head_dim": model.width // model.heads}


def from_config(config: dict[str, Any]) -> tuple[str, ModelConfig]:
    """The form and our configuration of what a config.json describes. UsageError where ours computes otherwise."""
    form = config.get("model_type", "")
    if form not in TABLES:
        raise UsageError(f"its model_type is {form!r}; wanted one of {', '.join(TABLES)}")
    config = DEFAULTS[form] | config
    if form == "llama":
        config |= _rope(config)
    for theirs, accepted in FIXED[form].items():
        if config.get(theirs, accepted[0]) not in accepted:
            raise UsageError(f"its {theirs} is {config[theirs]!r}; our model has {accepted[0]!r} only")
    try:
        values = {ours: config[theirs] for ours, theirs in SIZES[form].items() if theirs in config}
        model = ModelConfig(**{"preset": form, "bias": False, **values, **PARTS[form]})
        model = replace(model, ffn_width=model.ffn_width or 4 * model.width)
        model = model.resolve(model.vocab_size, model.context)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise InputError(f"its sizes make no model ({error})") from error
    _check_llama(config, model)
    return form, model


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Where transformers 5 keeps what 4 kept in rope_theta and rope_scaling."""
    parameters = dict(config.get("rope_parameters") or {})
    found = {"rope_theta": parameters.pop("rope_theta", config["rope_theta"])}
    kind = parameters.pop("rope_type", "default")
    rest = {key: value for key, value in parameters.items() if (key, value) != ("partial_rotary_factor", 1.0)}
    return found | ({"rope_scaling": parameters | {"rope_type": kind}} if rest or kind != "default" else {})


def _check_llama(config: dict[str, Any], model: ModelConfig) -> None:
    wanted = {"mlp_bias": model.bias, "head_dim": model.width // model.heads}
    for theirs, value in wanted.items() if model.norm == "rms" else ():
        found = config.get(theirs)
        if found is not None and found != value:
            raise UsageError(f"its {theirs} is {found!r}; our model with its other sizes has {value!r}")
        if theirs == "mlp_bias" and found is None and model.bias:
            raise UsageError("it has attention_bias and no mlp_bias; our model has both or none")
