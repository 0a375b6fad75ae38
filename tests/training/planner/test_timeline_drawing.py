"""Pipeline timelines are drawn into files and for terminals."""

from pathlib import Path

import pytest

from gristmill.errors import OutputError, UsageError
from gristmill_planner.pipeline_simulator import PassCosts, Timeline, pipeline_layout, rank_costs, simulate
from gristmill_planner.timeline import describe, draw_timelines, timeline_text


def timeline() -> Timeline:
    layout = pipeline_layout("1f1b", 2, 3)
    return simulate(layout, rank_costs(layout, PassCosts()))


def test_on_a_terminal() -> None:
    lines = timeline_text(timeline(), 25).plain.splitlines()
    assert lines[0] == describe(timeline())
    assert "bubble ratio 0.333; activations of 2, 1 micro-batches" in lines[0]
    assert lines[1] == "  0 F1F2····B1  F3B2  ··B3  "
    assert lines[2] == "  1 ··F1B1  F2B2  F3B3  "


def test_into_a_file(tmp_path: Path) -> None:
    draw_timelines([timeline()], tmp_path / "timeline.svg")
    assert "<svg" in (tmp_path / "timeline.svg").read_text(encoding="utf-8")


def test_bad_names(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"ends in \.svg, \.png, \.pdf"):
        draw_timelines([timeline()], tmp_path / "timeline.txt")
    with pytest.raises(OutputError):
        draw_timelines([timeline()], tmp_path / "missing" / "timeline.svg")
