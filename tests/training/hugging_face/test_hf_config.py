"""config.json: every field of every family is known, and one that is not is refused by name."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from gristmill.errors import UsageError
from training.hugging_face.families import FAMILIES
from training.hugging_face.hf_config import find_family, known_fields, read_hf_config, write_hf_config
from training.model.model_config import ModelConfig

NAMES = list(FAMILIES)
SMALL: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 40},
    "gpt2": {"n_embd": 24, "n_head": 4, "n_layer": 2},
    "gpt_neox": {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 40},
    "bloom": {"hidden_size": 24, "n_head": 4, "n_layer": 2},
    "opt": {"hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2, "word_embed_proj_dim": 24},
}
SMALL |= {name: {**SMALL["llama"], "num_key_value_heads": 2} for name in ("mistral", "qwen2", "qwen3", "qwen3_moe")}
SMALL |= dict.fromkeys(("mixtral", "olmoe", "gpt_oss"), SMALL["mistral"])
SMALL |= {"deepseek_v3": {**SMALL["llama"], "num_key_value_heads": 4, "first_k_dense_replace": 1}}


def config_class(name: str) -> type[transformers.PretrainedConfig]:
    return type(transformers.AutoConfig.for_model(name))


def fields_of(name: str) -> dict[str, Any]:
    """config.json as transformers writes it."""
    return transformers.AutoConfig.for_model(name, **SMALL[name]).to_dict()


@pytest.mark.parametrize("name", NAMES)
def test_every_field_that_transformers_writes_is_known(name: str) -> None:
    assert fields_of(name).keys() <= known_fields(FAMILIES[name])
    family, model = read_hf_config(fields_of(name))
    assert (family.model_type, model.width, model.layers) == (name, 24, 2)


@pytest.mark.parametrize("name", NAMES)
def test_defaults_are_those_of_transformers(name: str) -> None:
    theirs = config_class(name)
    rope = theirs().to_dict().get("rope_parameters") or {}
    for field, value in FAMILIES[name].defaults.items():
        if not field.startswith("rope_"):
            assert getattr(theirs, field, value) == value, field
    if rope:
        assert read_hf_config({"model_type": name})[1].rope_base == rope["rope_theta"]


@pytest.mark.parametrize("name", NAMES)
def test_a_config_json_without_fields_is_transformers_default(name: str) -> None:
    """A file may omit what is transformers' default, which is not always ours."""
    _, bare = read_hf_config({"model_type": name})
    assert bare == read_hf_config(config_class(name)().to_dict())[1]


@pytest.mark.parametrize("name", NAMES)
def test_other_names_of_fields_are_those_of_transformers(name: str) -> None:
    theirs = config_class(name).attribute_map
    assert {alias: field for alias, field in theirs.items() if field in FAMILIES[name].defaults}.items() <= (
        FAMILIES[name].aliases.items()
    )
    for alias, field in FAMILIES[name].aliases.items():
        config = fields_of(name)
        assert read_hf_config({alias: config.pop(field), **config}) == read_hf_config(fields_of(name))
        with pytest.raises(UsageError, match=f"its {alias} is 3 and its {field}"):
            read_hf_config(fields_of(name) | {alias: 3})


@pytest.mark.parametrize("name", NAMES)
def test_a_field_that_is_not_known_is_refused_by_name(name: str) -> None:
    config = fields_of(name)
    assert read_hf_config(config | {"logit_softcap": None})[0] is FAMILIES[name], "a null is no value"
    for value in (30.0, False, {"a": 1}):
        with pytest.raises(UsageError, match=r"its logit_softcap is .* a field that is not known for"):
            read_hf_config(config | {"logit_softcap": value})


INERT = {
    "is_llama_config": True, "transformers.js_config": {"dtype": "q4"}, "unsloth_fixed": True,
    "rope_interleaved": False, "auto_map": {}, "_model_name_or_path": "a name",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_fields_that_change_nothing_pass_with_a_note_and_the_same_fields_that_would_are_refused(name: str) -> None:
    said: list[str] = []
    assert read_hf_config(fields_of(name) | INERT, said.append) == read_hf_config(fields_of(name))
    assert [line.split()[1] for line in said] == [*INERT] and "which changes nothing" in said[0]
    for field, value in (("rope_interleaved", True), ("auto_map", {"AutoModel": "modeling.Own"})):
        with pytest.raises(UsageError, match=f"its {field} is .* a field that is not known"):
            read_hf_config(fields_of(name) | {field: value})


def test_layers_that_all_attend_to_everything_are_as_if_not_listed() -> None:
    full = fields_of("llama") | {"layer_types": ["full_attention"] * 2}
    assert read_hf_config(full) == read_hf_config(fields_of("llama"))
    with pytest.raises(UsageError, match="its layer_types is"):
        read_hf_config(full | {"layer_types": ["full_attention", "sliding_attention"]})


@pytest.mark.parametrize("name", NAMES)
def test_every_value_that_is_not_implemented_is_refused_by_name(name: str) -> None:
    for field, accepted in FAMILIES[name].accepted.items():
        assert field in FAMILIES[name].defaults
        with pytest.raises(UsageError, match=f"its {field} is 'no such value'; our model implements {accepted[0]!r}"):
            read_hf_config(fields_of(name) | {field: "no such value"})


@pytest.mark.parametrize("name", NAMES)
def test_what_is_exported_is_what_transformers_reads(name: str) -> None:
    family, model = read_hf_config(fields_of(name))
    theirs = transformers.AutoConfig.for_model(**write_hf_config(family, model, 7, torch.float32)).to_dict()
    assert read_hf_config(theirs) == (family, model)
    assert theirs["eos_token_id"] == 7
    same = {field: theirs[field] for field in FAMILIES[name].fields.values() if field in fields_of(name)}
    assert same == {field: fields_of(name)[field] for field in same}


def test_a_window_in_some_layers_only_is_refused() -> None:
    windows = {"use_sliding_window": True, "sliding_window": 4}
    for kinds in ({"max_window_layers": 1}, {"layer_types": ["sliding_attention", "full_attention"]}):
        for name in ("qwen2", "qwen3"):
            config = {**fields_of(name), "layer_types": None, **windows, **kinds}
            with pytest.raises(UsageError, match="only some of its layers have a sliding_window"):
                read_hf_config(config)
    config = {**fields_of("qwen3"), **windows, "layer_types": ["linear_attention"] * 2}
    with pytest.raises(UsageError, match="its layer_types has 'linear_attention'; our model implements full_att"):
        read_hf_config(config)
    _, model = read_hf_config({**fields_of("qwen2"), **windows, "layer_types": None, "max_window_layers": 2})
    assert model.window == 0


def test_a_window_that_is_null_is_none_and_an_absent_one_the_default() -> None:
    config = fields_of("mistral")
    assert read_hf_config(config)[1].window == 4096
    assert read_hf_config(config | {"sliding_window": None})[1].window == 0
    del config["sliding_window"]
    assert read_hf_config(config)[1].window == 4096


@pytest.mark.parametrize("name", ["mistral", "qwen2"])
def test_a_window_beyond_the_context_is_kept(name: str) -> None:
    """Transformers masks nothing by it, and neither do we: no token of a sequence is that far back."""
    said: list[str] = []
    config = fields_of(name) | {"max_position_embeddings": 100, "layer_types": None}
    config |= {"use_sliding_window": True, "max_window_layers": 0} if name == "qwen2" else {}
    for window in (99, 100, 101):
        _, model = read_hf_config(config | {"sliding_window": window}, said.append)
        assert (model.window, model.context) == (window, 100)
    assert said == []


def test_gpt2_with_the_exact_gelu_is_known() -> None:
    _, model = read_hf_config(fields_of("gpt2") | {"activation_function": "gelu"})
    assert model.mlp == "gelu-exact"


# what config.json of published models has beside today's fields, or in place of them
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2-124m": ("gpt2", {
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
        "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-5, "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
        "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
        "summary_type": "cls_index", "summary_use_proj": True, "vocab_size": 50257,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    }),
    "gpt-neox-20b": ("gpt_neox", {
        "attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0, "hidden_act": "gelu_fast", "hidden_size": 6144,
        "initializer_range": 0.02, "intermediate_size": 24576, "layer_norm_eps": 1e-5, "max_position_embeddings": 2048,
        "num_attention_heads": 64, "num_hidden_layers": 44, "rotary_emb_base": 10000, "rotary_pct": 0.25,
        "tie_word_embeddings": False, "torch_dtype": "float16", "use_cache": True, "vocab_size": 50432,
    }),
    "pythia-160m": ("gpt_neox", {
        "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu", "hidden_size": 768, "initializer_range": 0.02,
        "intermediate_size": 3072, "layer_norm_eps": 1e-5, "max_position_embeddings": 2048, "num_attention_heads": 12,
        "num_hidden_layers": 12, "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False,
        "use_cache": True, "use_parallel_residual": True, "vocab_size": 50304,
    }),
    "bloom-560m": ("bloom", {
        "apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0, "attention_softmax_in_fp32": True,
        "bias_dropout_fusion": True, "hidden_dropout": 0.0, "initializer_range": 0.02, "layer_norm_epsilon": 1e-5,
        "masked_softmax_fusion": True, "n_embed": 1024, "n_inner": None, "n_layer": 24, "num_attention_heads": 16,
        "offset_alibi": 100, "pad_token_id": 3, "pretraining_tp": 1, "seq_length": 2048, "skip_bias_add": True,
        "skip_bias_add_qkv": False, "unk_token_id": 0, "use_cache": True, "vocab_size": 250880,
    }),
    "opt-125m": ("opt", {
        "_remove_final_layer_norm": False, "activation_dropout": 0.0, "activation_function": "relu",
        "attention_dropout": 0.0, "bos_token_id": 2, "do_layer_norm_before": True, "dropout": 0.1, "ffn_dim": 3072,
        "hidden_size": 768, "init_std": 0.02, "layerdrop": 0.0, "max_position_embeddings": 2048,
        "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 1, "prefix": "</s>", "use_cache": True,
        "vocab_size": 50272, "word_embed_proj_dim": 768,
    }),
}  # fmt: skip


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_published_config_json_is_the_preset(preset: str) -> None:
    model_type, config = PUBLISHED[preset]
    family, model = read_hf_config({"model_type": model_type, **config})
    assert replace(model, preset=preset) == ModelConfig(preset=preset).resolve(model.vocab_size, model.context)
    assert find_family(model) is family


def test_a_bloom_without_some_of_its_biases_is_refused() -> None:
    """As transformers computes it: slices of the matrices' columns, and no bias."""
    torch.manual_seed(0)
    config = fields_of("bloom") | {"vocab_size": 50, "pretraining_tp": 2}
    theirs = transformers.BloomForCausalLM(transformers.BloomConfig(**config)).eval()
    for name, weights in theirs.named_parameters():
        torch.nn.init.normal_(weights) if name.endswith("bias") else None
    exact = transformers.BloomForCausalLM(transformers.BloomConfig(**config | {"slow_but_exact": True})).eval()
    exact.load_state_dict(theirs.state_dict())
    ids = torch.arange(12)[None]
    assert (exact(ids).logits - theirs(ids).logits).abs().max() > 0.1
    said = r"its slow_but_exact is True and its pretraining_tp 2: .* set slow_but_exact to false"
    with pytest.raises(UsageError, match=said):
        read_hf_config(config | {"slow_but_exact": True})
    wanted = read_hf_config(fields_of("bloom") | {"vocab_size": 50})
    for same in ({"slow_but_exact": False}, {"slow_but_exact": True, "pretraining_tp": 1}, {"slow_but_exact": None}):
        assert read_hf_config(config | same) == wanted


def test_opt_with_projections_of_its_embedding_is_refused() -> None:
    config = fields_of("opt")
    with pytest.raises(UsageError, match="its word_embed_proj_dim is 512 and its hidden_size 24"):
        read_hf_config(config | {"word_embed_proj_dim": 512})
    with pytest.raises(UsageError, match="its do_layer_norm_before is False; our model implements True only"):
        read_hf_config(config | {"do_layer_norm_before": False, "word_embed_proj_dim": 512})


def test_code_that_a_published_deepseek_names_passes_with_a_note() -> None:
    """DeepSeek-V3 and Moonlight name code of their own, which transformers has by now; of others it may differ."""
    said: list[str] = []
    code = {"auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}}
    assert read_hf_config(fields_of("deepseek_v3") | code, said.append) == read_hf_config(fields_of("deepseek_v3"))
    assert [line.partition(" is ")[0] for line in said] == ["its auto_map"]
    with pytest.raises(UsageError, match="its auto_map is "):
        read_hf_config(fields_of("llama") | code)
