"""score_planner fits measured steps, and predicts rows that it was not fitted to; on made rows with known constants."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from gristmill.errors import InputError
from gristmill_planner.fitted_constants import Constants
from gristmill_planner.step_time import step_time
from scripts.planner_noise import curve_deviations, perfect_correlation, rank_correlation
from scripts.planner_rows import MULTI_NODE, SINGLE_NODE, read_rows
from scripts.score_planner import (
    constant_efficiency,
    fit,
    mean_error,
    predict_held_out,
    predictions,
    print_bound,
)

HEADER = [
    "# GPUs", "global batch", "micro batch", "hidden size", "attention heads", "# layers", "sequence length",
    "tensor parallelism", "data parallelism", "pipeline parallelism", "iteration time (ms)",
]  # fmt: skip
BLOOM_HEADER = "line,section,gpus,size,hidden_ctx,layers_ctx,heads,dp,tp,pp,mbs,gbs,mem,sec_it,tflops,zero"
BLOOM_ROWS = [
    "1,Rebalancing layers,384,176B,14336,70,112,8,4,12,2,2048,59GB,104.50,150.05,",
    "2,GBS Variations,384,181B,14336,72,,32,2,6,2,2048,OOM,,,",
    "3,Best TFLOPs,80,200B,14400,80,,1,8,10,1,,73GB,,98.87,",
    "4,48 node contenders,8,18B,14336,6,,,8,1,2,2048,54GB,119.19,157.02,",
]
LAYOUTS = [(1, 8, 1, 4), (2, 4, 1, 4), (8, 1, 1, 8), (1, 2, 4, 2), (2, 2, 2, 1), (4, 1, 2, 2), (1, 4, 2, 1)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Rows whose times are the model's own, on a machine a little slower than the typical one."""
    for name, width in ((MULTI_NODE, 4096), (SINGLE_NODE, 1024)):
        rows = [[8, 64, micro, width, 16, 8, 1024, tp, dp, pp, 1] for tp, dp, pp, micro in LAYOUTS]
        _write(tmp_path / name, rows)
    (tmp_path / "bloom_384_a100_sweep.csv").write_text("\n".join([BLOOM_HEADER, *BLOOM_ROWS]) + "\n")
    slower = replace(Constants(), product_share=0.7, launch=1.2e-3)
    seconds = [step_time(row.run, slower).total for row in read_rows(tmp_path)]
    for at, (name, width) in enumerate(((MULTI_NODE, 4096), (SINGLE_NODE, 1024))):
        times = seconds[at * len(LAYOUTS) :]
        pairs = zip(LAYOUTS, times, strict=False)
        _write(
            tmp_path / name,
            [[8, 64, micro, width, 16, 8, 1024, tp, dp, pp, 1e3 * t] for (tp, dp, pp, micro), t in pairs],
        )
    return tmp_path


def _write(path: Path, rows: list[list[float]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([HEADER, *rows])


def test_rows_are_read(folder: Path) -> None:
    rows = [row for row in read_rows(folder) if row.file.startswith("bloom")]
    assert [row.memory for row in rows] == [59.0, float("inf"), 73.0]  # the row without a layout is left out
    assert rows[0].run.layers == (5, *[6] * 10, 5)
    assert [row.seconds for row in rows] == [104.5, None, None]


def test_constants_are_recovered(folder: Path) -> None:
    rows = [row for row in read_rows(folder) if not row.file.startswith("bloom")]
    found = predictions(rows, fit(rows))
    assert mean_error(rows, found) < 3 < mean_error(rows, constant_efficiency(rows))
    rank, models = rank_correlation(rows, found)
    assert rank > 0.97
    assert models == 2


def test_held_out_rows_are_not_fitted_to(folder: Path) -> None:
    rows = [row for row in read_rows(folder) if row.file == SINGLE_NODE][:4]
    wrong = replace(rows[0], seconds=100 * (rows[0].seconds or 0.0))
    rows = [wrong, *rows[1:]]
    found = predict_held_out(rows, lambda row: row is wrong)
    assert found[id(wrong)] < wrong.seconds / 20  # type: ignore[operator]


def test_an_oracle_for_all_rows_but_a_far_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row for row in read_rows(folder) if row.seconds]
    predicted = {id(row): 1.05 * (row.seconds or 0.0) for row in rows}
    predicted[id(rows[0])] *= 100  # by far the slowest
    print_bound(rows, predicted)
    printed = capsys.readouterr().out
    assert f"{MULTI_NODE}: 1 rows are more than 10 % away" in printed
    assert f"{SINGLE_NODE}: 0 rows are more than 10 % away; an oracle for all others has Spearman 1.000" in printed


def test_noise_is_what_no_curve_of_the_micro_batch_explains(folder: Path) -> None:
    row = next(row for row in read_rows(folder) if row.seconds)

    def measured(*seconds: float) -> list[float]:
        rows = [
            replace(
                row, run=replace(row.run, batch=micro * row.run.layout.dp * row.run.layout.micro_batches), seconds=s
            )
            for micro, s in zip((2, 3, 6, 12), seconds, strict=True)
        ]
        (found,) = curve_deviations(rows).values()
        return found

    assert measured(*(10 + 0.5 * m + 8 / m for m in (2, 3, 6, 12))) == pytest.approx([0.0] * 4, abs=1e-9)
    assert measured(16.07, 17.61, 16.09, 20.61)[1] > 0.05  # neither falls and then rises, nor the other way round


def test_a_perfect_model_ranks_noise_wrongly(folder: Path) -> None:
    rows = [row for row in read_rows(folder) if row.file == MULTI_NODE]
    true = {id(row): row.seconds or 0.0 for row in rows}
    none, some, much = (perfect_correlation(rows, true, [-noise, 0.0, noise], 50) for noise in (0.0, 0.1, 0.5))
    assert none == pytest.approx(1.0)
    assert none > some > much


def test_bad_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist; expected a folder with"):
        read_rows(tmp_path)
    _write(tmp_path / MULTI_NODE, [["8", "x"]])
    with pytest.raises(InputError, match="line 2"):
        read_rows(tmp_path)
