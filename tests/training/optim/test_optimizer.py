from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from training.optim.build_optimizer import build_optimizer
from training.optim.optim_config import OptimConfig
from training.sharding.shard_spec import ShardSpec
from training.sharding.sharded_parameter import ShardedParameter


def weight(name: str, values: Tensor, shape: tuple[int, ...] | None = None) -> ShardedParameter:
    own = nn.Parameter(values)
    return ShardedParameter(name, own, own, ShardSpec.whole(shape or tuple(values.shape)), True)


def model_and_params() -> tuple[nn.Module, list[ShardedParameter]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 41), nn.LayerNorm(41), nn.Embedding(501, 7), nn.Linear(41, 3, bias=False))
    return model, [
        ShardedParameter(n, p, p, ShardSpec.whole(tuple(p.shape)), True) for n, p in model.named_parameters()
    ]


def draw_gradients(weights: list[ShardedParameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for w in weights:
        w.local.grad = torch.randn(w.local.shape, generator=generator, dtype=w.local.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adamw_is_bitwise_torch_with_decay_of_matrices_only(dtype: torch.dtype) -> None:
    config = OptimConfig(weight_decay=0.3, betas=(0.8, 0.9), eps=1e-6)
    (model, weights), (peer, _) = model_and_params(), model_and_params()
    model.to(dtype), peer.to(dtype)
    weights = [ShardedParameter(w.name, p, p, w.spec, True) for w, p in zip(weights, model.parameters(), strict=True)]
    groups = [[p for p in peer.parameters() if (p.ndim > 1) is decays] for decays in (True, False)]
    torch_s = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.3}, {"params": groups[1], "weight_decay": 0.0}],
        betas=config.betas, eps=config.eps, fused=True,
    )  # fmt: skip
    ours = build_optimizer(weights, config)
    for step in range(1, 5):
        draw_gradients(weights, step)
        for p, w in zip(peer.parameters(), weights, strict=True):
            p.grad = w.local.grad.clone()  # type: ignore[union-attr]
        for group in torch_s.param_groups:
            group["lr"] = 0.1 / step
        ours.step(0.1 / step)
        torch_s.step()
    assert ours.updates == 4
    for (name, p), w in zip(peer.named_parameters(), weights, strict=True):
        state = torch_s.state[p]
        assert torch.equal(p, w.local)
        assert all(torch.equal(state[key], values) for key, values in ours.moments()[name].items())


def test_weight_decay_depends_on_the_global_shape() -> None:
    config = OptimConfig(weight_decay=0.5)
    weights = [weight("matrix", torch.ones(1, 4), (8, 4)), weight("norm", torch.ones(4), (8,))]
    for w in weights:
        w.local.grad = torch.zeros(w.local.shape)
    build_optimizer(weights, config).step(1.0)
    assert weights[0].local.unique().tolist() == [0.5] and weights[1].local.unique().tolist() == [1.0]


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_empty_shards_are_skipped_and_missing_gradients_are_errors(name: str) -> None:
    config = OptimConfig(name=name)  # type: ignore[arg-type]
    weights = [weight("none", torch.empty(0, 5), (3, 5)), weight("some", torch.ones(2))]
    optimizer = build_optimizer(weights, config)
    with pytest.raises(AssertionError, match="some has no gradient"):
        optimizer.step(0.1)
    weights[1].local.grad = torch.ones(2)
    optimizer.step(0.1)
    assert (weights[1].local < 1).all() and optimizer.updates == 1
    shapes = {
        key: {state: tuple(t.shape) for state, t in states.items()} for key, states in optimizer.moments().items()
    }
    if name == "adamw":
        assert shapes["none"] == {"exp_avg": (0, 5), "exp_avg_sq": (0, 5)}
    else:
        assert shapes == {"none": {}, "some": {}}
    optimizer.zero_grad()
    assert all(w.local.grad is None and w.module_param.grad is None for w in weights)


def test_a_rank_without_parameters() -> None:
    for weights in ([], [weight("none", torch.empty(0, 5), (3, 5))]):
        optimizer = build_optimizer(weights, OptimConfig())
        optimizer.step(0.1)
        assert optimizer.moments().keys() == {w.name for w in weights}


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_copies_of_a_tied_matrix_stay_equal(name: str) -> None:
    weights = [weight("tied", torch.ones(3, 2)), weight("other", torch.ones(2)), weight("tied", torch.ones(3, 2))]
    optimizer = build_optimizer(weights, OptimConfig(name=name))  # type: ignore[arg-type]
    for step in range(3):
        draw_gradients(weights, step)
        weights[2].local.grad = weights[0].local.grad
        optimizer.step(0.1)
    assert torch.equal(weights[0].local, weights[2].local) and not (weights[0].local == 1).any()
    assert list(optimizer.moments()) == ["tied", "other"]


def test_sgd_has_no_momentum_or_decay() -> None:
    weights = [weight("w", torch.tensor([[1.0, 2.0]]))]
    optimizer = build_optimizer(weights, OptimConfig(name="sgd", weight_decay=0.5))
    weights[0].local.grad = torch.tensor([[10.0, -10.0]])
    optimizer.step(0.25)
    assert weights[0].local.tolist() == [[-1.5, 4.5]]


def test_loaded_states_are_used() -> None:
    (_, ours), (_, others) = model_and_params(), model_and_params()
    first, second = build_optimizer(ours, OptimConfig()), build_optimizer(others, OptimConfig())
    for step in range(3):
        draw_gradients(ours, step)
        first.step(0.01)
    with torch.no_grad():
        for w, of in zip(others, ours, strict=True):
            w.local.copy_(of.local)
    for name, states in second.moments().items():
        for key, values in states.items():
            values.copy_(first.moments()[name][key])
    second.updates = first.updates
    for weights, optimizer in ((ours, first), (others, second)):
        draw_gradients(weights, 9)
        optimizer.step(0.01)
    assert all(torch.equal(a.local, b.local) for a, b in zip(ours, others, strict=True))


class Made(TorchDispatchMode):
    """The names of operations that make a tensor of Python numbers, which a GPU has to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(operation.overloadpacket.__name__)
        return operation(*args, **(kwargs or {}))


def test_an_update_copies_no_numbers_to_the_device() -> None:
    _, weights = model_and_params()
    optimizer = build_optimizer(weights, OptimConfig())
    draw_gradients(weights, 1)
    with Made() as made:
        optimizer.step(1e-3)
    assert "_fused_adamw_" in made.names and not made.names & {"lift_fresh", "_to_copy", "copy_"}
