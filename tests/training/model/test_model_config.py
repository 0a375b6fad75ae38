"""Options of the decoder that depend on one another, and their records."""

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from gristmill.errors import UsageError
from training.model.decoder import Decoder, meta_decoder
from training.model.model_config import ModelConfig

SIZES = ModelConfig(layers=1, width=20, heads=3, kv_heads=1, head_dim=8, ffn_width=16)


def names(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in meta_decoder(config.resolve(50, 8)).named_parameters()}


def test_the_width_of_heads_is_independent_of_the_model_s() -> None:
    shapes = names(SIZES)
    assert shapes["blocks.0.attention.q.weight"] == (24, 20) and shapes["blocks.0.attention.v.weight"] == (8, 20)
    assert shapes["blocks.0.attention.o.weight"] == (20, 24)
    with pytest.raises(UsageError, match=r"width 20 is not divisible by model.heads 3; try .*24, or give .*head_dim"):
        replace(SIZES, head_dim=0).resolve(50, 8)
    with pytest.raises(UsageError, match=r"of a head's 7 are 7 rotated; try another --model.heads, --model.head_d"):
        replace(SIZES, head_dim=7).resolve(50, 8)


def test_biases_are_chosen_by_part() -> None:
    found = [name for name in names(replace(SIZES, qkv_bias=True)) if "bias" in name]
    assert found == [f"blocks.0.attention.{part}.bias" for part in "qkv"]
    found = [name for name in names(replace(SIZES, preset="gpt2", mlp_bias=False)) if "mlp." in name and "bias" in name]
    assert found == []
    found = [name for name in names(replace(SIZES, bias=True, out_bias=False)) if "o.bias" in name]
    assert found == []


@pytest.mark.parametrize(
    "config",
    [
        ModelConfig(), ModelConfig(preset="gpt2"), SIZES, replace(SIZES, qkv_bias=True),
        replace(SIZES, preset="gpt2", out_bias=False), replace(SIZES, bias=True),
        replace(SIZES, bias=True, mlp_bias=False), replace(SIZES, window=3, qk_norm=True),
    ],
    ids=repr,
)  # fmt: skip
def test_a_record_gives_the_configuration_again(config: ModelConfig) -> None:
    resolved = config.resolve(50, 8)
    assert ModelConfig.from_record(resolved.record()) == resolved == ModelConfig.from_record(asdict(resolved))


def test_a_record_has_what_another_option_changes_the_default_of() -> None:
    scaled = ModelConfig(rope_scaling="yarn", rope_factor=4.0, rope_original_context=8, rope_attention_factor=1.0)
    model = scaled.resolve(50, 12)
    assert ModelConfig.from_record(model.record()) == model


def test_a_record_has_no_fields_that_the_first_records_did_not_have_unless_they_are_used() -> None:
    first = {
        "preset": "gpt2", "layers": 4, "width": 256, "heads": 4, "kv_heads": 4, "ffn_width": 1024, "vocab_size": 50,
        "context": 8, "norm": "layer", "positions": "learned", "mlp": "gelu", "bias": True, "tied": True,
        "dropout": 0.0, "rope_base": 10000.0, "norm_eps": 1e-05, "init_std": 0.02,
    }  # fmt: skip
    assert ModelConfig(preset="gpt2").resolve(50, 8).record() == first
    assert replace(SIZES, qkv_bias=True).resolve(50, 8).record().keys() - first.keys() == {"head_dim", "qkv_bias"}
    with pytest.raises(UsageError, match=r"saved by a version with other model options .*colour"):
        ModelConfig.from_record({**first, "colour": 1})


@pytest.mark.parametrize(
    ("preset", "given", "want"),
    [
        ("mistral-7b", {}, {"window": 4096}),
        ("mistral-7b", {"window": 0}, {"window": 0}),
        ("mistral-7b", {"window": 0, "positions": "alibi"}, {"window": 0}),
        ("opt", {}, {"position_offset": 2}),
        ("opt", {"position_offset": 0}, {"position_offset": 0}),
        ("opt", {"position_offset": 0, "positions": "rope"}, {"position_offset": 0}),
        ("llama-3.1-8b", {}, {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_original_context": 8192}),
        ("llama-3.1-8b", {"rope_scaling": "none"}, {"rope_factor": 1.0, "rope_original_context": 0, "rope_low": 0.0}),
        ("llama-3.1-8b", {"rope_scaling": "linear"}, {"rope_factor": 8.0, "rope_original_context": 0}),
        ("llama-3.1-8b", {"rope_scaling": "yarn"}, {"rope_factor": 8.0, "rope_original_context": 8192}),
    ],
    ids=str,
)  # fmt: skip
def test_an_option_takes_the_place_of_the_preset_s(preset: str, given: dict[str, Any], want: dict[str, Any]) -> None:
    found = ModelConfig(preset=preset, **given).resolve(9, 8)
    assert want.items() <= asdict(found).items()
    assert ModelConfig.from_record(found.record()) == found


def test_a_negative_window_is_refused_and_one_longer_than_the_context_is_not() -> None:
    with pytest.raises(UsageError, match=r"model.window is -1; expected a window of 1 token .*; try --model.window 8"):
        replace(SIZES, window=-1).resolve(50, 8)
    assert replace(SIZES, window=9).resolve(50, 8).window == 9


def test_a_window_with_a_bias_is_refused() -> None:
    with pytest.raises(UsageError, match=r"model.window 3 and model.positions alibi: a window has no bias; try"):
        replace(SIZES, window=3, positions="alibi").resolve(50, 8)


def test_rotary_positions_that_rotate_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match=r"of a head's 8 are 0 rotated"):
        replace(SIZES, rope_fraction=0.1).resolve(50, 8)


@pytest.mark.parametrize("option", [{"rope_fraction": 0.5}, {"rope_scaling": "linear", "rope_factor": 2.0}], ids=str)
def test_rotary_options_without_rotary_positions_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"needs rotary positions, and model.positions is learned; try --model.pos"):
        ModelConfig(preset="gpt2", **option).resolve(9, 8)


def test_a_window_longer_than_the_sequence_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("training.model.attention_mask.windowed_attention")
    ids = torch.arange(8)[None]
    decoders = [Decoder(replace(SIZES, window=window).resolve(50, 8)) for window in (0, 8)]
    decoders[1].load_state_dict(decoders[0].state_dict())
    assert torch.equal(decoders[0](ids), decoders[1](ids))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"full_attention_every": 2},
            r"model.full_attention_every 2 has no effect without a window; try --model.window",
        ),
        ({"sinks": True, "preset": "bloom"}, r"model.sinks with model.positions alibi .* try --model.sinks false"),
        ({"sinks": True, "kv_lora_rank": 8}, r"model.sinks with .* and model.kv_lora_rank 8: neither ALiBi nor latent"),
        ({"rope_truncate": False}, r"model.rope_truncate False has no effect with model.rope_scaling none"),
        ({"router_bias": True}, r"model.router_bias True has no effect without experts"),
        (
            {"experts": 4, "shared_experts": 1, "mlp_bias": True},
            r"model.shared_experts 1 have no biases, and model.mlp_",
        ),
        (
            {"experts": 4, "mlp": "gelu"},
            r"model.experts 4 needs gated MLPs, and model.mlp is gelu; try --model.mlp swig",
        ),
    ],
)
def test_parts_of_gpt_oss_that_do_not_fit_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ModelConfig(**{"layers": 2, "width": 32, "heads": 4} | options).resolve(50, 12)


def test_every_second_layer_sees_all_tokens() -> None:
    model = ModelConfig(layers=5, window=3, full_attention_every=2).resolve(50, 12)
    assert [model.layer_window(layer) for layer in range(5)] == [3, 0, 3, 0, 3]


def test_an_offset_of_positions_that_are_not_learned_is_refused() -> None:
    with pytest.raises(UsageError, match=r"model.position_offset 2 needs learned positions"):
        ModelConfig(preset="opt", positions="rope").resolve(9, 8)


@pytest.mark.parametrize("options", [{"layers": 1}, {"residual": "parallel"}, {"residual": "deepnorm"}], ids=str)
def test_a_query_layer_that_the_model_cannot_have_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"model.query_layer needs 2 layers or more, and pre-norm"):
        ModelConfig(preset="codegeex", **options).resolve(9, 8)
