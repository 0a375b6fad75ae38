"""Scaled rotary frequencies are those of transformers, and of short sequences as they should be."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gristmill.errors import UsageError
from training.kernels.rotary import rotary_frequencies
from training.model.model_config import ModelConfig
from training.model.positions import Rotary, scaled_frequencies

SIZES = ModelConfig(layers=1, width=256, heads=4, ffn_width=16)
LLAMA3 = replace(SIZES, rope_scaling="llama3", rope_factor=8.0, rope_original_context=256)
YARN = replace(SIZES, rope_scaling="yarn", rope_factor=4.0, rope_original_context=2048)


@pytest.mark.parametrize(
    ("config", "theirs"),
    [
        (replace(SIZES, rope_scaling="linear", rope_factor=4.0), {"rope_type": "linear", "factor": 4.0}),
        (
            LLAMA3,
            {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
            },
        ),
        (
            replace(LLAMA3, rope_low=2.0, rope_high=3.0, rope_base=500.0),
            {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 3.0,
                "original_max_position_embeddings": 256, "rope_theta": 500.0,
            },
        ),
        (YARN, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}),
        (
            replace(YARN, rope_fraction=0.5),
            {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048,
                "partial_rotary_factor": 0.5,
            },
        ),
        (
            replace(YARN, rope_low=2.0, rope_high=9.0, rope_attention_factor=1.5),
            {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048, "beta_fast": 9.0,
                "beta_slow": 2.0, "attention_factor": 1.5,
            },
        ),
    ],
    ids=str,
)  # fmt: skip
def test_scaled_frequencies_are_those_of_transformers(config: ModelConfig, theirs: dict[str, Any]) -> None:
    model = config.resolve(50, 8)
    hf = transformers.LlamaConfig(hidden_size=256, num_attention_heads=4, max_position_embeddings=8192)
    hf.rope_parameters = {"rope_theta": 10_000.0, **theirs}
    wanted, factor = ROPE_INIT_FUNCTIONS[theirs["rope_type"]](hf, torch.device("cpu"))
    plain = rotary_frequencies(model.rotary_dim, model.rope_base, torch.device("cpu"), torch.float64)
    found = scaled_frequencies(model, plain)
    torch.testing.assert_close(found, wanted.double(), rtol=1e-6, atol=0)
    assert model.rope_attention_factor == pytest.approx(factor, rel=1e-12)
    kept, divided = found == plain, torch.isclose(found, plain / model.rope_factor, rtol=1e-12)
    if model.rope_scaling != "linear":
        assert kept[0] and divided[-1] and not (kept | divided).all(), "the three ranges are not all tried"
    x = torch.zeros(1, 3, 256, dtype=torch.float64)
    cos, sin = Rotary(model)(x)  # type: ignore[misc]
    torch.testing.assert_close(cos[2, : len(found)], (2 * found).cos() * factor)
    torch.testing.assert_close(sin[2, len(found) :], (2 * found).sin() * factor)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (replace(SIZES, rope_scaling="linear"), r"rope_factor is 1.0 and model.rope_scaling linear; expected a factor"),
        (replace(SIZES, rope_factor=2.0), r"rope_factor is 2.0 and model.rope_scaling none; .*try --model.rope_sc"),
        (replace(LLAMA3, rope_original_context=0), r"llama3 needs the length of pre-training's sequences; try"),
        (replace(LLAMA3, rope_low=5.0), r"rope_low is 5.0 and model.rope_high 4.0; expected low below high"),
        (replace(LLAMA3, rope_attention_factor=2.0), r"rope_attention_factor 2.0 has no effect with .* llama3"),
        (replace(SIZES, rope_low=2.0), r"rope_low 2.0 has no effect with model.rope_scaling none; leave it out"),
        (replace(YARN, preset="gpt2"), r"rope_scaling yarn needs rotary positions, and model.positions is learned"),
        (replace(YARN, rope_base=1.0), r"rope_base is 1.0; expected more than 1"),
    ],
    ids=str,
)
def test_scalings_without_what_they_need_are_refused(config: ModelConfig, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        config.resolve(50, 8)
