"""The parity certificate's command line and reports; test_certificate.py tests its results."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gristmill.console import wide_console
from gristmill.errors import UsageError
from gristmill_parity.cases import covering_cases
from gristmill_parity.certificate import as_json, as_markdown, plan_certificate, report, run_cases, summary
from gristmill_parity.comparison import CaseResult
from gristmill_parity.feature_cases import feature_cases
from gristmill_parity.parity import parity
from training.parallel.traffic_inputs import Volume

EQUAL = dict.fromkeys(("loss", "gradient", "weight"), 0.0)


def test_reports_hold_every_row_and_every_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    plan = replace(plan_certificate(False, 8), skipped=["no compiler"])
    cases = [case for case in plan.cases if case.reference == "one process"]
    rows = [CaseResult(c, 1.0, EQUAL, counted={("tp", "send"): Volume(2, 2048)}) for c in cases[:2]]
    rows.append(CaseResult(cases[2], 1.0, error="rank 0: died [/pair.cc:553]"))
    text = as_markdown(rows, plan, 3.0)
    assert text.startswith("3 rows, 2 green, 1 red, in 3 s\n")
    assert text.count("| green |") == 2 and text.count("**red**") == 1 and "tp send 2 / 2 KiB" in text
    assert all(reason in text for reason in plan.refused.values()) and "Skipped: no compiler." in text
    record = json.loads(json.dumps(as_json(rows, plan)))
    assert len(record["rows"]) == 3 and len(record["refused"]) == len(plan.refused)
    assert (
        record["rows"][0]["layout"]["dp"] == cases[0].layout.dp
        and record["rows"][2]["wrong"] == "rank 0: died [/pair.cc:553]"
    )
    wide_console().print(report(rows, plan, 3.0))
    shown = capsys.readouterr().out
    assert "skipped: no compiler" in shown
    assert f"red: {cases[2]}: rank 0: died [/pair.cc:553]" in shown and "3 rows, 2 green, 1 red, in 3 s" in shown


def test_the_command_line(tmp_path: Path) -> None:
    name = "llama dp1 tp1 pp1 fp32"  # of a row beside the plain decoder, and of one beside one process
    run = [sys.executable, "-m", "gristmill_cli", "parity", "--only", name, "--out", tmp_path / "c.md"]
    done = subprocess.run(run, capture_output=True, text=True, env={**os.environ, "GRISTMILL_LOG_SECONDS": "0.2"})
    assert done.returncode == 0, done.stderr
    assert "parity: 0 of 2 rows\n" in done.stderr  # a line now and then, as this is no terminal
    assert "2 rows, 2 green, 0 red" in done.stdout and name in done.stdout and "refused" not in done.stdout
    assert "**red**" not in (tmp_path / "c.md").read_text()


def test_wrong_options_are_told() -> None:
    with pytest.raises(UsageError, match=r"expected a file that ends in .md or .json"):
        parity(out=Path("c.pdf"))
    with pytest.raises(UsageError, match=r"--only is 'alpaca', which no row's name has; one is '.* fp32'"):
        parity(only="alpaca")


@pytest.mark.thorough
def test_small_cases_run_beside_large_ones_and_rows_keep_the_order_of_cases() -> None:
    by_size = {case.processes: case for case in covering_cases()}
    cases = [by_size[3], by_size[2], by_size[1]]
    rows = run_cases(cases, "cpu")
    assert [row.case for row in rows] == cases and all(row.passed for row in rows)
    assert run_cases(cases, "cpu", seconds=-1.0) == []


def test_a_difference_that_is_not_a_number_is_red() -> None:
    first, second = covering_cases()[:2]
    row = CaseResult(first, 1.0, {**EQUAL, "gradient": float("nan")})
    assert not row.passed and "gradient differ by nan" in row.reason
    assert f"worst in fp64 against one process: nan, nan% of its limit, {first}" in summary(
        [row, CaseResult(second, 2.0, EQUAL)], 3.0
    )


def test_what_this_machine_lacks_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    everything, skipped = feature_cases()
    assert not [line for line in skipped if "needs torch" not in line]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    cases, skipped = feature_cases()
    assert cases == [case for case in everything if case.reference != "transformers" and not case.compiled]
    assert any(line.startswith("transformers is not installed") for line in skipped)
    assert any(line.startswith("there is no C++ compiler") for line in skipped)


def test_listed_rows_of_the_full_certificate_have_up_to_16_processes() -> None:
    listed, skipped = feature_cases(full=True)
    plan = plan_certificate(True, None)
    assert not [line for line in skipped if "needs torch" not in line]
    assert {9, 12, 16} <= {case.processes for case in listed} and set(listed) <= set(plan.cases)
    assert max(case.processes for case in set(plan.cases) - set(listed)) == 8
    assert max(case.processes for case in plan_certificate(True, 8).cases) == 8


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_told() -> None:
    with pytest.raises(UsageError, match="device is cuda, but torch finds no GPU on this machine; try --device cpu"):
        parity(device="cuda")


def test_ranks_that_share_a_gpu_have_no_pipelines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    plan = plan_certificate(False, 8, "cuda")
    assert {case.device for case in plan.cases} == {"cuda"}
    assert {case.processes for case in plan.cases if case.layout.pp > 1} == {2}
    assert {case.processes for case in plan.cases} >= {4} and plan.skipped[-1].endswith("gloo sends no GPU tensors")
