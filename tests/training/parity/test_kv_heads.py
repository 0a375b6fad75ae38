"""More tensor-parallel ranks than heads of keys and values: copies compute what one process does, and stay equal."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import training.parallel.placement_table
from gristmill_parity.cases import Case
from gristmill_parity.comparison import Certifier
from gristmill_parity.feature_cases import feature_case
from tests.training.planted_faults import require_finite_difference
from training.distributed.rank_pool import RankPool
from training.experimental.parallel_config import ParallelConfig
from training.sharding.placement import Placement

Patch = pytest.MonkeyPatch
TP = ParallelConfig(tp=2)
ZBV: dict[str, Any] = {"schedule": "zbv"} if torch.__version__ >= "2.13" else {}  # older ones refuse it


def case(preset: str, layout: ParallelConfig, heads: int = 2, **options: Any) -> Case:
    """With half as many heads of keys and values as of queries: by default one, which two ranks have."""
    options = {"reference": "one process", "dropout": 0.0, **options}
    found = feature_case(preset, layout, heads=heads, **options)
    assert found.model.kv_heads < layout.tp
    return replace(found, layers=max(2, found.layout.stages))


CASES = [
    case("llama", replace(TP, tp=4), heads=4),  # two heads, of two ranks each
    case("qwen2.5-0.5b", replace(TP, tp=4, sequence_parallel=True), heads=4, precision="fp32"),  # with biases
    case("llama", replace(TP, tp=4), heads=4, optimizer="adamw"),  # clipped by the norm, with weight decay
    case("llama", TP, reference="plain decoder"),
    case("llama", TP, precision="bf16", reference="plain decoder"),
    case("qwen3-0.6b", replace(TP, sequence_parallel=True), recompute="selective", documents=True),
    case("mistral-7b", replace(TP, pp=2, **ZBV), dropout=0.1),
    case("llama", replace(TP, pp=2), recompute="full"),
    case("llama", replace(TP, dp=2, zero=1), optimizer="adamw"),
    case("llama", replace(TP, dp=2, zero=2, micro_batches=2)),
    case("llama", replace(TP, dp=2, zero=3, sequence_parallel=True)),
    case("llama", replace(TP, dp=2, zero=1), optimizer="muon"),
    case("llama", replace(TP, cp=2), documents=True),
    case("llama", replace(TP, dp=2, compression="powersgd"), reference="plain decoder", steps=6),
    case("llama", replace(TP, dp=2, local_steps=2), optimizer="adamw", reference="plain decoder", steps=6),
]


@pytest.mark.every(4)
@pytest.mark.parametrize("chosen", CASES, ids=str)
def test_copies_of_heads_agree_with_one_process_and_with_theory(rank_pool: RankPool, chosen: Case) -> None:
    row = Certifier(rank_pool).certify(chosen)
    assert row.passed, row.reason


def change_kv(patch: Patch, changed: Callable[[Placement], Placement]) -> None:
    """Replace the placement of keys and values in the table of tensor parallelism."""
    right = training.parallel.placement_table.tensor_parallel_table

    def table(sequence_parallel: bool, copies: int) -> dict[str, Placement]:
        rows = right(sequence_parallel, copies)
        return {name: changed(row) if "kv" in row.replicated else row for name, row in rows.items()}

    patch.setattr(training.parallel.placement_table, "tensor_parallel_table", table)


def terms_not_summed(patch: Patch) -> None:
    change_kv(patch, lambda row: replace(row, gradient_sum=()))


def heads_in_another_order(patch: Patch) -> None:
    right = Placement.piece
    patch.setattr(
        Placement,
        "piece",
        lambda self, shape, axes: right(
            self,
            shape,
            {**axes, "tp": replace(axes["tp"], rank=axes["tp"].rank % 2 * 2 + axes["tp"].rank // 2)}
            if self.repeat
            else axes,
        ),
    )


@pytest.mark.parametrize(
    ("fault", "seen_in"), [(terms_not_summed, "gradient"), (heads_in_another_order, "loss")], ids=["terms", "order"]
)
def test_a_planted_fault_turns_red_by_a_finite_difference(
    rank_pool: RankPool, fault: Callable[[Patch], None], seen_in: str
) -> None:
    require_finite_difference(rank_pool, fault, CASES[0], seen_in)
