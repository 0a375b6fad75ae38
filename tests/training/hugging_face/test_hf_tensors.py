"""Layouts of fused tensors: each of our parameters is in its place, and can be written there."""

import pytest
import torch

from training.hugging_face.family import TensorLayout
from training.hugging_face.hf_tensors import HFTensor, parameters_of

HEADS, WIDTH = 3, 6


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
