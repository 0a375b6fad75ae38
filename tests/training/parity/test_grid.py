"""2D, 2.5D and 3D tensor parallelism compute what one process does, and each planted fault turns a row red."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import training.experimental.grids.cube
import training.experimental.grids.cube_modules
import training.experimental.grids.norms
import training.experimental.grids.placements
import training.experimental.grids.summa
import training.experimental.grids.tokens
from gristmill_parity.cases import Case
from gristmill_parity.comparison import Certifier
from gristmill_parity.feature_cases import feature_case
from tests.training.planted_faults import require_finite_difference
from training.distributed.rank_pool import RankPool
from training.experimental.grids.grid_modules import GridDropout
from training.experimental.parallel_config import ParallelConfig
from training.model.dropout import Dropout
from training.sharding.axis import Axis
from training.sharding.placement import Placement

Patch = pytest.MonkeyPatch
GRID = ParallelConfig(tp=4, tensor="2d")
LAYERS = ParallelConfig(tp=8, tensor="2.5d", depth=2)
CUBE = ParallelConfig(tp=8, tensor="3d")


@pytest.fixture(scope="module")
def certifier(rank_pool: RankPool) -> Certifier:
    return Certifier(rank_pool)


def case(preset: str, layout: ParallelConfig, **options: Any) -> Case:
    found = feature_case(preset, layout, **{"reference": "one process", **options})
    return replace(found, layers=max(2, found.layout.stages))


ZBV: dict[str, Any] = {"schedule": "zbv"} if torch.__version__ >= "2.13" else {}  # older ones refuse it

CASES = [  # beside those of the certificate
    case("llama", LAYERS, optimizer="adamw", z_loss=0.01),
    case("gpt2", GRID, recompute="full"),
    case("gpt2", LAYERS, documents=True),
    case("llama", replace(GRID, dp=2), optimizer="adamw"),
    case("gpt2", replace(GRID, dp=2, zero=1)),
    case("llama", replace(GRID, dp=2, zero=3)),
    case("gpt2", replace(GRID, pp=2)),
    case("llama", replace(GRID, pp=2, **ZBV), recompute="full"),
    case("llama", CUBE, optimizer="adamw"),
    case("llama", CUBE, documents=True, dropout=0.1),
    case("llama", replace(GRID, micro_batches=2), precision="bf16", reference="plain decoder"),
    case("gpt2", ParallelConfig(tp=9, tensor="2d"), heads=6, documents=True),
    case("llama", replace(LAYERS, tp=12, depth=3)),
]


@pytest.mark.every(5)
@pytest.mark.parametrize("chosen", CASES, ids=str)
def test_a_grid_agrees_with_one_process_and_with_theory(certifier: Certifier, chosen: Case) -> None:
    row = certifier.certify(chosen)
    assert row.passed, row.reason


# Planted faults: each function patches one thing, on every rank of a case


def wrong_root(patch: Patch) -> None:
    right = training.experimental.grids.summa.blocks_along

    def others_first(axis: Axis, own: Tensor) -> Iterator[Tensor]:
        return iter([*right(axis, own)][::-1] if axis.name == "column" else right(axis, own))

    patch.setattr(training.experimental.grids.summa, "blocks_along", others_first)


def not_transposed(patch: Patch) -> None:
    patch.setattr(training.experimental.grids.tokens, "exchange", lambda x, _grid: x)


def local_statistics(patch: Patch) -> None:
    patch.setattr(training.experimental.grids.norms, "mean_over", lambda x, _axis: x.mean(-1, keepdim=True))


def without_sums_along(patch: Patch, axis: str) -> None:
    table = training.experimental.grids.placements.grid_table()
    less = {
        name: replace(row, gradient_sum=tuple(other for other in row.gradient_sum if other != axis))
        for name, row in table.items()
    }
    patch.setattr(training.experimental.grids.placements, "grid_table", lambda: less)


def no_sum_over_layers(patch: Patch) -> None:
    without_sums_along(patch, "depth")


def no_sum_of_vectors_over_rows(patch: Patch) -> None:
    without_sums_along(patch, "row")


def transposed_blocks(patch: Patch) -> None:
    table = training.experimental.grids.placements.grid_table()

    def is_block(name: str) -> bool:  # of a vocabulary that divides unevenly they differ in shape
        return len(table[name].shard) == 2 and name.startswith(("attention", "mlp"))

    swapped = {
        name: Placement({"row": 0, "column": 1}, row.replicated, row.gradient_sum) if is_block(name) else row
        for name, row in table.items()
    }
    patch.setattr(training.experimental.grids.placements, "grid_table", lambda: swapped)


def every_column_drops_as_the_first(patch: Patch) -> None:
    patch.setattr(GridDropout, "index", Dropout.index)


def axes_not_exchanged(patch: Patch) -> None:
    patch.setattr(training.experimental.grids.cube.Turn, "back", property(lambda self: self))


def targets_of_other_sequences(patch: Patch) -> None:
    patch.setattr(training.experimental.grids.cube_modules, "exchange", lambda x, _grid: x)


def no_sum_over_the_layers_of_a_cube(patch: Patch) -> None:
    patch.setattr(
        training.experimental.grids.cube,
        "scatter_inputs",
        lambda grad, axis: grad.chunk(axis.size, 1)[axis.rank].contiguous(),
    )


FAULTS: list[tuple[Callable[[Patch], None], Case, str]] = [
    (wrong_root, case("llama", GRID), "loss"),
    (not_transposed, case("llama", GRID), "loss"),
    (transposed_blocks, case("llama", replace(GRID, micro_batches=1)), "loss"),
    (local_statistics, case("llama", GRID), "loss"),
    (local_statistics, case("gpt2", GRID), "loss"),
    (no_sum_over_layers, case("llama", LAYERS), "gradient"),
    (no_sum_of_vectors_over_rows, case("gpt2", GRID), "gradient"),
    (every_column_drops_as_the_first, case("gpt2", GRID), "loss"),
    (axes_not_exchanged, case("llama", CUBE), "loss"),
    (targets_of_other_sequences, case("llama", CUBE), "loss"),
    (no_sum_over_the_layers_of_a_cube, case("llama", CUBE), "gradient"),
    (local_statistics, case("llama", CUBE), "loss"),
]


@pytest.mark.every(4)
@pytest.mark.parametrize(("fault", "chosen", "seen_in"), FAULTS, ids=[f"{b[0].__name__}-{b[1]}" for b in FAULTS])
def test_a_planted_fault_turns_red_by_a_finite_difference(
    rank_pool: RankPool, fault: Callable[[Patch], None], chosen: Case, seen_in: str
) -> None:
    require_finite_difference(rank_pool, fault, chosen, seen_in)
