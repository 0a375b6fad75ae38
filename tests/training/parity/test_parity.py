"""The parity certificate's command line and reports; test_certificate.py tests its results."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gristmill.command import wide_console
from training.parity.cases import covering_cases
from training.parity.comparison import CaseResult
from training.parity.parity import as_json, as_markdown, choose_cases, report, summary
from training.parity.traffic import Volume


def test_reports_hold_every_row_and_every_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    cases, refused = choose_cases(False, 8)
    rows = [CaseResult(c, 1.0, 0.0, 0.0, 0.0, {("tp", "send"): Volume(2, 2048)}) for c in cases[:2]]
    rows.append(CaseResult(cases[2], 1.0, error="rank 0: died [/pair.cc:553]"))
    text = as_markdown(rows, refused)
    assert text.count("| green |") == 2 and text.count("**red**") == 1 and "tp send 2 / 2 KiB" in text
    assert all(reason in text for reason in refused.values())
    record = json.loads(json.dumps(as_json(rows, refused)))
    assert len(record["rows"]) == 3 and len(record["refused"]) == len(refused)
    assert record["rows"][0]["layout"]["dp"] == 1 and record["rows"][2]["wrong"] == "rank 0: died [/pair.cc:553]"
    wide_console().print(report(rows, refused, 3.0))
    shown = capsys.readouterr().out
    assert f"red: {cases[2]}: rank 0: died [/pair.cc:553]" in shown and "3 rows, 2 green, 1 red, in 3 s" in shown


def test_the_command_line(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "gristmill_cli", "parity"]
    done = subprocess.run([*run, "--processes", "1", "--out", tmp_path / "c.md"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "0 red" in done.stdout and "llama dp1 tp1 pp1 fp32" in done.stdout
    assert "**red**" not in (tmp_path / "c.md").read_text()
    wrong = subprocess.run([*run, "--out", "c.pdf"], capture_output=True, text=True)
    assert wrong.returncode == 2 and "ends in .md or .json" in wrong.stderr


def test_a_difference_that_is_not_a_number_is_red() -> None:
    first, second = covering_cases()[:2]
    row = CaseResult(first, 1.0, 0.0, float("nan"), 0.0)
    assert not row.passed and "gradient differ by nan" in row.reason
    assert f"worst in fp64 (limit 1e-10): nan, {first}" in summary([row, CaseResult(second, 2.0, 0.0, 0.0, 0.0)], 3.0)
