"""Layouts of fused tensors: each of our parameters is in its place, and can be written there."""

import pytest
import torch

from gristmill.errors import UsageError
from training.hugging_face.family import TensorLayout
from training.hugging_face.hf_config import find_family
from training.hugging_face.hf_tensors import HFTensor, hf_tensors, parameters_of
from training.model.model_config import ModelConfig

HEADS, WIDTH = 3, 6


def test_biases_of_the_choice_have_no_place_in_a_mixtral() -> None:
    sizes = {"layers": 1, "width": 8, "heads": 2, "ffn_width": 8, "experts": 2}
    model = ModelConfig(**sizes, balance="bias").resolve(9, 4)
    with pytest.raises(UsageError, match=r"MixtralForCausalLM has no place for blocks.0.mlp.router.choice_bias"):
        hf_tensors(find_family(model), model)


@pytest.mark.parametrize("kind", ["weight", "bias"])
@pytest.mark.parametrize("layout", ["conv1d", "per head"])
def test_fused_tensors_hold_queries_keys_and_values(layout: TensorLayout, kind: str) -> None:
    shape = (WIDTH, WIDTH) if kind == "weight" else (WIDTH,)
    q, k, v = (torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i in range(3))
    heads = (HEADS, 1, WIDTH // HEADS, *shape[1:])
    expected = {
        "conv1d": torch.cat([q.T, k.T, v.T], -1) if kind == "weight" else torch.cat([q, k, v]),
        "per head": torch.cat([part.reshape(heads) for part in (q, k, v)], 1).reshape(3 * WIDTH, *shape[1:]),
    }[layout]
    tensor = HFTensor("qkv", ("q", "k", "v"), shape, layout, HEADS)
    assert tensor.shape == expected.shape
    found = parameters_of([(tensor, expected)])
    assert all(torch.equal(found[name], part) for name, part in zip("qkv", (q, k, v), strict=True))
    written = torch.zeros(tensor.shape)
    for name, part in zip("qkv", (q, k, v), strict=True):
        for view, spec in tensor.pieces(written)[name]:
            view.copy_(part[spec.slices])
    assert torch.equal(written, expected)
