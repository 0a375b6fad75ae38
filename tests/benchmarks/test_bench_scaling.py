"""Tests of the scaling model: requests of the stages grow no faster than the corpus, and the driver sends few."""

from collections.abc import Iterable

import pytest

from benchmarks.bench_scaling import Cost, exponent, run_stage
from benchmarks.scaling_stages import COMMANDS, FIRST_STAGE, RUN_STAGES, STAGES, corpus_names, make_corpus
from gristmill_cli.stages.pipeline import stages_in_run

SLICES = (20, 60)
_LINEAR = 1.05
_IN_STEPS = ("pass1", "pass2", "generate_duplicates_dict", "encode")  # small corpora are read by every part


@pytest.fixture(scope="module")
def costs() -> dict[str, list[Cost]]:
    """The costs of every stage, and of every command, over corpora of two sizes."""
    return measure_all([corpus_names(slices) for slices in SLICES], STAGES)


def measure_all(corpora: list[list[str]], stages: Iterable[str]) -> dict[str, list[Cost]]:
    """Return the costs of stages over several corpora."""
    found: dict[str, list[Cost]] = {stage: [] for stage in stages}
    for files in corpora:
        store = make_corpus(FIRST_STAGE, files)
        for stage in found:
            if stage in COMMANDS:
                store = make_corpus(stage, files)  # else each reads what those before it left
            found[stage].append(run_stage(stage, files, store))
    return found


def test_every_stage_of_a_run_is_measured() -> None:
    assert {stage.name for stage in stages_in_run({})} < RUN_STAGES.keys()


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage not in _IN_STEPS])
def test_costs_are_linear(costs: dict[str, list[Cost]], stage: str) -> None:
    for value in ("tasks", "requests", "pickled", "driver_requests"):
        assert exponent(costs[stage], value) <= _LINEAR, value


@pytest.mark.parametrize("stage", STAGES)
def test_driver_sends_few_requests(costs: dict[str, list[Cost]], stage: str) -> None:
    """A LIST for 1,000 objects, some for each step, and one for each bundle of 16 slices or more; none for a slice."""
    assert_few_requests(costs[stage])


def test_driver_sends_none_for_a_folder() -> None:
    """Many folders are listed at once: folders of the corpus are as many as its slices."""
    corpora = [[name.replace(".jsonl", "/a.jsonl") for name in corpus_names(slices)] for slices in (60, 180)]
    for costs in measure_all(corpora, RUN_STAGES).values():
        assert_few_requests(costs)


def assert_few_requests(costs: list[Cost]) -> None:
    small, large = costs
    more = large.slices - small.slices
    assert large.driver_requests - small.driver_requests < more / 8
    assert large.again_requests - small.again_requests < more / 8
