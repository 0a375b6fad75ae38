"""Faults of documents that do not see each other turn the certificate's rows red."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from gristmill_parity.cases import Case
from gristmill_parity.comparison import Certifier, limits
from gristmill_parity.feature_cases import feature_case
from gristmill_parity.worker import RankResult, run_case
from training.distributed.rank_pool import RankPool
from training.experimental.parallel_config import ParallelConfig
from training.model.documents import Documents
from training.parallel.pipeline.pipeline_parallel import Pipeline
from training.parallel.tensor.tensor_parallel import _ShardedPositions

Patch = pytest.MonkeyPatch
ONE = ParallelConfig()


def found_otherwise(change: Callable[[Documents], Documents]) -> Callable[[Patch], None]:
    """A fault: other documents than those of the positions."""

    def plant(patch: Patch) -> None:
        right = Documents.of
        patch.setattr(Documents, "of", lambda positions: change(right(positions)))

    return plant


def _shifted(documents: Documents) -> Documents:
    assert documents.bounds is not None
    bounds = documents.bounds.clone()
    bounds[1:-1] += 1
    return documents._replace(bounds=bounds)


def _not_restarted(documents: Documents) -> Documents:
    return documents._replace(positions=torch.arange(documents.positions.shape[1]).expand_as(documents.positions))


mask_shifted_by_one = found_otherwise(_shifted)
positions_not_restarted = found_otherwise(_not_restarted)


def dense_mask_shifted_by_one(patch: Patch) -> None:
    """A token sees the last one of the document before, too: with fewer than itself it would see none, and be nan."""
    right = Documents.same
    patch.setattr(Documents, "same", lambda self: right(self) | right(self).roll(-1, -1))


def later_stages_get_none(patch: Patch) -> None:
    right = Pipeline.forward_backward

    def forgetting(self: Pipeline, batch: object, scale: float) -> Tensor:
        if 0 not in self.stages:
            object.__setattr__(batch, "positions", None)
        return right(self, batch, scale)  # type: ignore[arg-type]

    patch.setattr(Pipeline, "forward_backward", forgetting)


def every_rank_takes_the_first_positions(patch: Patch) -> None:
    patch.setattr(_ShardedPositions, "positions", lambda self, x: torch.arange(x.shape[1]))


def compared(preset: str, reference: str = "plain decoder", dropout: float = 0.0, **layout: object) -> Case:
    chosen = ParallelConfig(**layout)  # type: ignore[arg-type]
    return feature_case(preset, chosen, documents=True, dropout=dropout, reference=reference)  # type: ignore[arg-type]


FAULTS: dict[str, tuple[Callable[[Patch], None], Case, str]] = {
    "mask shifted by one": (mask_shifted_by_one, compared("llama"), "loss"),
    "mask shifted by one beside GPT-2": (mask_shifted_by_one, compared("gpt2", "transformers"), "loss"),
    # of learned ones: rotary positions enter as differences within a document, which are the same
    "positions not restarted": (positions_not_restarted, compared("gpt2"), "loss"),
    "dense mask shifted by one": (dense_mask_shifted_by_one, compared("gpt2", "one process", 0.1, dp=2), "loss"),
    "later stages get none": (later_stages_get_none, compared("llama", "one process", pp=2), "loss"),
    "shards of the sequence take its first positions": (
        every_rank_takes_the_first_positions, compared("gpt2", "one process", tp=2, sequence_parallel=True), "loss",
    ),
}  # fmt: skip


def run_with_fault(name: str, chosen: Case) -> RankResult:
    with pytest.MonkeyPatch.context() as patch:
        FAULTS[name][0](patch)
        return run_case(chosen)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_turns_red_by_a_finite_difference(rank_pool: RankPool, name: str) -> None:
    _, chosen, seen_in = FAULTS[name]
    row = Certifier(rank_pool, partial(run_with_fault, name)).certify(chosen)
    assert not row.error, row.error
    assert not row.passed and limits(chosen)[seen_in] < row.differences[seen_in] < float("inf"), row.reason
