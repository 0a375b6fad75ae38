"""Products on a CPU: what they equal, and how often which are made."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from training.kernels.cpu.kernels import ONEDNN
from training.kernels.dispatch import fused_linears, linear
from training.memory.recompute import checkpoint_activations
from training.model.decoder import Decoder
from training.model.layers import Linear
from training.model.model_config import ModelConfig

pytestmark = pytest.mark.skipif(ONEDNN is None, reason="torch was built without oneDNN")


class Calls(TorchDispatchMode):
    """How often each operation is called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(operation)
        return operation(*args, **(kwargs or {}))

    @property
    def products(self) -> tuple[int, int]:
        """oneDNN's and MKL's."""
        return self.seen.count(ONEDNN), self.seen.count(torch.ops.aten.mm.default)


def gradients(outputs: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    seeds = [torch.randn(y.shape, generator=torch.Generator().manual_seed(7)) for y in outputs]
    return list(torch.autograd.grad(outputs, inputs, seeds))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outputs", [(5,), (64,), (32, 8, 40)])
@pytest.mark.parametrize("shape", [(3, 37, 24), (11, 24), (1, 1, 24)])
def test_outputs_and_gradients_equal_torch(shape: tuple[int, ...], outputs: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(1)
    x = torch.randn(shape, requires_grad=True)
    layers = [Linear(24, size, bias=bias) for size in outputs]
    inputs = [x, *(p for layer in layers for p in layer.parameters())]
    ours, theirs = fused_linears(x, layers), [F.linear(x, layer.weight, layer.bias) for layer in layers]
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(gradients(ours, inputs), gradients(theirs, inputs))


def test_a_strided_view() -> None:
    x = torch.randn(4, 24, 6).transpose(1, 2).requires_grad_()
    weight = torch.randn(24, 10).T.requires_grad_()
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight))
    torch.testing.assert_close(
        gradients([linear(x, weight)], [x, weight]), gradients([F.linear(x, weight)], [x, weight])
    )


def test_only_requested_gradients_are_computed() -> None:
    """Zero-bubble schedules ask for the gradients of inputs and of weights apart."""
    layer, x = Linear(16, 8, bias=False), torch.randn(4, 16, requires_grad=True)
    hidden = x * 2  # not a leaf, as within a model
    y = layer(hidden).sum()
    found = []
    for asked in ([hidden], [layer.weight], [hidden, layer.weight]):
        with Calls() as calls:
            torch.autograd.grad(y, asked, retain_graph=True)
        found.append(calls.products)
    assert found == [(1, 0), (0, 1), (1, 1)]


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize(
    ("preset", "sequences", "each"), [("gpt2", 1, 6), ("gpt2", 16, 4), ("llama", 1, 7), ("llama", 16, 4)]
)
def test_a_decoder_uses_onednn(preset: Any, sequences: int, each: int, recompute: Any) -> None:
    """So many products a block, twice by oneDNN and once by MKL: q, k and v are one, and gate and up, where there
    are as many tokens as they have outputs."""
    config = ModelConfig(preset=preset, layers=2, width=16, heads=2).resolve(vocab_size=11, seq_len=8)
    model, ids = Decoder(config), torch.randint(0, 11, (sequences, 8))
    checkpoint_activations(model, recompute)
    with Calls() as calls:
        model(ids, ids, torch.arange(sequences)).sum().backward()
    assert calls.products == (2 * 2 * each, 2 * each + 1)  # and the head's

    with torch.no_grad(), Calls() as calls:
        model(ids)
    assert calls.products[0] == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_use_torch(dtype: torch.dtype) -> None:
    layer, x = Linear(16, 8).to(dtype), torch.randn(4, 16, dtype=dtype)
    with Calls() as calls:
        y = layer(x)
    assert calls.products[0] == 0
    assert torch.equal(y, F.linear(x, layer.weight, layer.bias))
