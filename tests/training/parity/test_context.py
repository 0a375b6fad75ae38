"""Context parallelism computes what one process does, and each planted fault turns a row red."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import training.parallel.context.ring
import training.parallel.context.ulysses
from gristmill_parity.cases import Case
from gristmill_parity.comparison import Certifier
from gristmill_parity.feature_cases import feature_case
from tests.training.planted_faults import require_finite_difference
from training.distributed.collectives import Collective
from training.distributed.rank_pool import RankPool
from training.experimental.parallel_config import ParallelConfig
from training.kernels.block_attention import Seen, WeightDropout
from training.model.dropout import Dropout
from training.parallel.context.context_parallel import _OwnDropout
from training.parallel.context.ring import _Blocks, _SendReceive
from training.parallel.context.tokens import TokenOrder
from training.parallel.tensor.tensor_parallel import ShardedDropout

Patch = pytest.MonkeyPatch
RING, ULYSSES = ParallelConfig(cp=2), ParallelConfig(cp=2, context="ulysses")


@pytest.fixture(scope="module")
def certifier(rank_pool: RankPool) -> Certifier:
    return Certifier(rank_pool)


def case(preset: str, layout: ParallelConfig, **options: Any) -> Case:
    found = feature_case(preset, layout, **{"reference": "one process", "dropout": 0.0, **options})
    return replace(found, layers=max(2, found.layout.stages))


ZBV: dict[str, Any] = {"schedule": "zbv"} if torch.__version__ >= "2.13" else {}  # older ones refuse it

CASES = [
    case("llama", RING),
    case("gpt2", replace(RING, cp=3), recompute="full"),
    case("llama", replace(RING, cp=4), documents=True),
    case("mistral-7b", replace(RING, cp=3)),
    case("mistral-7b", replace(RING, tp=2), documents=True, z_loss=0.01),
    case("gpt2", replace(RING, tp=2, sequence_parallel=True)),
    case("gpt2", replace(RING, pp=2), documents=True),
    case("llama", replace(RING, pp=2, **ZBV), recompute="full"),
    case("llama", replace(RING, dp=2, micro_batches=2)),
    case("qwen3-0.6b", replace(RING, dp=2, zero=1, zero_group=1), optimizer="adamw"),
    case("llama", replace(RING, dp=2, zero=2, micro_batches=2)),
    case("llama", replace(RING, dp=2, zero=3, zero_group=1)),
    case("llama", replace(RING, zero=1), optimizer="muon"),
    case("llama", RING, precision="bf16", reference="plain decoder"),
    case("llama", ULYSSES, recompute="selective"),
    case("gpt2", replace(ULYSSES, cp=4), documents=True),
    case("llama", replace(ULYSSES, tp=2, sequence_parallel=True), documents=True),
    case("bloom-176b", replace(ULYSSES, cp=3), recompute="full", heads=6),
    case("mistral-7b", replace(ULYSSES, pp=2, **ZBV)),
    case("llama", replace(ULYSSES, dp=2, zero=3), optimizer="adamw"),
    case("gpt2", replace(RING, cp=3), dropout=0.1, documents=True, recompute="full"),
    case("gpt2", replace(RING, tp=2, sequence_parallel=True), dropout=0.1),
    case("mistral-7b", replace(RING, tp=2), dropout=0.1),
    case("gpt2", replace(ULYSSES, tp=2, sequence_parallel=True), dropout=0.1),
    case("gpt2", ULYSSES, dropout=0.1, documents=True),
    case("bloom-176b", replace(RING, tp=2), documents=True, dropout=0.1),
]


@pytest.mark.every(4)
@pytest.mark.parametrize("chosen", CASES, ids=str)
def test_a_divided_sequence_agrees_with_one_process_and_with_theory(certifier: Certifier, chosen: Case) -> None:
    row = certifier.certify(chosen)
    assert row.passed, row.reason


# Planted faults: each function patches one thing, on every rank of a case


def a_ring_step_lost(patch: Patch) -> None:
    right = training.parallel.context.ring.around
    patch.setattr(training.parallel.context.ring, "around", lambda x, axis: iter([*right(x, axis)][:-1]))


def change_seen(patch: Patch, changed: Callable[[Seen, int], Seen]) -> None:
    """Replace what queries see of each block by what `changed` makes of it and the chunks' length."""
    right = _Blocks.visible

    def visible(self: _Blocks, source: int) -> Iterator[tuple[slice, slice, Seen]]:
        for rows, columns, seen in right(self, source):
            yield rows, columns, changed(seen, self.size)

    patch.setattr(_Blocks, "visible", visible)


def a_mask_shifted_by_a_block(patch: Patch) -> None:
    change_seen(patch, lambda seen, size: seen._replace(key=seen.key - size))


def a_window_shifted_by_a_block(patch: Patch) -> None:
    change_seen(patch, lambda seen, size: seen._replace(window=seen.window + size))


def documents_of_other_chunks(patch: Patch) -> None:
    change_seen(patch, lambda seen, size: seen._replace(first=None if seen.first is None else seen.first - size))


def positions_in_order(patch: Patch) -> None:
    patch.setattr(TokenOrder, "positions", lambda self, local, length: local + self.axis.rank * length)


def gradients_that_stay(patch: Patch) -> None:
    right = _SendReceive.wait

    def wait(self: _SendReceive) -> Tensor:
        found = right(self)
        return self.sent if self.tag == training.parallel.context.ring._GRADIENTS else found

    patch.setattr(_SendReceive, "wait", wait)


def blocks_of_equal_weight(patch: Patch) -> None:
    def merge(out: Tensor, lse: Tensor, term: tuple[Tensor, Tensor]) -> None:
        out.add_(term[0]).mul_(torch.where(lse.isinf(), 1.0, 0.5)[..., None])
        lse.copy_(torch.logaddexp(lse, term[1]))

    patch.setattr(training.parallel.context.ring, "merge_block", merge)


def heads_of_other_ranks(patch: Patch) -> None:
    right = training.parallel.context.ulysses.exchange
    patch.setattr(training.parallel.context.ulysses, "exchange", lambda x, axis: right(x.flip(0), axis))


def exchange_without_gradient(patch: Patch) -> None:
    patch.setattr(Collective, "backward", staticmethod(lambda _ctx, grad: (grad, None, None, None)))


def dropout_by_own_positions(patch: Patch) -> None:
    patch.setattr(_OwnDropout, "index", lambda self, x: self.local(x))


def weights_dropped_by_own_positions(patch: Patch) -> None:
    right = WeightDropout.dropped
    patch.setattr(WeightDropout, "dropped", lambda self, query, key: right(self, query - query[0], key - key[0]))


def heads_dropped_like_other_ranks(patch: Patch) -> None:
    patch.setattr(ShardedDropout, "index", Dropout.index)


def distances_within_a_block(patch: Patch) -> None:
    right = Seen.bias
    patch.setattr(Seen, "bias", lambda self, *tile: right(self._replace(key=self.query), *tile))


FAULTS: list[tuple[Callable[[Patch], None], Case, str]] = [
    (a_ring_step_lost, case("llama", RING), "loss"),
    (a_ring_step_lost, case("llama", replace(RING, cp=3)), "loss"),
    (a_mask_shifted_by_a_block, case("llama", RING), "loss"),
    (a_window_shifted_by_a_block, case("mistral-7b", replace(RING, cp=3)), "loss"),
    (documents_of_other_chunks, case("llama", replace(RING, cp=3), documents=True), "loss"),
    (positions_in_order, case("llama", RING), "loss"),
    (positions_in_order, case("gpt2", RING), "loss"),
    (gradients_that_stay, case("llama", replace(RING, cp=3)), "gradient"),
    (blocks_of_equal_weight, case("llama", RING), "loss"),
    (heads_of_other_ranks, case("llama", ULYSSES), "loss"),
    (exchange_without_gradient, case("llama", ULYSSES), "gradient"),
    (dropout_by_own_positions, case("gpt2", RING, dropout=0.1), "loss"),
    (weights_dropped_by_own_positions, case("gpt2", RING, dropout=0.1), "loss"),
    (heads_dropped_like_other_ranks, case("gpt2", ULYSSES, dropout=0.1), "loss"),
    (distances_within_a_block, case("bloom-176b", RING, heads=6), "loss"),
]


@pytest.mark.every(4)
@pytest.mark.parametrize(("fault", "chosen", "seen_in"), FAULTS, ids=[f"{b[0].__name__}-{b[1]}" for b in FAULTS])
def test_a_planted_fault_turns_red_by_a_finite_difference(
    rank_pool: RankPool, fault: Callable[[Patch], None], chosen: Case, seen_in: str
) -> None:
    require_finite_difference(rank_pool, fault, chosen, seen_in)
