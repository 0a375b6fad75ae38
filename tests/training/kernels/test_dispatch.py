"""Dispatch: a device without kernels of its own computes with torch's operators, and imports none of the CPU's."""

import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import training.kernels.cpu.kernels
from training.kernels import portable
from training.kernels.dispatch import kernels_for
from training.memory.recompute import checkpoint_activations
from training.model.decoder import meta_decoder
from training.model.model_config import ModelConfig


@pytest.mark.parametrize("preset", ["llama", "gpt2"])
def test_a_device_without_kernels_of_its_own_imports_no_others(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "training.kernels.cpu.kernels", None)  # an import of it fails
    monkeypatch.delattr(training.kernels.cpu, "kernels")
    with pytest.raises(ImportError):
        kernels_for(torch.device("cpu"))
    model = meta_decoder(ModelConfig(preset=preset, layers=2, width=16, heads=2, dropout=0.1).resolve(11, 8))  # type: ignore[arg-type]
    checkpoint_activations(model, "selective")
    ids, sample_ids = (torch.zeros(shape, dtype=torch.int64, device="meta") for shape in ((3, 8), (3,)))
    model(ids, ids, sample_ids).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert model.eval()(ids).shape == (3, 8, 11)
    assert kernels_for(torch.device("cuda")) is portable


def test_a_cpu_has_its_own_kernels() -> None:
    kernels = training.kernels.cpu.kernels
    assert kernels_for(torch.device("cpu")) is kernels
    assert kernels.LOGITS_BYTES < portable.LOGITS_BYTES and kernels.PRODUCTS >= portable.PRODUCTS


class _Seen(TorchDispatchMode):
    """The operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: set[object] = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.operators.add(operation)
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_are_named_as_the_kernels_call_them(dtype: torch.dtype) -> None:
    """Selective recomputation saves these: one that is not named would be computed again."""
    kernels = kernels_for(torch.device("cpu"))
    x, weight = torch.randn(4, 8, dtype=dtype, requires_grad=True), torch.randn(3, 8, dtype=dtype, requires_grad=True)
    with _Seen() as seen:
        kernels.linear(x, weight, None)
    assert seen.operators & kernels.PRODUCTS
