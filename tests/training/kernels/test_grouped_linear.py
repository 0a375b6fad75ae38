"""Products of rows with the matrices of their experts: torch's one kernel, and one product after the other."""

import pytest
import torch
from torch import Tensor

from training.kernels.dispatch import grouped_linear
from training.kernels.portable import grouped_kernel

COUNTS = torch.tensor([5, 0, 3, 24])  # the second matrix has no rows


def operands(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(32, 16, generator=generator), torch.randn(4, 24, 16, generator=generator)
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()


def results(x: Tensor, weight: Tensor, y: Tensor) -> list[Tensor]:
    y.float().square().sum().backward()
    assert x.grad is not None and weight.grad is not None
    return [y.detach(), x.grad, weight.grad]


def by_rows(dtype: torch.dtype) -> list[Tensor]:
    x, weight = operands(dtype)
    experts = torch.repeat_interleave(torch.arange(4), COUNTS).tolist()
    y = torch.stack([row @ weight[expert].T for row, expert in zip(x, experts, strict=True)])
    return results(x, weight, y)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rows_are_multiplied_by_the_matrix_of_their_group(dtype: torch.dtype) -> None:
    x, weight = operands(dtype)
    for found, wanted in zip(results(x, weight, grouped_linear(x, weight, COUNTS)), by_rows(dtype), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_torch_s_kernel_computes_the_same() -> None:
    """On a CPU torch has it in float32, in bf16 on GPUs, where it is used."""
    x, weight = operands(torch.float32)
    for found, wanted in zip(
        results(x, weight, grouped_kernel(x, weight, COUNTS)), by_rows(torch.float32), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_a_gpu_uses_torch_s_kernel_in_bf16() -> None:
    x, weight = (t.detach().cuda().requires_grad_() for t in operands(torch.bfloat16))
    for found, wanted in zip(
        results(x, weight, grouped_linear(x, weight, COUNTS.cuda())), by_rows(torch.float32), strict=True
    ):
        assert (found.float().cpu() - wanted).norm() < 2e-2 * wanted.norm()
