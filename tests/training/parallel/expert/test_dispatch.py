"""Experts on several ranks: uneven counts, also none; how experts are divided, and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gristmill.errors import UsageError
from training.experimental.parallel_config import ParallelConfig
from training.model.decoder import meta_decoder
from training.model.model_config import ModelConfig
from training.model.sparse_mlp import Experts
from training.parallel.expert.dispatch import ExpertDispatch
from training.parallel.mesh import build_world
from training.parallel.placement_table import placement_table

CONFIG = ModelConfig(layers=2, width=8, heads=2, kv_heads=1, experts=6, expert_width=4).resolve(50, 8)
COUNTS = [[3, 0, 2, 1, 0, 5], [0, 4, 0, 0, 0, 0], [2, 1, 0, 0, 0, 0]]
"""Tokens of each expert, by rank: the experts of the last rank get tokens of the first alone, and the third has few."""


def all_experts() -> Experts:
    torch.manual_seed(1)
    experts = Experts(CONFIG).double()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    return experts


def rows_of(rank: int) -> tuple[Tensor, Tensor]:
    counts = torch.tensor(COUNTS[rank])
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(int(counts.sum()), 8, dtype=torch.float64, generator=generator), counts


def send_and_return(counts: list[list[int]] | None = None) -> list[Tensor]:
    """Outputs of this rank's rows, and the gradients of them and of this rank's experts."""
    world = build_world(ParallelConfig(ep=3).resolve(3, CONFIG, 8), torch.device("cpu"))
    experts, own = all_experts(), slice(2 * world.rank, 2 * world.rank + 2)
    for layer in (experts.gate, experts.up, experts.down):
        layer.weight = torch.nn.Parameter(layer.weight.detach()[own].clone())
    x, found = rows_of(world.rank)
    if counts is not None:
        found = torch.tensor(counts[world.rank])
        x = torch.ones(int(found.sum()), 8, dtype=torch.float64)
    weights = torch.linspace(0.1, 0.9, len(x), dtype=torch.float64)[:, None].requires_grad_()
    y = ExpertDispatch(world.axis("ep"))(experts, x.requires_grad_(), weights, found)
    y.square().sum().backward()
    assert x.grad is not None and weights.grad is not None and experts.gate.weight.grad is not None
    return [y.detach(), x.grad, weights.grad, experts.gate.weight.grad]


def test_rows_come_back_from_the_ranks_of_their_experts(run_ranks: Callable[..., list[Any]]) -> None:
    experts, together = all_experts(), run_ranks(3, send_and_return)
    for rank, (y, grad, of_weights, _) in enumerate(together):
        x, counts = rows_of(rank)
        weights = torch.linspace(0.1, 0.9, len(x), dtype=torch.float64)[:, None].requires_grad_()
        wanted = experts(x.requires_grad_(), weights, counts)
        wanted.square().sum().backward()
        torch.testing.assert_close(y, wanted, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grad, x.grad, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(of_weights, weights.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([own for *_, own in together]), experts.gate.weight.grad)


def test_a_rank_whose_experts_nobody_chooses_takes_part(run_ranks: Callable[..., list[Any]]) -> None:
    nobody = [[0, 2, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [3, 0, 0, 0, 0, 0]]
    (first, *_), (second, *_, unused), _ = run_ranks(3, send_and_return, nobody)
    assert len(first) == 2 and len(second) == 0 and not unused.any()


def test_experts_are_divided_then_their_rows_among_their_replicas() -> None:
    layout = ParallelConfig(dp=8, zero=3, zero_group=4, ep=2).resolve(8, CONFIG, 8)
    table = placement_table(meta_decoder(CONFIG), layout)
    placement = table["blocks.0.mlp.experts.down.weight"]
    assert dict(placement.shard) == {"tp": 2, "ep": 0, "expert_shard": 0}
    assert placement.replicated == ("expert_replicate",)
    assert layout.expert_mesh_shape[:2] == (2, 2)
    assert "ep" not in table["blocks.0.mlp.router.weight"].shard


@pytest.mark.parametrize(
    ("layout", "processes", "said"),
    [
        (
            {"ep": 4},
            4,
            r"model.experts 6 are not divisible by parallel.ep 4; try --parallel.ep 2",
        ),
        (
            {"dp": 3, "ep": 2},
            3,
            r"the 3 ranks of parallel.dp x cp are not divisible by parallel.ep 2; try --parallel.ep 1",
        ),
        ({"dp": 6, "zero": 1, "zero_group": 3, "ep": 2}, 6, r"the 3 ranks over which ZeRO shards are not divisible"),
        ({"dp": 2, "ep": 2, "local_steps": 2}, 2, r"replicas with weights of their own have all experts"),
    ],
)
def test_what_ep_does_not_divide_is_refused(layout: dict[str, Any], processes: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ParallelConfig(**layout).resolve(processes, CONFIG, 8)


def test_ep_of_a_dense_model_is_refused() -> None:
    with pytest.raises(UsageError, match=r"parallel.ep 2 divides experts, but the model is dense; try --parallel.ep 1"):
        ParallelConfig(ep=2).resolve(2, ModelConfig(layers=2).resolve(50, 8), 8)
