"""Sparse layers by themselves: tokens do not see each other, groups, and options that are refused."""

from typing import Any

import pytest
import torch

from gristmill.errors import UsageError
from training.model.model_config import ModelConfig
from training.model.router import Router
from training.model.sparse_mlp import SparseMLP

SIZES: dict[str, Any] = {"layers": 2, "width": 16, "heads": 2, "experts": 6, "expert_width": 8}


def resolved(**options: Any) -> ModelConfig:
    return ModelConfig(**{**SIZES, **options}).resolve(50, 8)


def filled(config: ModelConfig) -> SparseMLP:
    torch.manual_seed(1)
    layer = SparseMLP(config).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


@pytest.mark.parametrize("options", [{}, {"router": "sigmoid", "expert_groups": 3, "groups_per_token": 1}])
def test_a_token_s_result_does_not_depend_on_its_batch(options: dict[str, Any]) -> None:
    layer, x = filled(resolved(shared_experts=1, **options)), torch.randn(3, 8, 16, dtype=torch.float64)
    together = layer(x)
    for row in range(3):
        torch.testing.assert_close(layer(x[row : row + 1, 5:]), together[row : row + 1, 5:], rtol=1e-12, atol=1e-13)


def test_an_expert_without_tokens_has_a_gradient_of_zeros() -> None:
    layer = filled(resolved(experts_per_token=1))
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[2, 0] = 1.0
    x = torch.randn(1, 8, 16, dtype=torch.float64)
    x[..., 0] = 1.0
    layer(x).sum().backward()
    of_experts = layer.experts.up.weight.grad
    assert of_experts is not None
    assert [bool(each.any()) for each in of_experts] == [False, False, True, False, False, False]


def test_experts_are_of_the_groups_with_the_highest_two() -> None:
    router = Router(resolved(expert_groups=3, groups_per_token=1))
    scores = torch.tensor([[[0.9, 0.0, 0.5, 0.6, 0.4, 0.3]]])  # sums of two: 0.9, 1.1, 0.7
    assert router._choose(scores).tolist() == [[[3, 2]]]


def test_a_recomputed_pass_is_counted_once() -> None:
    layer = filled(resolved())
    x = torch.randn(2, 8, 16, dtype=torch.float64, requires_grad=True)
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sum().backward()
    counts = layer.router.counts
    assert isinstance(counts, torch.Tensor) and int(counts.sum()) == 2 * 8 * 2


def test_a_full_expert_takes_no_later_tokens_of_a_sequence_in_training() -> None:
    """Of 8 tokens that all choose experts 1 and 4 each takes 1.5 times its share of 16 / 6, rounded up."""
    router = Router(resolved(capacity_factor=1.5))
    with torch.no_grad():
        router.weight.zero_()
        router.weight[[1, 4], 0] = 1.0
    x = torch.ones(2, 8, 16)
    chosen, weights, counts = router(x)
    assert counts.tolist() == [0, 8, 0, 0, 8, 0]
    assert (chosen == 6).sum((0, 2)).tolist() == [0, 0, 0, 0, 4, 4, 4, 4]
    weights.sum().backward()
    assert int(router.dropped) == 16 and router.counts.tolist() == [0, 16, 0, 0, 16, 0]  # type: ignore[union-attr]
    assert router.eval()(x)[2].tolist() == [0, 16, 0, 0, 16, 0]


def test_what_is_dropped_adds_nothing_and_depends_on_no_later_token() -> None:
    layer, plain = (filled(resolved(capacity_factor=factor, shared_experts=1)) for factor in (1.0, 0.0))
    x = torch.randn(3, 8, 16, dtype=torch.float64, requires_grad=True)
    chosen, weights, _ = layer.router(x)
    assert 0 < int((chosen == 6).sum()) < chosen.numel() / 2
    gate, up, down = (part.weight for part in (layer.experts.gate, layer.experts.up, layer.experts.down))
    found, wanted = layer(x), layer.shared(x)  # type: ignore[misc]
    for expert in range(6):
        outputs = torch.nn.functional.silu(x @ gate[expert].T) * (x @ up[expert].T) @ down[expert].T
        wanted = wanted + (weights * (chosen == expert)).sum(-1, keepdim=True) * outputs
    torch.testing.assert_close(found, wanted)
    for own, formula in zip(*(torch.autograd.grad(y.square().sum(), (x, up)) for y in (found, wanted)), strict=True):
        torch.testing.assert_close(own, formula)
    later = x.detach().clone()
    later[:, 5:] = torch.randn(3, 3, 16)
    torch.testing.assert_close(layer(later)[:, :5], found[:, :5])
    torch.testing.assert_close(layer.eval()(x), plain.eval()(x))


PADDED = torch.arange(8) >= torch.tensor([3, 8, 4])[:, None]  # 9 of 24 tokens: 38 %


@pytest.mark.parametrize(("balance", "capacity"), [("switch", 0.0), ("sequence", 0.0), ("sequence", 1.0)])
def test_padding_chooses_nobody(balance: str, capacity: float) -> None:
    """Losses, gradients, counts and what is dropped are those of the same tokens without padding."""
    config = resolved(balance=balance, balance_loss=0.5, router_z_loss=0.1, capacity_factor=capacity, shared_experts=1)
    padded = filled(config)
    alone = filled(config)
    x = torch.randn(3, 8, 16, dtype=torch.float64)
    if balance == "switch":  # of all tokens of a micro-batch
        rows = [x[~PADDED][None]]
    else:
        rows = [x[i : i + 1, : int(length)] for i, length in enumerate((~PADDED).sum(1))]
    for layer in (padded, alone):
        layer.router.tokens.scale = 0.25
    output = padded(x, PADDED)
    outputs = torch.cat([alone(row)[0] for row in rows])
    torch.testing.assert_close(output[~PADDED], outputs)
    torch.testing.assert_close(output[PADDED], padded.shared(x[PADDED]))  # type: ignore[misc]
    output[~PADDED].square().sum().backward()
    outputs.square().sum().backward()
    for (name, own), other in zip(padded.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, msg=name)
    assert padded.router.counts.tolist() == alone.router.counts.tolist()  # type: ignore[union-attr]
    assert int(padded.router.counts.sum()) == 15 * 2  # type: ignore[union-attr]
    assert int(padded.router.dropped) == int(alone.router.dropped)
    assert float(padded.router.losses) == pytest.approx(float(alone.router.losses), rel=1e-12)
    assert int(padded.eval()(x, PADDED).isnan().sum()) == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"capacity_factor": 0.5}, r"capacity_factor is 0.5; expected 1 or more, .* try --model.capacity_factor 1.25"),
        (
            {"experts": 0, "expert_width": 0, "capacity_factor": 1.5},
            r"capacity_factor 1.5 has no effect without experts",
        ),
        ({"experts_per_token": 7}, r"experts_per_token 7 is above model.experts 6; try --model.experts_per_token 6"),
        ({"expert_groups": 4}, r"experts 6 do not divide into model.expert_groups 4; try one of 1, 2, 3, 6"),
        ({"expert_groups": 3, "groups_per_token": 4}, r"groups_per_token 4 is above model.expert_groups 3"),
        (
            {"expert_groups": 3, "groups_per_token": 1, "experts_per_token": 3},
            r"experts_per_token 3 is above the 2 experts of model.groups_per_token 1; try --model.groups_per_token 2",
        ),
        ({"dense_layers": 2}, r"dense_layers 2 and model.sparse_every 1 leave none of the 2 layers"),
        ({"mlp": "gelu"}, r"needs gated MLPs, and model.mlp is gelu"),
        ({"balance": "none", "balance_loss": 0.1}, r"balance_loss 0.1 has no effect with model.balance none"),
        ({"balance": "switch", "balance_rate": 0.1}, r"balance_rate 0.1 has no effect with model.balance switch"),
        ({"experts": 0}, r"expert_width 8 has no effect without experts; try --model.experts 8"),
        ({"experts": 0, "expert_width": 0, "router": "sigmoid"}, r"model.router sigmoid has no effect without experts"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        resolved(**options)


def test_routers_compute_in_float32_where_all_else_is_bf16() -> None:
    router = Router(resolved()).bfloat16()
    torch.manual_seed(1)
    torch.nn.init.normal_(router.weight, std=0.5)
    x = torch.randn(2, 8, 16).bfloat16()
    chosen, weights, _ = router(x)
    scores = (x.float() @ router.weight.float().T).softmax(-1)
    assert weights.dtype is torch.float32 and torch.equal(chosen, scores.topk(2, -1).indices)
    torch.testing.assert_close(weights, scores.gather(-1, chosen) / scores.gather(-1, chosen).sum(-1, keepdim=True))
