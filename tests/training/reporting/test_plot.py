import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from gristmill.errors import InputError, UsageError
from training.reporting.metrics_file import METRICS
from training.reporting.plot import (
    draw_figure,
    draw_panels,
    plot,
    read_curves,
    read_panels,
    render_images,
    terminal_plot,
)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    records = [{"kind": "run", "step": 0, "unigram_loss": 5.5}]
    records += [{"kind": "step", "step": i, "loss": 8 - i / 10} for i in range(1, 41)]
    records += [{"kind": "step", "step": 41, "loss": None, "skipped": True}]
    records += [{"kind": "eval", "step": i, "loss": 8.2 - i / 10} for i in (20, 40)]
    (tmp_path / METRICS).write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


def test_curves_are_drawn_in_the_terminal_and_as_images(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = plot(run_dir)
    said = capsys.readouterr().out
    assert said.strip() == terminal_plot(read_curves(run_dir)).strip()
    assert "7.90" in said and "train 4.000   o holdout 4.200   - unigram 5.500" in said
    svg = ElementTree.parse(path).getroot()
    texts = {"".join(text.itertext()).strip() for text in svg.iter("{http://www.w3.org/2000/svg}text")}
    assert {"step", "loss (nats/token)", "train 4.000", "holdout 4.200", "unigram 5.500"} <= texts
    assert (run_dir / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_figure_holds_every_point(run_dir: Path) -> None:
    (axes,) = draw_figure(read_curves(run_dir), "Loss").axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert lines["train 4.000"] == [[i, 8 - i / 10] for i in range(1, 41)]  # the skipped step has no loss
    assert lines["holdout 4.200"] == [[i, 8.2 - i / 10] for i in (20, 40)]
    assert lines["unigram 5.500"] == [[1, 5.5], [40, 5.5]]


def test_the_same_run_gives_the_same_bytes(run_dir: Path) -> None:
    plot(run_dir)
    first = {name: (run_dir / name).read_bytes() for name in ("loss.svg", "loss.png", "run.svg", "run.png")}
    command = [sys.executable, "-m", "gristmill_cli", "plot", str(run_dir)]
    subprocess.run(command, check=True, capture_output=True)
    assert first == {name: (run_dir / name).read_bytes() for name in first}
    assert b"dc:date" not in first["loss.svg"]


def test_panels_hold_every_finite_point_of_each_source_and_holdout() -> None:
    records: list[dict[str, Any]] = [
        {"kind": "step", "step": 1, "loss": 3.0, "lr": 1e-3, "grad_norm": None, "memory_bytes": 2**31, "mfu": None},
        {"kind": "step", "step": 2, "loss": None, "lr": 2e-3, "tokens_per_second": 5.0},
        {"kind": "eval", "step": 2, "loss": 2.5, "sources": {"web": {"loss": 2.0}, "code": {"loss": None}, "bad": 3},
         "tasks": {"quiz": {"bits_per_byte": 1.5, "acc": 0.25}, "whole": {"bits_per_byte": 2.0, "acc": None},
                   "seconds": 3.0},
         "holdouts": {"late": {"loss": 4.0, "sources": {"$web$": {"loss": 4.5}}}, "harmed": []}},
    ]  # fmt: skip
    panels = read_panels(records)
    assert panels == {
        "loss (nats/token)": {"train": [(1, 3.0)], "holdout": [(2, 2.5)]},
        "holdout loss by source (nats/token)": {"web": [(2, 2.0)], "late": [(2, 4.0)], "late: $web$": [(2, 4.5)]},
        "answers of tasks (bits per byte)": {"quiz": [(2, 1.5)], "whole": [(2, 2.0)]},
        "accuracy in tasks": {"quiz": [(2, 0.25)]},
        "learning rate": {"": [(1, 1e-3), (2, 2e-3)]},
        "tokens/s": {"": [(2, 5.0)]},
        "peak memory of a rank (GiB)": {"": [(1, 2.0)]},
    }
    figure = draw_panels(panels, "a run")
    assert [axes.get_title() for axes in figure.axes] == list(panels)
    assert [line.get_label() for line in figure.axes[1].lines] == ["web", "late", "late: $web$"]
    assert b"late: $web$" in render_images(figure, "run")["run.svg"]


@pytest.mark.parametrize("name", [r"a$\frac$", "日本"])
def test_a_folder_s_name_is_no_formula(run_dir: Path, name: str) -> None:
    folder = run_dir / name
    folder.mkdir()
    (folder / METRICS).write_bytes((run_dir / METRICS).read_bytes())
    assert f"Loss of {name}" in plot(folder).read_text(encoding="utf-8")


def test_without_matplotlib_the_error_says_what_to_install(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs matplotlib.*pip install 'gristmill\[train\]'"):
        plot(run_dir)


def test_matplotlib_is_imported_only_to_draw() -> None:
    code = "import sys, training.reporting.plot; sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_falling_curve_runs_from_the_upper_left_to_the_lower_right(run_dir: Path) -> None:
    rows = [line.partition("│")[2] for line in terminal_plot(read_curves(run_dir)).splitlines() if "│" in line]
    assert rows[0].lstrip()[0] == "·" and rows[0].startswith("·") and rows[-1].rstrip().endswith("·")
    assert sum("-" * 30 in row for row in rows) == 1


DAMAGED = [
    "nonsense", "[]", "3", "null", '"text"', "{}", "", '{"kind": "step", "loss": 3.0}', '{"step": 3, "loss": 3.0}',
    '{"kind": "step", "step": "3", "loss": 3.0}', '{"kind": []}', '{"kind": "step", "step": true, "loss": 1}',
    '{"kind": "step", "step": NaN, "loss": 3.0}', '{"kind": "step", "step": -1, "loss": 3.0}',
    '{"kind": "step", "step": 1%s, "loss": 3.0}' % ("0" * 400), '{"kind": "step", "step"', "\xff\xfe", "[" * 100_000,
]  # fmt: skip
LOSSES = ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400, '"3.0"', "[3.0]", "null", "true", "{}"]


def test_damaged_lines_are_left_out_with_a_note(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, path = read_curves(run_dir), run_dir / METRICS
    lines = [f'{{"kind": "{kind}", "step": 9, "{key}": {loss}}}' for loss in LOSSES
             for kind, key in (("step", "loss"), ("eval", "loss"), ("run", "unigram_loss"))]  # fmt: skip
    harm = "".join(
        f"{line}\n" for line in [*DAMAGED, *lines, '{"kind": "step", "step": 9}', '{"kind": "eval", "step": 9}']
    )
    path.write_bytes(path.read_bytes() + harm.encode("latin-1") + b'{"kind": "step", "st')
    assert read_curves(run_dir) == whole
    assert capsys.readouterr().err == f"note: {len(DAMAGED)} damaged lines of {path} left out\n"
    assert plot(run_dir).is_file()


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / METRICS).mkdir()
    with pytest.raises(InputError, match=r"cannot read .*metrics.jsonl: Is a directory"):
        plot(tmp_path)


def test_one_step_can_be_drawn_and_none_cannot(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text('{"kind": "step", "step": 1, "loss": 3.0}\n')
    assert plot(tmp_path).is_file()
    with pytest.raises(UsageError, match="--out_dir of a training run"):
        plot(tmp_path / "nothing")
