"""Norm, rotation and activations: what they and their gradients are, as loops on one core and as torch's operators."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import profile

from training.kernels.dispatch import embedding, gelu, layer_norm, rms_norm, swiglu
from training.kernels.rotary import apply_rotary, rotary_frequencies, rotary_table
from training.model.decoder import Decoder
from training.model.layers import RMSNorm
from training.model.model_config import ModelConfig

Function = Callable[..., Tensor]


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def frequencies(head_dim: int, base: float, dtype: torch.dtype) -> Tensor:
    return rotary_frequencies(head_dim, base, torch.device("cpu"), dtype)


def turned(x: Tensor) -> Tensor:
    """By the definition, with complex numbers."""
    half = x.shape[-1] // 2
    cos, sin = (t[:, half:] for t in rotary_table(torch.arange(x.shape[-2]), frequencies(x.shape[-1], 100.0, x.dtype)))
    y = torch.complex(x[..., :half], x[..., half:]) * torch.complex(cos, sin)
    return torch.cat((y.real, y.imag), -1)


def rotated(x: Tensor) -> Tensor:
    return apply_rotary(x, rotary_table(torch.arange(x.shape[-2]), frequencies(x.shape[-1], 100.0, x.dtype)))


def projected(x: Tensor) -> Tensor:
    """(B, T, heads * E) as attention sees it."""
    return x.unflatten(-1, (-1, 4)).transpose(1, 2)


FUNCTIONS: dict[str, tuple[Function, Function]] = {
    "gelu": (lambda x, _: gelu(x, "none"), lambda x, _: F.gelu(x)),
    "gelu, tanh": (lambda x, _: gelu(x, "tanh"), lambda x, _: F.gelu(x, approximate="tanh")),
    "swiglu": (swiglu, lambda x, y: F.silu(x) * y),
    "rms norm": (lambda x, y: rms_norm(x, y[0, 0], 1e-5), lambda x, y: F.rms_norm(x, (x.shape[-1],), y[0, 0], 1e-5)),
    "rotation": (lambda x, _: rotated(projected(x)), lambda x, _: turned(projected(x))),
}


def results(function: Function, inputs: list[Tensor], dtype: torch.dtype, seed: Tensor | None = None) -> list[Tensor]:
    """What it returns, and the gradients of what it depends on, given one for its output."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    y = function(*leaves)
    seed = torch.cos(torch.arange(y.numel()).view(y.shape)) if seed is None else seed
    grads = torch.autograd.grad(y, leaves, seed.to(dtype).expand(y.shape), allow_unused=True)
    return [y.detach(), *(g for g in grads if g is not None)]


def compare(name: str, inputs: list[Tensor], **options: Tensor) -> None:
    ours, theirs = FUNCTIONS[name]
    with threads(1):
        computed = results(ours, inputs, torch.float32, **options)
    exact = results(theirs, inputs, torch.float64, **options)
    for y, wanted in zip(computed, exact, strict=True):
        torch.testing.assert_close(y.double(), wanted, rtol=2e-6, atol=2e-6 * max(1.0, wanted.abs().max().item()))


@pytest.mark.parametrize("name", FUNCTIONS)
@settings(deadline=None, max_examples=40)
@given(
    rows=st.tuples(st.integers(1, 5), st.integers(1, 9)),
    width=st.integers(1, 12).map(lambda n: 4 * n),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
    seed=st.integers(0, 9),
)
def test_numba_loops_have_float32_accuracy(
    name: str, rows: tuple[int, int], width: int, scale: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    compare(name, [torch.randn(*rows, width, generator=generator) * s for s in (scale, 1.0)])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_numba_loops_accept_strided_rows_and_elements(name: str) -> None:
    wide = torch.randn(8, 5, 24, generator=torch.Generator().manual_seed(1))
    compare(name, list(wide.split(12, -1)))
    compare(name, list(wide.transpose(0, 2).split(12, 0)))
    compare(name, list(wide.split(12, -1)), seed=torch.ones(()))  # expanded: all of it one number


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nan_and_inf_propagate(name: str) -> None:
    for bad in (torch.nan, torch.inf):
        x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
        x[1, 2, 5] = bad
        with threads(1):
            y, dx = results(FUNCTIONS[name][0], [x, torch.ones(2, 3, 8)], torch.float32)[:2]
        assert not (y.isfinite().all() and dx.isfinite().all())
        if name != "rotation":
            assert y[0].isfinite().all()


def test_parameters_storage_stays_resizable() -> None:
    x, weight = torch.randn(2, 3, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    with threads(1):
        rms_norm(x, weight, 1e-5).sum().backward()
    assert weight.untyped_storage().resizable()


@pytest.mark.parametrize("preset", ["llama", "gpt2"])
def test_one_thread_uses_numba_and_several_use_torch(preset: str) -> None:
    torch.manual_seed(0)
    model = Decoder(ModelConfig(layers=2, width=32, heads=4, preset=preset).resolve(50, 12))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    ids = torch.randint(50, (2, 12))
    seen: list[set[str]] = []
    losses: list[Tensor] = []
    models = [model, copy.deepcopy(model)]
    for count, one in zip((1, 2), models, strict=True):
        with threads(count), profile() as profiled:
            losses.append(one(ids, targets=ids))
            losses[-1].backward()
        seen.append({event.key for event in profiled.key_averages()})
    plain = (
        {"aten::silu", "aten::roll", "aten::linalg_vector_norm"}
        if preset == "llama"
        else {"aten::gelu", "aten::gelu_backward"}
    )
    assert not seen[0] & plain and seen[1] >= plain
    torch.testing.assert_close(losses[0], losses[1])
    for ours, theirs in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def test_rotary_scores_depend_on_the_relative_position_only() -> None:
    q, k = (torch.randn(8, generator=torch.Generator().manual_seed(i)).double() for i in (1, 2))

    def score(at: int, to: int) -> Tensor:
        turned = [
            apply_rotary(x[None, None, None], rotary_table(torch.tensor([p]), frequencies(8, 10_000.0, x.dtype)))
            for x, p in ((q, at), (k, to))
        ]
        return (turned[0] * turned[1]).sum()

    assert torch.allclose(score(9, 4), score(105, 100), atol=1e-12)
    assert not torch.allclose(score(9, 4), score(9, 3), atol=1e-2)


def test_rms_norm_and_its_gradients_equal_torch() -> None:
    torch.manual_seed(0)
    norm = RMSNorm(6, 1e-5).double()
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (6,), norm.weight, 1e-5))
    assert torch.autograd.gradcheck(norm, (x,))
    given = torch.randn(2, 3, 6, dtype=torch.float64)
    theirs = torch.nn.functional.rms_norm(x, (6,), norm.weight, 1e-5)
    for ours, wanted in zip(*(torch.autograd.grad(y, (x, norm.weight), given) for y in (norm(x), theirs)), strict=True):
        torch.testing.assert_close(ours, wanted)


LOW = {
    "rms_norm": (lambda x, w: rms_norm(x, w, 1e-5), lambda x, w: torch.nn.functional.rms_norm(x, w.shape, w, 1e-5)),
    "layer_norm": (
        lambda x, w: layer_norm(x, w, None, 1e-5),
        lambda x, w: torch.nn.functional.layer_norm(x, w.shape, w, None, 1e-5),
    ),
    "rotary": (
        lambda x, _: apply_rotary(
            x[:, None], rotary_table(torch.arange(8000, 8000 + x.shape[1]), frequencies(64, 1e4, torch.float32))
        ),
        lambda x, _: apply_rotary(
            x[:, None], rotary_table(torch.arange(8000, 8000 + x.shape[1]), frequencies(64, 1e4, torch.float32))
        ),
    ),
}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LOW)
def test_16_bit_statistics_and_angles_are_float32(name: str, dtype: torch.dtype, count: int) -> None:
    """The result, and the gradients, are the exact ones of the same inputs, rounded once."""
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in ((2, 33, 64), (64,)))
    ours, theirs = LOW[name]
    found, exact = [], []
    for function, into, out in ((ours, dtype, found), (theirs, torch.float64, exact)):
        leaves = [t.to(into).requires_grad_() for t in (x, weight)]
        with threads(count):
            y = function(*leaves)
            seed = torch.cos(torch.arange(y.numel()).view(y.shape)).to(dtype).to(into)
            out += [y, *torch.autograd.grad(y, leaves, seed, allow_unused=True)]
    unit = torch.finfo(dtype).eps / 2
    for y, wanted in zip(found, exact, strict=True):
        if y is not None and wanted is not None:
            assert y.dtype == dtype
            torch.testing.assert_close(y.double(), wanted, rtol=1.02 * unit, atol=2e-6 * wanted.abs().max().item())


def test_the_gradient_of_a_frequent_id_is_summed_in_float32() -> None:
    weight = torch.zeros(5, 2, dtype=torch.bfloat16, requires_grad=True)
    embedding(torch.full((4, 1000), 3), weight).sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16
    assert weight.grad.tolist() == [[0, 0]] * 3 + [[4000, 4000], [0, 0]]
