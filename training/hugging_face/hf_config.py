"""config.json of a Hugging Face model, to our ModelConfig and back; what we do not know or implement is refused."""

import json
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import msgspec
import torch

from gristmill.config import check_ranges
from gristmill.errors import GristmillError, InputError, UsageError
from training.hugging_face.families import FAMILIES
from training.hugging_face.family import ModelFamily
from training.model.model_config import ModelConfig

CONFIG_FILE = "config.json"

# Fields of every model type that change nothing of what a decoder computes: names, ids of tokens, what is returned, and
# how text is generated
_IGNORED = frozenset({
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "_name_or_path", "name_or_path",
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "cls_token_id",
    "decoder_start_token_id", "tokenizer_class", "prefix", "use_cache", "gradient_checkpointing", "torchscript",
    "use_bfloat16", "output_hidden_states", "output_attentions", "output_scores", "return_dict",
    "return_dict_in_generate", "chunk_size_feed_forward", "id2label", "label2id", "num_labels", "problem_type",
    "classifier_dropout", "finetuning_task", "task_specific_params", "tie_encoder_decoder", "tf_legacy_loss",
    "is_decoder", "_attn_implementation_autoset", "max_length", "min_length", "do_sample", "early_stopping",
    "num_beams", "num_beam_groups", "num_return_sequences", "diversity_penalty", "temperature", "top_k", "top_p",
    "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "bad_words_ids",
    "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty",
    "suppress_tokens", "begin_suppress_tokens",
})  # fmt: skip
_ACCEPTED: dict[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,), "add_cross_attention": (False,), "cross_attention_hidden_size": (None,),
    "pruned_heads": ({},),
}  # fmt: skip
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Fields that programs write into any configuration, and that change nothing: at these values, or at any (None)
_INERT: dict[str, tuple[Any, ...] | None] = {
    "is_llama_config": None, "transformers.js_config": None, "unsloth_fixed": None, "unsloth_version": None,
    "_attn_implementation": None, "attn_implementation": None, "_commit_hash": None, "license": None,
    "model_max_length": None, "rope_interleaved": (False,), "auto_map": ({},), "quantization_config": ({},),
    "use_mrope": (False,), "_model_name_or_path": None,
}  # fmt: skip
_NEAREST = 3  # families that a refusal names
_OTHER_SIZES = "other sizes"
# without effect on an exported model: a bias of the choice has no place among the tensors of a family
_NOT_COMPARED = {"preset", "dropout", "balance", "balance_loss", "balance_rate", "router_z_loss", "capacity_factor"}


def read_hf_config(
    config: dict[str, Any], say: Callable[[str], object] = lambda _: None
) -> tuple[ModelFamily, ModelConfig]:
    """Convert config.json to its family and our ModelConfig; `say` takes a line for what has no effect there.

    Raises UsageError for a field that is unknown or a value that our model does not implement, InputError for sizes
    that do not fit together.
    """
    model_type = config.get("model_type", "")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UsageError(f"its model_type is {model_type!r}; expected one of {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    full = _with_defaults(family, config, say)
    for name, accepted in (_ACCEPTED | dict(family.accepted)).items():
        if full.get(name, accepted[0]) not in accepted:
            raise UsageError(f"its {name} is {full[name]!r}; our model implements {accepted[0]!r} only")
    try:
        more = {ours: value for group in family.groups for ours, value in group.read(full).items()}
    except (TypeError, ValueError, ZeroDivisionError) as error:
        if isinstance(error, UsageError):
            raise
        raise InputError(f"its sizes do not fit together ({error})") from error
    values = {ours: full[theirs] for ours, theirs in family.fields.items() if full[theirs] is not None} | more
    _refuse_zeros(values)
    try:
        model = msgspec.convert({"preset": family.preset, **family.parts, **values}, ModelConfig)
        check_ranges(model, "model.")
        model = model.resolve(model.vocab_size, model.context)
    except (msgspec.ValidationError, TypeError, ValueError, ZeroDivisionError) as error:
        raise InputError(f"its sizes do not fit together ({error})") from error
    return family, model


def _refuse_zeros(values: dict[str, Any]) -> None:
    """Raise InputError for a size or a number that is 0, which means a default in our options."""
    for name, value in values.items():
        if name not in ("dropout", "init_std") and isinstance(value, int | float) and value == 0 and value is not False:
            raise InputError(f"its sizes do not fit together (model.{name} is {value}; expected more than 0)")


def known_fields(family: ModelFamily) -> set[str]:
    """Return the names of the fields of config.json of which we know what they mean."""
    return {*family.defaults, *family.ignored, *_IGNORED, *_ACCEPTED}


def _with_defaults(family: ModelFamily, config: dict[str, Any], say: Callable[[str], object]) -> dict[str, Any]:
    """Return every field by its name of today, with transformers' default where there is none.

    Raises UsageError for a field that is unknown: it may change what the model computes. A null is no value.
    """
    full = dict(family.defaults)
    known = known_fields(family)
    for key, value in config.items():
        name = family.aliases.get(key, key)
        if name not in known and value is not None and _is_inert(family, name, value):
            say(f"its {key} is {json.dumps(value)[:60]}, which changes nothing of what the model computes")
            continue
        if name not in known and value is not None:
            raise UsageError(
                f"its {key} is {value!r}, a field that is not known for {family.model_type} and may change what the "
                "model computes; remove it if it does not"
            )
        if name != key and config.get(name) not in (None, value):
            raise UsageError(f"its {key} is {value!r} and its {name} {config[name]!r}, which mean the same; remove one")
        full[name] = full.get(name) if value is None and name not in family.nullable else value
    return full


def _is_inert(family: ModelFamily, name: str, value: Any) -> bool:
    if name == "auto_map" and family.model_type == "deepseek_v3" and isinstance(value, dict):
        files = {str(code).partition(".")[0] for code in value.values()}
        return files <= {"configuration_deepseek", "modeling_deepseek"}  # code that transformers has by now
    if name == "layer_types":
        return isinstance(value, list) and {*map(str, value)} == {"full_attention"}
    return name in _INERT and ((accepted := _INERT[name]) is None or value in accepted)


def write_hf_config(
    family: ModelFamily, model: ModelConfig, end: int, dtype: torch.dtype, begin: int = -1
) -> dict[str, Any]:
    """Build config.json; `end`, `begin`: ids of the tokens that end and begin a document; -1: none.

    Without a begin token the end of another document comes before a text.
    """
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **ids_of_tokens(end, begin),
        "pad_token_id": None,
        **{theirs: values[0] for theirs, values in family.accepted.items()},
        **{theirs: getattr(model, ours) for ours, theirs in family.fields.items()},
        **{theirs: value for group in family.groups for theirs, value in group.write(model).items()},
    }


def ids_of_tokens(end: int, begin: int) -> dict[str, int | None]:
    """bos_token_id and eos_token_id."""
    first = begin if begin >= 0 else end
    return {"bos_token_id": first if first >= 0 else None, "eos_token_id": end if end >= 0 else None}


def find_family(model: ModelConfig) -> ModelFamily:
    """Return the first family that represents a resolved model.

    Raises UsageError if none does, with the nearest ones'.
    """
    for option, name in model.own_names.items():
        raise UsageError(f"{option} is {name}, a part of yours, which no Hugging Face architecture has: not exported")
    differences = dict[str, list[str]]()
    for family in FAMILIES.values():
        differences[family.architecture] = list(_differences(family, model))
        if not differences[family.architecture]:
            return family
    by_distance = sorted(differences, key=lambda name: (_OTHER_SIZES in differences[name][0], len(differences[name])))
    nearest = by_distance[:_NEAREST]
    reasons = "; ".join(f"{name} has {', '.join(differences[name])}" for name in nearest)
    raise UsageError(
        f"no Hugging Face architecture has this mixture of parts, so it cannot be exported; the nearest: {reasons}"
    )


def _differences(family: ModelFamily, model: ModelConfig) -> Iterator[str]:
    """Yield what becomes different of a model that is written as a config.json of `family` and read again."""
    try:
        _, there = read_hf_config(write_hf_config(family, model, -1, torch.float32))
    except GristmillError as error:
        yield f"{_OTHER_SIZES}: {error}"
        return
    unused = {"rope_base"} if model.positions != "rope" else set()
    unused |= {"ffn_width"} if len(model.sparse_layers) == model.layers else set()
    for name in [field.name for field in fields(ModelConfig) if field.name not in _NOT_COMPARED | unused]:
        ours = getattr(model, name)
        theirs = getattr(there, name)
        if ours != theirs:
            yield f"{name} {theirs!r} and not {ours!r}"
