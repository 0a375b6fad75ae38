"""Sparse layers: every layout computes what one process does, and that what a plain decoder computes."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import training.parallel.placement_table
from gristmill_parity.cases import Case
from gristmill_parity.comparison import Certifier, traffic_difference
from gristmill_parity.feature_cases import feature_case, feature_cases
from tests.training.planted_faults import require_finite_difference, run_with_fault
from training.distributed.rank_pool import RankPool
from training.experimental.parallel_config import ParallelConfig
from training.model import router
from training.model.latent_attention import LatentAttention
from training.model.router import Router
from training.model.sparse_mlp import ExpertLinear
from training.parallel.data.grad_reducer import GradBucket
from training.parallel.expert.routing import _TokensOfRanks
from training.parallel.gradients import squared_grad_norm
from training.parallel.parallel_model import ParallelModel
from training.sharding.placement import Placement

Patch = pytest.MonkeyPatch
ONE, TP = ParallelConfig(), ParallelConfig(tp=2)
DP, CP = ParallelConfig(dp=2), ParallelConfig(cp=2)


def case(sparse: str, layout: ParallelConfig, **options: Any) -> Case:
    return feature_case("llama", layout, **{"reference": "one process", "sparse": sparse, **options})


PLAIN: dict[str, Any] = {"reference": "plain decoder"}
CASES = [case for case in feature_cases(full=True)[0] if case.sparse]


@pytest.mark.every(12)
@pytest.mark.parametrize("chosen", CASES, ids=str)
def test_layouts_of_sparse_models_agree_with_their_reference_and_with_theory(rank_pool: RankPool, chosen: Case) -> None:
    row = Certifier(rank_pool).certify(chosen)
    assert row.passed, row.reason


def weights_not_normalised(patch: Patch) -> None:
    """The configuration is frozen, and shared with the reference: the router reads a copy."""
    right = Router.__init__

    def build(self: Router, config: Any) -> None:
        right(self, config)
        self.config = replace(config, router_normalize=not config.router_normalize)

    patch.setattr(Router, "__init__", build)


def bias_in_the_weights(patch: Patch) -> None:
    """The bias steers the choice, and here also what is chosen weighs."""
    right = Router.forward

    def forward(self: Router, x: Tensor, padding: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        chosen, weights, counts = right(self, x, padding)
        return chosen, weights if self.choice_bias is None else weights + self.choice_bias[chosen], counts

    patch.setattr(Router, "forward", forward)


def losses_scaled_by_micro_batches(patch: Patch) -> None:
    right = ParallelModel.forward_backward

    def pass_on(self: ParallelModel, batch: Any, scale: float) -> Tensor:
        assert self.routing is not None
        begin = self.routing.begin_step
        patch.setattr(self.routing, "begin_step", lambda scale: begin(scale / self.layout.micro_batches))
        return right(self, batch, scale)

    patch.setattr(ParallelModel, "forward_backward", pass_on)


def losses_counted_by_every_rank(patch: Patch) -> None:
    patch.setattr(_TokensOfRanks, "counts_losses", property(lambda _: True, lambda _self, _value: None), raising=False)


def counts_of_one_rank(patch: Patch) -> None:
    patch.setattr(_TokensOfRanks, "sum_counts", lambda _self, counts, _balance: counts)


def gradients_of_experts_summed_twice(patch: Patch) -> None:
    """Over tensor-parallel ranks, which have different parts of an expert, as if each had a term of all of it."""
    table = training.parallel.placement_table.tensor_parallel_table

    def wrong(sequence_parallel: bool, copies: int) -> dict[str, Placement]:
        rows = table(sequence_parallel, copies)
        return rows | {key: replace(rows[key], gradient_sum=("tp",)) for key in rows if key.startswith("experts.")}

    patch.setattr(training.parallel.placement_table, "tensor_parallel_table", wrong)


def not_summed(patch: Patch, name: str) -> None:
    """Over tensor-parallel ranks, of which each has a term of the gradient of parameter `name`."""
    table = training.parallel.placement_table.tensor_parallel_table

    def wrong(sequence_parallel: bool, copies: int) -> dict[str, Placement]:
        rows = table(sequence_parallel, copies)
        return rows | {name: replace(rows[name], gradient_sum=())}

    patch.setattr(training.parallel.placement_table, "tensor_parallel_table", wrong)


def experts_counted_twice_over_data_parallelism(patch: Patch) -> None:
    """Summed over all replicas, though each rank has other experts, as if they were a dense model's."""
    right = GradBucket._finish_sum

    def finish(self: GradBucket, reduced: Tensor) -> Tensor:
        found = right(self, reduced)
        return 2 * found if self.shard.name == "expert_shard" else found

    patch.setattr(GradBucket, "_finish_sum", finish)


def norm_without_experts(patch: Patch) -> None:
    def norm(params: Any, device: torch.device) -> Tensor:
        return squared_grad_norm([p for p in params if "experts" not in p.name], device)

    patch.setattr("training.train_step.squared_grad_norm", norm)


def rows_in_the_order_of_ranks(patch: Patch) -> None:
    """Rows that arrive are taken as if sorted by expert already."""
    patch.setattr("training.parallel.expert.dispatch.Rows", SimpleNamespace(apply=lambda x, *_: x))


def losses_left_out(patch: Patch) -> None:
    patch.setattr(router._WithLoss, "backward", staticmethod(lambda _ctx, grad: (grad, None, None, None, None)))


def shared_key_not_rotated(patch: Patch) -> None:
    """The rotated key, which all heads share, is not rotated."""
    right = LatentAttention._rotate
    patch.setattr(LatentAttention, "_rotate", staticmethod(lambda x, table: x if x.shape[2] == 1 else right(x, table)))


def sinks_left_out(patch: Patch) -> None:
    patch.setattr("training.kernels.sink_attention.merge_sinks", lambda *_: None)


def biases_of_experts_added_by_every_rank(patch: Patch) -> None:
    """Whole, and not a part of them each."""
    patch.setattr(ExpertLinear, "bias_share", property(lambda _: 1.0, lambda _self, _value: None))


def drops_without_counting(patch: Patch) -> None:
    patch.setattr(Router, "dropped", property(lambda _: 0, lambda _self, _value: None), raising=False)


def last_tokens_first(patch: Patch) -> None:
    """Experts are filled from the end of a sequence."""
    right = Router._within_capacity

    def backwards(self: Router, chosen: Tensor) -> tuple[Tensor, Tensor]:
        taken, left = right(self, chosen.flip(1))
        return taken.flip(1), left

    patch.setattr(Router, "_within_capacity", backwards)


def padding_chooses(patch: Patch) -> None:
    """As any other token."""
    right = Router.forward
    patch.setattr(Router, "forward", lambda self, x, padding=None: right(self, x))


def capacity_of_a_rank_s_tokens(patch: Patch) -> None:
    """And not of those of a sequence, which are on several ranks."""
    right = _TokensOfRanks.__init__

    def build(self: _TokensOfRanks, *arguments: Any) -> None:
        right(self, *arguments)
        self.gather = self.own = lambda x: x  # type: ignore[method-assign]

    patch.setattr(_TokensOfRanks, "__init__", build)


FAULTS: list[tuple[Callable[[Patch], None], Case, str]] = [
    (weights_not_normalised, case("switch", ONE, **PLAIN), "loss"),
    (bias_in_the_weights, case("bias", ONE, **PLAIN), "loss"),
    (losses_scaled_by_micro_batches, case("bias", replace(ONE, micro_batches=2), **PLAIN), "gradient"),
    (losses_counted_by_every_rank, case("sequence", TP), "gradient"),
    (counts_of_one_rank, case("switch", DP), "gradient"),
    (counts_of_one_rank, case("sequence", CP), "gradient"),
    (gradients_of_experts_summed_twice, case("sequence", TP), "gradient"),
    (losses_left_out, case("sequence", ONE, **PLAIN), "gradient"),
    (experts_counted_twice_over_data_parallelism, case("bias", ParallelConfig(dp=4, ep=2)), "gradient"),
    (norm_without_experts, case("bias", ParallelConfig(dp=2, ep=2), optimizer="adamw"), "weight"),
    (shared_key_not_rotated, case("latent", ONE, **PLAIN), "loss"),
    (sinks_left_out, case("sinks", ONE, **PLAIN), "loss"),
    (biases_of_experts_added_by_every_rank, case("sinks", TP), "weight"),
    (drops_without_counting, case("capacity", ONE, **PLAIN), "weight"),
    (last_tokens_first, case("capacity", ONE, **PLAIN), "loss"),
    (capacity_of_a_rank_s_tokens, case("capacity", CP), "loss"),
    (padding_chooses, case("switch", ONE, padding=True, **PLAIN), "gradient"),
    (padding_chooses, case("bias", ONE, padding=True, **PLAIN), "weight"),
    (padding_chooses, case("capacity", ONE, padding=True, **PLAIN), "loss"),
    (rows_in_the_order_of_ranks, case("bias", ParallelConfig(dp=2, ep=2)), "loss"),
]


@pytest.mark.every(4)
@pytest.mark.parametrize(("fault", "chosen", "seen_in"), FAULTS, ids=[f"{f.__name__} {c}" for f, c, _ in FAULTS])
def test_a_planted_fault_turns_red_by_a_finite_difference(
    rank_pool: RankPool, fault: Callable[[Patch], None], chosen: Case, seen_in: str
) -> None:
    require_finite_difference(rank_pool, fault, chosen, seen_in)


@pytest.mark.parametrize(
    ("layer", "name", "sparse"),
    [
        (1, "mlp.router.weight", "sequence"), (0, "attention.q_a.weight", "latent"),
        (0, "attention.kv_a.weight", "latent"), (0, "attention.kv_a_norm.weight", "latent"),
    ],
)  # fmt: skip
def test_ranks_whose_terms_are_not_summed_differ(rank_pool: RankPool, layer: int, name: str, sparse: str) -> None:
    fault = partial(not_summed, name=name)
    row = Certifier(rank_pool, partial(run_with_fault, fault)).certify(case(sparse, TP))
    assert not row.passed and f"has other values of blocks.{layer}.{name}" in row.reason


def in_turns(patch: Patch) -> None:
    """Tokens choose experts in turns, so that each has as many: the formula's assumption. Count what ranks send."""

    def choose(self: Router, scores: Tensor) -> Tensor:
        k, experts = self.config.experts_per_token, self.config.experts
        return (torch.arange(scores[..., 0].numel() * k) % experts).view(*scores.shape[:-1], k)

    patch.setattr(Router, "_choose", choose)
    patch.setattr(Case, "counts_traffic", True)


DIVIDED = [
    case("bias", ParallelConfig(dp=2, ep=2), recompute="full"),
    case("switch", ParallelConfig(dp=4, ep=4)),
    case("bias", ParallelConfig(dp=4, ep=2, zero=1)),
    case("bias", ParallelConfig(dp=2, ep=2, zero=2, micro_batches=2), recompute="selective"),
    case("bias", ParallelConfig(dp=4, ep=2, zero=3, micro_batches=2)),
    case("bias", ParallelConfig(dp=4, ep=2, zero=3, zero_group=2)),
    case("bias", ParallelConfig(dp=2, ep=2, tp=2, sequence_parallel=True)),
    case("bias", ParallelConfig(dp=2, ep=2, pp=2, schedule="1f1b"), recompute="full"),
]


@pytest.mark.every(3)
@pytest.mark.parametrize("chosen", DIVIDED, ids=str)
def test_ranks_of_equal_choices_send_what_the_formula_says(rank_pool: RankPool, chosen: Case) -> None:
    results = rank_pool.run(chosen.processes, partial(run_with_fault, in_turns), chosen)
    assert traffic_difference(results) == ""
    assert all(result.counted["ep", "all-to-all"].calls for result in results)
