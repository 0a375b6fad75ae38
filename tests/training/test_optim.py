import math

import torch
from torch import nn

from training.config import OptimConfig
from training.optim import build_optimizer, clip_gradients, learning_rate


def test_warm_up_is_linear_and_the_decay_half_a_cosine() -> None:
    config = OptimConfig(steps=110, lr=1.0, min_lr=0.2, warmup_steps=10)
    rates = [learning_rate(step, config) for step in range(110)]
    assert rates[:10] == [(i + 1) / 10 for i in range(10)]
    assert math.isclose(rates[59], 0.6)  # half way down
    assert math.isclose(rates[-1], 0.2) and rates[9:] == sorted(rates[9:], reverse=True)


def test_no_warm_up_and_nothing_but_warm_up() -> None:
    assert learning_rate(0, OptimConfig(steps=1, lr=1.0, min_lr=0.1, warmup_steps=0)) == 0.1
    assert learning_rate(4, OptimConfig(steps=5, lr=1.0, warmup_steps=10)) == 0.5


def test_only_matrices_decay() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Embedding(5, 2))
    optimizer = build_optimizer(model, OptimConfig(weight_decay=0.3, betas=(0.8, 0.9)))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert [decay[id(p)] for p in model.parameters()] == [0.3, 0.0, 0.0, 0.0, 0.3]
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)


def test_clipping_returns_the_norm_there_was() -> None:
    model = nn.Linear(1, 2, bias=False)
    for longest, left in ((1.0, 1.0), (0.0, 5.0), (9.0, 5.0)):
        model.weight.grad = torch.tensor([[3.0], [4.0]])
        assert math.isclose(clip_gradients(model, longest).item(), 5.0)
        assert math.isclose(model.weight.grad.norm().item(), left, rel_tol=1e-5)
