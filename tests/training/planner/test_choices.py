"""Which layouts a plan shows: the simplest as fast as any, then other kinds; and rows that a user has measured."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from gristmill.errors import UsageError
from gristmill_planner.fitted_constants import fitted_constants
from gristmill_planner.hardware import DEVICES, Cluster, find_device
from gristmill_planner.plan import plan
from gristmill_planner.plan_config import preset_request
from gristmill_planner.plan_report import trust
from gristmill_planner.planned_run import GRISTMILL
from gristmill_planner.published_runs import torchtitan_runs
from gristmill_planner.search import TIE, choose_layouts, complexity, describe_choice, kind_of, layouts_by_time
from gristmill_planner.step_time import step_time

CONSTANTS = fitted_constants()


def printed(result: object) -> str:
    console = Console(width=500, record=True, file=io.StringIO())
    console.print(result)
    return console.export_text()


@pytest.mark.parametrize(
    ("preset", "gpus", "gpu"), [("llama-3.1-8b", 64, "h100"), ("llama-3.2-1b", 8, "h200"), ("mixtral-8x7b", 64, "h100")]
)
def test_the_simplest_of_the_fastest_comes_first_and_the_others_are_of_other_kinds(
    preset: str, gpus: int, gpu: str
) -> None:
    request = replace(preset_request(preset, Cluster(find_device(gpu), gpus)), headroom=0.08)
    chosen = choose_layouts(request, CONSTANTS, 5)
    first = chosen.shown[0]
    tied = []
    for layout in layouts_by_time(request, CONSTANTS)[1]:
        if layout.time.total > (1 + TIE) * chosen.fastest.time.total:
            break
        tied.append(layout)
    assert tied[0].run == chosen.fastest.run
    assert complexity(first.run) == min(complexity(layout.run) for layout in tied)
    kinds = [kind_of(layout.run.layout) for layout in chosen.shown]
    assert len(set(kinds)) == len(kinds) > 1
    times = [layout.time.total for layout in chosen.shown[1:]]
    assert times == sorted(times)
    longer = first.time.total / chosen.fastest.time.total
    assert (describe_choice(chosen) == "") == (longer == 1.0 and first.run == chosen.fastest.run)


def test_torchtitan_s_rows_are_as_far_as_the_page_says() -> None:
    found = []
    for row in torchtitan_runs():
        assert row.measured is not None
        found.append(100 * (step_time(row.run, CONSTANTS).total / row.measured - 1))
    assert found == pytest.approx([-11.5, -4.9, -4.7, 3.6], abs=0.05)
    eager, compiled = (step_time(row.run, CONSTANTS) for row in torchtitan_runs()[:2])
    assert 0.9 < compiled.total / eager.total < 0.95 and compiled.data == eager.data
    assert printed(plan(validate=True)).count("cards limited to 500 W") == 4


def test_every_device_of_nvidia_says_its_power_and_b200_is_one() -> None:
    assert {device.name for device in DEVICES.values() if not device.watts} == {"ascend-910"}
    b200 = find_device("b200")
    assert (b200.flops, b200.bandwidth, b200.watts) == (2.25e15, 8e12, 1000) and "data sheet" in b200.source
    assert "with 1000 W a card: cards that are limited to less are slower" in trust(b200, "b200", GRISTMILL)


CONFIG = """
compile = {compile}
[model]
preset = "llama-3.2-1b"
[data]
seq_len = 2048
batch_size = 64
[parallel]
zero = 1
"""


def test_rows_of_the_user_s_are_compared(tmp_path: Path) -> None:
    for name in ("false", "true"):
        (tmp_path / f"compile-{name}.toml").write_text(CONFIG.format(compile=name))
    rows = tmp_path / "rows.csv"
    rows.write_text("config,gpus,gpu,seconds\ncompile-false.toml,8,h100,1.0\ncompile-true.toml,8,h100,1\n")
    text = printed(plan(validate=True, rows=rows))
    planned = [float(line.split()[-3]) for line in text.splitlines()[1:3]]
    assert 0 < planned[1] < planned[0] and "dp 8 x ZeRO-1, compiled" in text
    rows.write_text(f"config,gpus,gpu,seconds\ncompile-false.toml,8,h100,{2 * planned[0]}\n")
    assert "1 row: mean absolute error 50." in printed(plan(validate=True, rows=rows))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("config,gpus,gpu\n", r"rows.csv:1: there is no column seconds; expected config,gpus,gpu,seconds"),
        ("config,gpus,gpu,seconds,hours\n", r"rows.csv:1: unknown column hours; "),
        ("config,gpus,gpu,seconds\n", r"rows.csv has no rows"),
        ("config,gpus,gpu,seconds\na.toml,8,h100,soon\n", r"rows.csv:2: .*a.toml"),
        ("config,gpus,gpu,seconds\nb.toml,8,h100,soon\n", r"rows.csv:2: seconds is 'soon'; expected a number above 0"),
        ("config,gpus,gpu,seconds\nb.toml,8,h10,1\n", r"rows.csv:2: gpu 'h10' is not in the planner's table; did you"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "b.toml").write_text(CONFIG.format(compile="false"))
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(UsageError, match=said) as refused:
        plan(validate=True, rows=tmp_path / "rows.csv")
    assert "\n" not in str(refused.value)
