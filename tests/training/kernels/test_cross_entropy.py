import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import training.kernels.cpu.kernels
from training.distributed.process_group import init_distributed
from training.kernels.cross_entropy import IGNORE_INDEX, ZLoss, chunk_tokens, linear_cross_entropy, token_losses
from training.sharding.shard_spec import ShardSpec

RunRanks = Callable[..., list[Any]]
VOCABULARY = 23


def example(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Features, an output matrix with logits far from 0, and targets, of which some are ignored."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 7, 8, generator=generator, dtype=torch.float64)
    weight = 3 * torch.randn(VOCABULARY, 8, generator=generator, dtype=torch.float64)
    targets = torch.randint(VOCABULARY, (3, 7), generator=generator)
    targets[0, 2:5] = targets[2] = IGNORE_INDEX
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def reference(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = (x.double() @ weight.double().T).flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=IGNORE_INDEX)


def gradients(loss: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.autograd.grad(loss.sum() * 0.25, (x, weight))


@pytest.mark.parametrize("chunk", [1, VOCABULARY * 4, 1 << 23])
def test_loss_and_gradients_equal_torch_for_any_chunk_size(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(training.kernels.cpu.kernels, "LOGITS_BYTES", 8 * chunk)
    x, weight, targets = example()
    loss = linear_cross_entropy(x, weight, targets)
    assert loss.shape == (1,)
    torch.testing.assert_close(loss[0], reference(x, weight, targets))
    for ours, theirs in zip(
        gradients(loss, x, weight), gradients(reference(x, weight, targets), x, weight), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("chunk", [1, VOCABULARY * 4, 1 << 23])
def test_each_token_has_its_loss_for_any_chunk_size(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(training.kernels.cpu.kernels, "LOGITS_BYTES", 8 * chunk)
    x, weight, targets = example()
    logits = (x @ weight.T).transpose(1, 2)
    wanted = F.cross_entropy(logits, targets, reduction="none", ignore_index=IGNORE_INDEX)
    torch.testing.assert_close(token_losses(x, weight, targets), wanted.detach())


def with_z_loss(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of cross-entropy and z-loss, and the z-loss alone, by torch."""
    log_z = (x @ weight.T).logsumexp(-1)
    penalty = 0.02 * log_z[targets != IGNORE_INDEX].square().sum()
    return reference(x, weight, targets) + penalty, penalty


@pytest.mark.parametrize("chunk", [1, 1 << 23])
def test_a_z_loss_is_in_the_gradients_and_its_value_apart(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(training.kernels.cpu.kernels, "LOGITS_BYTES", 8 * chunk)
    x, weight, targets = example()
    z_loss = ZLoss(0.02)
    loss = linear_cross_entropy(x, weight, targets, z_loss=z_loss)
    both, penalty = with_z_loss(x, weight, targets)
    torch.testing.assert_close(loss[0], reference(x, weight, targets))
    torch.testing.assert_close(z_loss.take(), penalty.detach())
    assert z_loss.take() is None
    for ours, theirs in zip(gradients(loss, x, weight), gradients(both, x, weight), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_huge_logits_do_not_overflow() -> None:
    x = torch.tensor([[[1000.0, 0.0]]])
    weight = torch.tensor([[1.0, 0.0], [0.999, 0.0]])
    assert linear_cross_entropy(x, weight, torch.tensor([[1]])).item() == pytest.approx(1 + 0.3132617, abs=1e-3)


def test_ignored_targets_give_zero_loss_and_gradient() -> None:
    x, weight, targets = example()
    loss = linear_cross_entropy(x, weight, torch.full_like(targets, IGNORE_INDEX))
    assert loss.item() == 0
    assert all(not g.any() for g in gradients(loss, x, weight))


def test_chunks_are_sized_in_bytes_by_device() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert chunk_tokens(128_256, torch.bfloat16, cpu) == chunk_tokens(128_256, torch.float32, cpu) == 65
    assert chunk_tokens(128_256, torch.bfloat16, gpu) == 2092
    assert 2 * chunk_tokens(50_304, torch.float64, cpu) == chunk_tokens(50_304, torch.float32, cpu)
    assert chunk_tokens(1 << 31, torch.float32, gpu) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk", [1, 1 << 23])
def test_low_precision_products_are_summed_in_float32(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, chunk: int
) -> None:
    monkeypatch.setattr(training.kernels.cpu.kernels, "LOGITS_BYTES", chunk)
    monkeypatch.setattr(training.kernels.cross_entropy, "_BLOCK_BYTES", 200)
    x, weight, targets = example(dtype)
    x, targets = x.detach().repeat(60, 1, 1).requires_grad_(), targets.repeat(60, 1)  # long sums of like terms
    expected = reference(x, weight, targets)
    loss = linear_cross_entropy(x, weight, targets)
    assert loss.dtype == torch.float32 and abs(loss.item() / expected.item() - 1) < 0.002
    for ours, theirs in zip(gradients(loss, x, weight), gradients(expected, x, weight), strict=True):
        assert ours.dtype == dtype
        assert (ours - theirs).norm() / theirs.norm() < 0.01


class MadeSizes(TorchDispatchMode):
    """Counts the storages of a size or larger that operations make."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.nbytes, self.made = nbytes, dict[int, StorageWeakRef]()  # a reference would make autograd copy

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.untyped_storage().nbytes() >= self.nbytes:
            storage = result.untyped_storage()
            self.made[storage._cdata] = StorageWeakRef(storage)
        return result


@pytest.mark.parametrize(("dtype", "copies"), [(torch.float32, 1), (torch.bfloat16, 2)])
def test_the_weight_gradient_is_not_copied(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, copies: int) -> None:
    """Float32 sums, in bf16 rounded before the backward pass, which only scales them."""
    monkeypatch.setattr(training.kernels.cross_entropy, "_BLOCK_BYTES", 2048)
    weight = torch.randn(2000, 16).to(dtype).requires_grad_()
    x = torch.randn(2, 3, 16).to(dtype).requires_grad_()
    with MadeSizes(weight.nbytes) as counted:
        linear_cross_entropy(x, weight, torch.zeros(2, 3, dtype=torch.int64)).sum().mul(0.5).backward()
    assert weight.grad is not None
    made = counted.made.keys() - {weight.untyped_storage()._cdata}
    assert len(made) == copies and weight.grad.untyped_storage()._cdata in made


def test_a_second_backward_pass_is_an_error() -> None:
    x, weight, targets = example()
    loss = linear_cross_entropy(x, weight, targets).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="second backward pass"):
        loss.backward()


def divided(chunk: int, z_loss: ZLoss | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    with pytest.MonkeyPatch.context() as patch, init_distributed("cpu"):
        patch.setattr(training.kernels.cpu.kernels, "LOGITS_BYTES", 8 * chunk)
        group = torch.distributed.group.WORLD
        assert group is not None
        x, weight, targets = example()
        spec = ShardSpec.whole((VOCABULARY,)).shard(0, group.size(), group.rank())
        mine = weight.detach()[spec.slices].requires_grad_()
        loss = linear_cross_entropy(x, mine, targets, spec.offset[0], group, z_loss)
        return loss.detach(), *gradients(loss, x, mine), z_loss.take() if z_loss else None


@pytest.mark.parametrize(("ranks", "chunk"), [(2, 1 << 23), (3, 24)])
@pytest.mark.parametrize("z_loss", [None, ZLoss(0.02)], ids=["", "z-loss"])
def test_vocab_parallel_equals_one_rank(run_ranks: RunRanks, ranks: int, chunk: int, z_loss: ZLoss | None) -> None:
    x, weight, targets = example()
    both, penalty = with_z_loss(x, weight, targets)
    dx, dw = gradients(both if z_loss else reference(x, weight, targets), x, weight)
    parts = run_ranks(ranks, divided, chunk, z_loss)
    for loss, _, _, z in parts:
        assert z is None if z_loss is None else math.isclose(z.item(), penalty.item())
        torch.testing.assert_close(loss[0], reference(x, weight, targets).detach())
    torch.testing.assert_close(sum(part[1] for part in parts), dx)
    torch.testing.assert_close(torch.cat([part[2] for part in parts]), dw)
