import torch
from torch import nn

from training.parallel.gradients import scale_gradients, squared_grad_norm
from training.sharding.shard_spec import ShardSpec
from training.sharding.sharded_parameter import ShardedParameter


def weight(grad: torch.Tensor, counted: bool = True) -> ShardedParameter:
    own = nn.Parameter(torch.zeros_like(grad))
    own.grad = grad
    return ShardedParameter("w", own, own, ShardSpec.whole(tuple(grad.shape)), counted)


def test_the_norm_counts_primary_shards_in_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(shape, generator=generator) for shape in ((1000, 1000), (10_007,), (3, 5, 7), (0, 4), (1,))]
    weights = [weight(g) for g in grads] + [weight(torch.full((9, 9), 7.0), counted=False)]
    found = squared_grad_norm(weights, torch.device("cpu"))
    exact = sum(g.double().square().sum() for g in grads)
    assert found.dtype == torch.float64 and abs(found / exact - 1) < 1e-6
    wide = [w for w in weights if w.local.ndim == 2]
    assert abs(squared_grad_norm(wide, torch.device("cpu")) / grads[0].double().square().sum() - 1) < 1e-8
    assert squared_grad_norm([], torch.device("cpu")) == 0


def test_all_gradients_are_scaled() -> None:
    weights = [weight(torch.ones(3)), weight(torch.ones(2, 2), counted=False), weight(torch.ones(0, 2))]
    scale_gradients(weights, 0.5)
    assert [w.local.grad.unique().tolist() for w in weights if w.local.grad is not None] == [[0.5], [0.5], []]
