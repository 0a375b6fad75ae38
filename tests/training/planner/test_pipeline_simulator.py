"""The pipeline simulator agrees with theory where theory is exact, and its timelines obey the pipeline's order."""

from itertools import pairwise
from typing import get_args

import pytest

from gristmill_planner.pipeline_simulator import PassCosts, Timeline, pipeline_layout, rank_costs, simulate
from training.parallel.pipeline.schedules import Schedule

EQUAL = PassCosts(1.0, 1.0, 1.0)


def timeline(schedule: Schedule, ranks: int, count: int, virtual: int = 2, costs: PassCosts = EQUAL) -> Timeline:
    layout = pipeline_layout(schedule, ranks, count, virtual)
    return simulate(layout, rank_costs(layout, costs))


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_bubble_ratio_of_plain_schedules(schedule: Schedule, ranks: int) -> None:
    for count in (ranks, 2 * ranks + 1, 6 * ranks):  # Narayanan et al. 2021, section 2.2.1: (p - 1) / m
        assert timeline(schedule, ranks, count).bubble_ratio == pytest.approx((ranks - 1) / count, abs=1e-12)


@pytest.mark.parametrize("virtual", [2, 3])
@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "looped-bfs"])
def test_interleaving_divides_the_bubble(schedule: Schedule, virtual: int) -> None:
    for ranks, count in ((2, 4), (4, 8), (4, 16)):
        found = timeline(schedule, ranks, count, virtual).bubble_ratio
        assert found == pytest.approx((ranks - 1) / count / virtual, abs=1e-12)


def test_split_backward_passes_fill_a_part_of_the_bubble() -> None:
    for schedule in ("zero-bubble", "zbv", "dualpipev"):  # (p - 1)(f + i - w) / v
        assert timeline(schedule, 4, 16).seconds == pytest.approx(16 * 3 + 3 * 1 / 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", get_args(Schedule))
def test_every_pass_once_after_what_it_needs(schedule: Schedule) -> None:
    found = timeline(schedule, 3, 9, costs=PassCosts(1.0, 1.3, 0.6, send=0.25))
    ends = {(p.kind, p.stage, p.micro_batch): p.end for passes in found.ranks for p in passes}
    assert len(ends) == sum(map(len, found.ranks))
    for passes in found.ranks:
        assert all(before.end <= after.start for before, after in pairwise(passes))
        for each in passes:
            if each.kind == "F" and each.stage > 0:
                assert ends["F", each.stage - 1, each.micro_batch] <= each.start
            if each.kind == "W" and each.stage > 0:
                assert ends["I", each.stage, each.micro_batch] <= each.start


def test_peak_in_flight() -> None:
    def peaks(schedule: Schedule) -> list[int]:
        return [timeline(schedule, 4, 8).peak_in_flight(rank) for rank in range(4)]

    assert peaks("gpipe") == [8] * 4
    assert peaks("1f1b") == [4, 3, 2, 1]
    assert peaks("interleaved-1f1b")[0] == 4 * 2 + 4 - 1  # Korthikanti et al. 2022: 1 + (p - 1) / p v of p v stages
    assert peaks("looped-bfs") == [16] * 4
    assert peaks("dualpipev") == [2 * 4 + 1] * 4  # DeepSeek-AI 2024, table 2: one more than stages
