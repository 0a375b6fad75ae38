import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from gristmill.errors import UsageError
from training.reporting.metrics import METRICS
from training.reporting.plot import drawing, plot, read_curves


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    records = [{"kind": "run", "step": 0, "unigram_loss": 5.5}]
    records += [{"kind": "step", "step": i, "loss": 8 - i / 10} for i in range(1, 41)]
    records += [{"kind": "eval", "step": i, "loss": 8.2 - i / 10} for i in (20, 40)]
    (tmp_path / METRICS).write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


def test_curves_are_drawn_in_the_terminal_and_as_svg(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = plot(run_dir)
    said = capsys.readouterr().out
    assert said.strip() == drawing(read_curves(run_dir)).strip()
    assert "7.90" in said and "train 4.000   o holdout 4.200   - unigram 5.500" in said
    root = ElementTree.parse(path).getroot()
    lines = [line.attrib["points"].split() for line in root.iter("{http://www.w3.org/2000/svg}polyline")]
    assert [len(points) for points in lines] == [40, 2, 2]
    heights = [float(point.split(",")[1]) for point in lines[0]]
    assert heights == sorted(heights)  # a falling loss falls


def test_a_falling_curve_runs_from_the_upper_left_to_the_lower_right(run_dir: Path) -> None:
    rows = [line.partition("│")[2] for line in drawing(read_curves(run_dir)).splitlines() if "│" in line]
    assert rows[0].lstrip()[0] == "·" and rows[0].startswith("·") and rows[-1].rstrip().endswith("·")
    assert sum("-" * 30 in row for row in rows) == 1


def test_one_step_can_be_drawn_and_none_cannot(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text('{"kind": "step", "step": 1, "loss": 3.0}\n')
    assert plot(tmp_path).is_file()
    with pytest.raises(UsageError, match="--out_dir of a training run"):
        plot(tmp_path / "nothing")
