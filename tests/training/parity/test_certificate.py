"""The certificate is green over a covering set of layouts, and red for each planted fault, by a number."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

import training.memory.recompute
import training.parallel.data.fsdp
import training.parallel.initialize
import training.parallel.parallel_model
import training.parallel.parallelize
import training.parallel.pipeline.pipeline_stages
import training.parallel.placement_table
import training.parallel.tensor.tensor_parallel
from gristmill_parity.cases import Case, covering_cases
from gristmill_parity.certificate import kinds_of_layouts
from gristmill_parity.comparison import LIMITS, Certifier, assemble_ranks, traffic_difference
from gristmill_parity.worker import RankResult, run_case
from tests.training.planted_faults import require_finite_difference, run_with_fault
from training.distributed import collectives
from training.distributed.collectives import Collective
from training.distributed.rank_pool import RankPool
from training.experimental.parallel_config import ParallelConfig
from training.kernels.cross_entropy import IGNORE_INDEX
from training.model.batch import TokenBatch
from training.model.decoder import Decoder
from training.model.dropout import Dropout
from training.model.positions import PositionEmbedding
from training.parallel.data.grad_reducer import GradBucket, GradReducer
from training.parallel.parallel_model import ParallelModel
from training.parallel.pipeline.pipeline_parallel import Pipeline
from training.parallel.tensor.tensor_parallel import ShardedDropout
from training.parallel.traffic_inputs import Volume
from training.sharding.axis import Axis
from training.sharding.placement import Placement
from training.sharding.shard_spec import ShardSpec

Patch = pytest.MonkeyPatch
Table = dict[str, Placement]
# the first of them cover most pairs of options' values, and the last are 3D; `gristmill parity` certifies all
COVERING = [*covering_cases()[:44], *covering_cases()[-3:]]


@pytest.fixture(scope="module")
def certifier(rank_pool: RankPool) -> Certifier:
    return Certifier(rank_pool)


def case(preset: Any, recompute: Any = "none", precision: Any = "fp64", **layout: Any) -> Case:
    """A case with the number of processes that the layout needs."""
    asked = ParallelConfig(**layout)
    processes = (asked.dp or 1) * asked.tp * asked.pp
    model = Case.of("llama", replace(asked, dp=asked.dp or 1, virtual_stages=3, micro_batches=1)).model
    return replace(Case.of(preset, asked.resolve(processes, model, 24), recompute), precision=precision)


@pytest.mark.every(6)
@pytest.mark.parametrize("chosen", COVERING, ids=str)
def test_a_covering_set_of_layouts_agrees_with_one_process_and_with_theory(certifier: Certifier, chosen: Case) -> None:
    row = certifier.certify(chosen)
    assert row.passed, row.reason


@pytest.mark.every(2)
@pytest.mark.parametrize("chosen", [case for case in kinds_of_layouts(COVERING) if case.processes <= 2], ids=str)
def test_float32_agrees_to_rounding(certifier: Certifier, chosen: Case) -> None:
    """Float32 has other kernels, and these do not know how kinds are combined; `gristmill parity` combines them."""
    row = certifier.certify(replace(chosen, precision="fp32"))
    assert row.passed, row.reason


# Planted faults: each function patches one thing, on every rank of a case


def no_sum_of_input_gradients(patch: Patch) -> None:
    right = Collective.backward

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return (grad, None, None, None) if ctx.communicate_gradient is collectives._all_reduce else right(ctx, grad)

    patch.setattr(Collective, "backward", staticmethod(backward))


def no_sum_of_outputs(patch: Patch) -> None:
    right = Collective.forward

    def forward(ctx: Any, x: Tensor, axis: Any, there: Any, back: Any) -> Tensor:
        return right(ctx, x, axis, collectives._identity if there is collectives._all_reduce else there, back)

    patch.setattr(Collective, "forward", staticmethod(forward))


def sequence_halves_swapped(patch: Patch) -> None:
    right = collectives._reduce_scatter_sequence
    patch.setattr(
        training.distributed.collectives,
        "_reduce_scatter_sequence",
        lambda x, axis: right(x.roll(x.shape[1] // 2, 1), axis),
    )


def every_position_from_zero(patch: Patch) -> None:
    patch.setattr(training.parallel.tensor.tensor_parallel._ShardedPositions, "positions", PositionEmbedding.positions)


def change_table(patch: Patch, changed: Callable[[Callable[[bool], Table], bool], Table]) -> None:
    """Replace the table of tensor parallelism by what `changed` makes of the right one and its argument."""
    right = training.parallel.placement_table.tensor_parallel_table
    patch.setattr(
        training.parallel.placement_table, "tensor_parallel_table", lambda sequence, _: changed(right, sequence)
    )


def norms_not_summed_over_the_sequence(patch: Patch) -> None:
    change_table(patch, lambda table, _sequence_parallel: table(False))


def norms_summed_twice(patch: Patch) -> None:
    change_table(patch, lambda table, _sequence_parallel: table(True))


def every_head_drops_as_the_first(patch: Patch) -> None:
    patch.setattr(ShardedDropout, "index", Dropout.index)


def vocabulary_from_zero(patch: Patch) -> None:
    right = training.parallel.tensor.tensor_parallel.linear_cross_entropy
    patch.setattr(
        training.parallel.tensor.tensor_parallel,
        "linear_cross_entropy",
        lambda x, weight, targets, _first, *rest: right(x, weight, targets, 0, *rest),
    )


def loss_scaled_by_replicas(patch: Patch) -> None:
    right = ParallelModel.forward_backward

    def scaled(self: ParallelModel, batch: Any, scale: float) -> Tensor:
        return right(self, batch, scale * self.world.dp_size)

    patch.setattr(ParallelModel, "forward_backward", scaled)


def gradients_averaged(patch: Patch) -> None:
    right = GradBucket.finish_reduce

    def averaged(self: GradBucket) -> None:
        if self._reduced is not None:
            right(self)
            for own in self.own:
                assert own.grad is not None
                own.grad /= self.shard.size * self.replicate.size

    patch.setattr(GradBucket, "finish_reduce", averaged)


def groups_of_replicas_not_summed(patch: Patch) -> None:
    right = GradReducer.__init__

    def alone(self: GradReducer, full: Any, shard: Axis, _replicate: Axis, *rest: Any) -> None:
        right(self, full, shard, Axis("replicate", 1, 0, None), *rest)

    patch.setattr(GradReducer, "__init__", alone)


def first_micro_batch_forgotten(patch: Patch) -> None:
    right = GradReducer.backward_pass

    def forgetful(self: GradReducer) -> Any:
        for bucket in self.buckets:
            bucket.reset()
        return right(self)

    patch.setattr(GradReducer, "backward_pass", forgetful)


def updates_not_published(patch: Patch) -> None:
    right, published = GradReducer.start_all_gather, []

    def once(self: GradReducer) -> None:
        if not published:
            right(self)
        published.append(True)

    patch.setattr(GradReducer, "start_all_gather", once)


def updates_used_before_they_arrive(patch: Patch) -> None:
    patch.setattr(GradReducer, "all_gather_before_use", lambda *_: None)


def stale_gathered_parameters(patch: Patch) -> None:
    right = training.parallel.parallelize.apply_fsdp

    def stale(part: Decoder, *rest: Any) -> None:
        right(part, *rest)
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_reshard_after_backward(False)

    patch.setattr(training.parallel.parallelize, "apply_fsdp", stale)


def ends_not_summed(patch: Patch) -> None:
    patch.setattr(training.parallel.placement_table, "TIED", Placement(replicated=("tied",)))


def stages_swapped(patch: Patch) -> None:
    right = training.parallel.pipeline.pipeline_stages.stage_layers
    patch.setattr(training.parallel.pipeline.pipeline_stages, "stage_layers", lambda *given: right(*given)[::-1])


def last_micro_batch_dropped(patch: Patch) -> None:
    right = Pipeline.forward_backward

    def dropping(self: Pipeline, batch: TokenBatch, scale: float) -> Tensor:
        left = batch.targets.clone()
        left[-len(left) // self.layout.micro_batches :] = IGNORE_INDEX
        return right(self, replace(batch, targets=left), scale)

    patch.setattr(Pipeline, "forward_backward", dropping)


def computed_again_otherwise(patch: Patch) -> None:
    right = training.memory.recompute.checkpoint

    def other(forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
        calls: list[bool] = []

        def run(x: Tensor, *rest: Any) -> Any:
            calls.append(True)
            return forward(x * (1.0 if len(calls) == 1 else 1.001), *rest)

        return right(run, *args, **options)

    patch.setattr(training.memory.recompute, "checkpoint", other)


def all_draw_the_same_shard(patch: Patch) -> None:
    right = training.parallel.initialize.init_shard
    patch.setattr(
        training.parallel.initialize,
        "init_shard",
        lambda values, name, spec, *rest: right(values, name, ShardSpec.whole(spec.size), *rest),
    )


FAULTS: list[tuple[Callable[[Patch], None], Case, str]] = [
    (no_sum_of_input_gradients, case("llama", tp=2), "gradient"),
    (no_sum_of_outputs, case("llama", tp=2), "gradient"),
    (vocabulary_from_zero, case("llama", tp=2), "loss"),
    (every_head_drops_as_the_first, case("gpt2", tp=2), "loss"),
    (all_draw_the_same_shard, case("llama", tp=2), "loss"),
    (sequence_halves_swapped, case("llama", tp=2, sequence_parallel=True), "loss"),
    (every_position_from_zero, case("gpt2", tp=2, sequence_parallel=True), "loss"),
    (norms_not_summed_over_the_sequence, case("gpt2", tp=2, sequence_parallel=True), "gradient"),
    (norms_summed_twice, case("gpt2", tp=2), "gradient"),
    (loss_scaled_by_replicas, case("llama", dp=2), "gradient"),
    (gradients_averaged, case("llama", dp=2), "gradient"),
    (gradients_averaged, case("llama", dp=2, zero=1), "gradient"),
    (first_micro_batch_forgotten, case("llama", dp=2, micro_batches=2), "gradient"),
    (groups_of_replicas_not_summed, case("llama", dp=4, zero=2, zero_group=2), "gradient"),
    (updates_not_published, case("llama", dp=2, zero=2), "loss"),
    (updates_used_before_they_arrive, case("llama", dp=2, zero=1), "loss"),
    (stale_gathered_parameters, case("llama", dp=2, zero=3), "loss"),
    (ends_not_summed, case("gpt2", pp=2), "gradient"),
    (stages_swapped, case("llama", pp=2), "loss"),
    (last_micro_batch_dropped, case("llama", pp=2, schedule="gpipe"), "loss"),
    (computed_again_otherwise, case("llama", "full"), "gradient"),
    (computed_again_otherwise, case("llama", "selective"), "gradient"),
]
if torch.__version__ >= "2.13":  # older ones refuse this schedule
    FAULTS.append((ends_not_summed, case("gpt2", pp=2, schedule="zbv"), "gradient"))


@pytest.mark.every(4)
@pytest.mark.parametrize(("fault", "chosen", "seen_in"), FAULTS, ids=[f"{b[0].__name__}-{b[1]}" for b in FAULTS])
def test_a_planted_fault_turns_red_by_a_finite_difference(
    rank_pool: RankPool, fault: Callable[[Patch], None], chosen: Case, seen_in: str
) -> None:
    require_finite_difference(rank_pool, fault, chosen, seen_in)


def copies_forgotten(patch: Patch) -> None:
    change_table(patch, lambda table, sequence: {name: Placement(p.shard) for name, p in table(sequence).items()})


def test_a_piece_that_other_ranks_hold_than_the_table_says_turns_red(rank_pool: RankPool) -> None:
    row = Certifier(rank_pool, partial(run_with_fault, copies_forgotten)).certify(case("llama", tp=2))
    assert not row.passed and not row.error and row.largest_difference < LIMITS["fp64"]
    found = "2 ranks hold blocks.0.attention_norm.weight from (0,), and 2 count it in the gradient norm"
    assert row.reason == f"{found}; the placement table has 1 and 1"


def superfluous_sum(chosen: Case) -> RankResult:
    """Compute correctly, with one superfluous all-reduce of four elements."""
    with pytest.MonkeyPatch.context() as patch:
        right = GradReducer.start_all_gather

        def publish(self: GradReducer) -> None:
            right(self)
            dist.all_reduce(torch.zeros(4), group=self.buckets[0].replicate.group)

        patch.setattr(GradReducer, "start_all_gather", publish)
        return run_case(chosen)


def test_superfluous_communication_turns_red(rank_pool: RankPool) -> None:
    row = Certifier(rank_pool, superfluous_sum).certify(case("llama", dp=2))
    assert not row.passed and not row.error and row.largest_difference < LIMITS["fp64"]
    assert "rank 0 takes part in 2 all-reduce" in row.reason and "theory has 1 of" in row.reason


def fail(chosen: Case) -> RankResult:
    raise ValueError(f"no {chosen}")


def test_a_rank_that_fails_turns_red_and_the_next_case_runs(rank_pool: RankPool, certifier: Certifier) -> None:
    row = Certifier(rank_pool, fail).certify(case("llama", dp=2))
    assert not row.passed and "ValueError: no llama dp2" in row.error and math.isnan(row.largest_difference)
    assert certifier.certify(case("llama", dp=2)).passed


def seen(rank_parts: Sequence[tuple[int, int, float]]) -> list[RankResult]:
    """Results of ranks that each hold one shard of a vector of four: start, length, value."""
    found = []
    for start, length, value in rank_parts:
        held = [("w", ShardSpec((4,), (start,), (length,)), torch.full((length,), value))]
        found.append(RankResult([1.0], held, held, {("tp", "all-reduce"): Volume(1, 8)}, {}))
    return found


def test_missing_and_differing_shards_are_found() -> None:
    assert assemble_ranks(seen([(0, 2, 1.0), (2, 2, 2.0), (2, 2, 2.0)])).weights["w"].tolist() == [1, 1, 2, 2]
    with pytest.raises(AssertionError, match="1 elements of"):
        assemble_ranks(seen([(0, 2, 1.0), (2, 1, 2.0)]))
    assert not assemble_ranks(seen([(0, 4, 1.0), (0, 4, 1.0)])).mismatch
    assert "rank 1 has other values of w" in assemble_ranks(seen([(0, 4, 1.0), (0, 4, 1.0 + 1e-7)])).mismatch
    assert "rank 0 takes part in 1 all-reduce of 8 bytes on axis tp; theory has 0 of 0" in traffic_difference(
        seen([(0, 4, 1.0)])
    )
