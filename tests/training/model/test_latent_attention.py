"""Multi-head latent attention: what is counted of it, and options that do not fit together."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from gristmill.errors import UsageError
from tests.training.hf_models import build
from training.experimental.parallel_config import ParallelConfig
from training.model.decoder import flops_per_token
from training.model.model_config import ModelConfig

LATENT = ModelConfig(
    layers=2, width=24, heads=4, ffn_width=40, q_lora_rank=10, kv_lora_rank=14, qk_nope_head_dim=5, qk_rope_head_dim=4,
    v_head_dim=3,
)  # fmt: skip


def test_flops_per_token_equal_a_hand_count() -> None:
    attention = 24 * 10 + 10 + 10 * 4 * 9 + 24 * (14 + 4) + 14 + 14 * 4 * (5 + 3) + 4 * 3 * 24
    matrices = 2 * (attention + 3 * 24 * 40 + 2 * 24) + 24 + 50 * 24
    scores_and_mixing = 2 * 4 * 12 * (9 + 3)
    assert flops_per_token(build(LATENT), 12) == 6 * (matrices + scores_and_mixing)
    model = LATENT.resolve(50, 12)
    assert model.attention_numel == attention - 10 - 14


def test_widths_of_heads_have_defaults() -> None:
    model = ModelConfig(layers=2, width=96, heads=4, kv_lora_rank=14).resolve(50, 12)
    assert (model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim, model.head_dim) == (24, 12, 24, 36)
    assert ModelConfig.from_record(model.record()) == model


def test_windows_and_documents_reach_it() -> None:
    """A token's result depends on what it sees, and on nothing else."""
    model = build(replace(LATENT, window=3)).double()
    ids = torch.arange(12)[None] % 50
    other = ids.clone()
    other[0, 0] = 40
    with torch.no_grad():
        assert torch.equal(model(ids)[0, 5:], model(other)[0, 5:])  # two layers reach four tokens back
        assert not torch.equal(model(ids)[0, 4], model(other)[0, 4])
        apart = model(ids, positions=torch.tensor([[0, 1, 2, 3, *range(8)]]))
        torch.testing.assert_close(apart[0, 4:], model(ids[:, 4:])[0])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kv_lora_rank": 0, "q_lora_rank": 4}, "model.q_lora_rank 4 has no effect without latent attention; try"),
        ({"kv_heads": 2}, "which needs model.kv_heads 4 and not 2; try --model.kv_heads 4"),
        ({"head_dim": 8}, "which needs model.head_dim 9 and not 8; try --model.head_dim 9"),
        ({"qk_norm": True}, "which needs model.qk_norm false and not true"),
        ({"qkv_bias": True}, "which needs model.qkv_bias false and not true"),
        ({"positions": "learned"}, "which needs model.positions rope and not learned"),
        ({"residual": "deepnorm"}, "model.residual deepnorm: with latent attention, values would get"),
        ({"v_head_dim": 10}, "model.v_head_dim 10 is above the 9 of model.qk_nope_head_dim and qk_rope_head_dim"),
        ({"qk_rope_head_dim": 3}, "rotary positions need an even number of features per head"),
        ({"rope_mscale_all_dim": 1.0}, "model.rope_mscale_all_dim 1.0 has no effect with model.rope_scaling none"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_are_refused(given: dict[str, Any], said: str) -> None:
    options = replace(LATENT, q_lora_rank=0, qk_nope_head_dim=0, qk_rope_head_dim=0, v_head_dim=0)
    with pytest.raises(UsageError, match=said):
        replace(options if given.get("kv_lora_rank") == 0 else LATENT, **given).resolve(50, 12)


def test_grids_refuse_it_and_sinks() -> None:
    model = LATENT.resolve(50, 12)
    with pytest.raises(UsageError, match=r"latent attention is not divided on a grid; try --parallel.tensor 1d"):
        ParallelConfig(tp=4, tensor="2d").resolve(4, model, 12)
    sinks = ModelConfig(layers=2, width=24, heads=4, sinks=True).resolve(50, 12)
    with pytest.raises(UsageError, match=r"model.sinks and parallel.tensor 2d: they are not divided on a grid"):
        ParallelConfig(tp=4, tensor="2d").resolve(4, sinks, 12)
