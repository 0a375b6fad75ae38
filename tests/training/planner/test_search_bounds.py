"""The search times a part of the layouts, and finds what timing all of them does."""

from dataclasses import replace

import pytest

from gristmill_planner.candidates import candidates, families
from gristmill_planner.fitted_constants import fitted_constants
from gristmill_planner.hardware import Cluster, find_device
from gristmill_planner.planned_run import MEGATRON, MEGATRON_DEEPSPEED, PlannedRun, PlanRequest
from gristmill_planner.run_memory import run_memory
from gristmill_planner.search import closest_to_fitting, least_time, search
from gristmill_planner.step_time import rank_times, step_time
from training.model.model_config import ModelConfig

WIDE = ModelConfig(preset="gpt2", layers=10, width=2048, heads=16).resolve(100_000, 1024)
LONG = ModelConfig(preset="llama", layers=8, width=512, heads=8).resolve(32_000, 8192)
REQUESTS = {
    "wide": PlanRequest(WIDE, 32, 1024, Cluster(find_device("a100-40gb"), 8)),
    "tight": PlanRequest(WIDE, 8, 1024, Cluster(replace(find_device("a100-40gb"), memory=7.5e9), 8)),
    "two nodes": PlanRequest(WIDE, 16, 1024, Cluster(find_device("h100"), 16)),
    "long": PlanRequest(LONG, 8, 8192, Cluster(find_device("a100-80gb"), 8)),
    "compiled": PlanRequest(WIDE, 8, 1024, Cluster(find_device("v100"), 4), compiled=True),
    "megatron": PlanRequest(WIDE, 32, 1024, Cluster(find_device("a100-40gb"), 16), software=MEGATRON),
    "deepspeed": PlanRequest(WIDE, 32, 1024, Cluster(find_device("a100-40gb"), 16), software=MEGATRON_DEEPSPEED),
}


def shape(run: PlannedRun) -> tuple[object, ...]:
    layout = run.layout
    return layout.dp, layout.tp, layout.tensor, layout.depth, layout.cp, layout.context, layout.pp, layout.schedule


def fastest(request: PlanRequest, wanted: int) -> list[float]:
    """Times of the fastest that fit, each of another shape, when all layouts are timed."""
    seconds = {run: step_time(run, fitted_constants()).total for run in candidates(request)}
    found: list[float] = []
    shapes = set()
    for run in sorted(seconds, key=seconds.__getitem__):
        if shape(run) in shapes or run_memory(run).total > request.cluster.device.memory:
            continue
        shapes.add(shape(run))
        found.append(seconds[run])
        if len(found) == wanted:
            break
    return found


@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
def test_the_search_finds_what_timing_all_layouts_finds(request_: PlanRequest) -> None:
    found = search(request_, fitted_constants(), 6)
    assert [choice.time.total for choice in found.choices] == pytest.approx(fastest(request_, 6), rel=1e-12)
    assert len({shape(choice.run) for choice in found.choices}) == len(found.choices) > 1
    assert found.considered == len(list(candidates(request_)))


@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
def test_no_layout_is_below_the_bounds_of_its_family(request_: PlanRequest) -> None:
    constants, ratios = fitted_constants(), []
    for family in families(request_):
        of_rank = rank_times(next(family.runs(request_, "1f1b", 1)), constants)
        bound = least_time(family, next(family.runs(request_, "1f1b", 1)), of_rank, constants)
        for schedule in family.schedules:
            runs = list(family.runs(request_, *schedule))
            totals = [step_time(run, constants).total for run in runs]
            assert totals == [step_time(run, constants, of_rank).total for run in runs]
            assert bound <= min(totals)
            ratios.append(bound / min(totals))
    assert max(ratios) > 0.9  # one that says nothing would pass all layouts on to be timed


def test_memory_is_computed_as_far_as_it_decides() -> None:
    """States alone refuse many layouts, and neither what fits nor the closest becomes another by that."""
    request, most, by_states = REQUESTS["tight"], 0, 0
    for run in candidates(request):
        full, decides = run_memory(run), run_memory(run, enough=7e9)
        assert (decides.total > 7e9) == (full.total > 7e9)
        assert decides.total == full.total or 7e9 < decides.total < full.total
        most, by_states = most + (full.total > 7e9), by_states + (decides.total < full.total)
    assert 0 < by_states < most
    small = replace(request, cluster=replace(request.cluster, device=replace(request.cluster.device, memory=1e9)))
    every = list(families(small))
    runs = [next(each.runs(small, *schedule)) for each in every for schedule in each.schedules]
    assert closest_to_fitting(small, every)[1] == min(run_memory(run).total for run in runs)
