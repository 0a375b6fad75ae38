"""Planted faults are located: the certificate's explanation names the tensor, the pattern and the axis."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gristmill_parity.explain import Explainer, explain_rows, why_not
from gristmill_parity.feature_cases import feature_case
from gristmill_parity.recorded_case import record_case
from gristmill_parity.recording.perturb import Perturb
from gristmill_parity.runs.run_case import trainer_runs
from tests.training.parity import test_certificate as certificate
from tests.training.parity.located_faults import Planted, planted_faults
from tests.training.parity.test_certificate import case
from tests.training.planted_faults import Fault
from training.distributed.rank_pool import RankPool
from training.experimental.parallel_config import ParallelConfig

TP = case("llama", tp=2)
KNOWN_WRONG = {
    "ends_not_summed": "zbv",  # both ends are on one rank, which records their sum alone
    "no_sum_over_the_layers_of_a_cube": "3d",  # the other ranks' terms are lost before they can be recorded
}
"""Faults that are located with another pattern, by words of their layout."""


@pytest.fixture(scope="module")
def explainer(rank_pool: RankPool) -> Iterator[Explainer]:
    explainer = Explainer(rank_pool)
    yield explainer
    explainer.close()


def record_with_fault(fault: Fault, chosen: object, folder: Path, perturb: Perturb | None = None) -> None:
    """What a rank does: run the case with the fault, recorded."""
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        record_case(chosen, folder, perturb)  # type: ignore[arg-type]


def test_a_fault_is_named_and_a_right_layout_is_not(rank_pool: RankPool) -> None:
    explainer = Explainer(rank_pool)
    assert explainer.explain(TP).startswith("No difference: ")
    explainer.job = partial(record_with_fault, certificate.no_sum_of_outputs)
    text = explainer.explain(TP)
    assert text.startswith("The first wrong tensor is embed.tokens output in step 1: it differs by ")
    assert "it was not summed over tp. The all-reduce after the row-parallel product, or the lookup" in text
    explainer.close()


def planted_cases() -> Iterator[Any]:
    """Yield each planted fault in each precision; those that are known to be named wrongly have to be."""
    for planted in planted_faults():
        is_wrong = KNOWN_WRONG.get(planted.key, "not one") in str(planted.case)
        marks = [pytest.mark.xfail(strict=True)] * is_wrong
        for precision in ("fp64", "bf16"):
            yield pytest.param(
                planted.in_precision(precision), marks=marks, id=f"{planted.name} {planted.case} {precision}"
            )


@pytest.mark.every(26)
@pytest.mark.parametrize("planted", list(planted_cases()))
def test_a_planted_fault_is_located(explainer: Explainer, planted: Planted) -> None:
    """Those that are not are in docs/reference/located-faults.md, too."""
    explainer.job = partial(record_with_fault, planted.fault)
    verdict = explainer.verdict(planted.case)
    is_hidden = planted.case.precision == "bf16" and planted.hidden_in_16_bits
    if not (is_hidden and verdict.is_clean):
        assert not planted.mistakes(verdict), str(verdict)


def test_what_cannot_be_located_is_said(rank_pool: RankPool) -> None:
    def failing(*_: object) -> None:
        raise AssertionError("never called")

    explainer = Explainer(rank_pool, failing)
    local = feature_case("llama", ParallelConfig(dp=2, local_steps=2), optimizer="adamw")
    assert explainer.explain(local).startswith("Not located: replicas have weights or sums of their own")
    assert "call no hooks" in why_not(feature_case("llama", ParallelConfig(), compiled=True))
    explainer.close()


def test_rows_are_explained_in_their_own_ranks() -> None:
    run = next(run for run in trainer_runs(False)[0] if run.processes == 2)
    texts = [text for _, text in explain_rows([case("llama", dp=2), run], "cpu")]
    assert texts[0].startswith("No difference: ") and texts[0].endswith("of its tolerance.")
    assert texts[1].startswith("No difference: ") and texts[1].endswith("data, checkpoints and evaluations.")
