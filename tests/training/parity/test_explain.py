"""Planted faults are located: the certificate's explanation names the tensor, the pattern and the axis."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

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
KNOWN_WRONG = (
    "axes_not_exchanged", "ends_not_summed", "local_statistics", "no_sum_over_the_layers_of_a_cube",
    "targets_of_other_sequences",
)  # fmt: skip
KNOWN_WRONG_IN_16_BITS = (
    "bias_in_the_weights", "counts_of_one_rank", "losses_counted_by_every_rank", "losses_left_out",
    "losses_scaled_by_micro_batches", "not_summed", "updates_not_published", "updates_used_before_they_arrive",
    "weights_not_normalised",
)  # fmt: skip


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


LOCATED = list(planted_faults())


@pytest.mark.every(26)
@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@pytest.mark.parametrize("planted", LOCATED, ids=[f"{fault.name} {fault.case}" for fault in LOCATED])
def test_a_planted_fault_is_located(explainer: Explainer, planted: Planted, precision: str) -> None:
    """Those that are not are in docs/reference/located-faults.md, and known here."""
    explainer.job = partial(record_with_fault, planted.fault)
    verdict = explainer.verdict(planted.in_precision(precision).case)
    is_hidden = precision == "bf16" and (planted.hidden_in_16_bits or planted.key in KNOWN_WRONG_IN_16_BITS)
    mistakes = planted.mistakes(verdict)
    if mistakes and (is_hidden or planted.key in KNOWN_WRONG):
        pytest.xfail(f"{', '.join(mistakes)}: {verdict}")
    assert not mistakes, str(verdict)


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
