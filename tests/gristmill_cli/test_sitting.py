"""From text to an answer in one sitting: the quick start, a text, scores in tasks, and a page, each by one command."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gristmill_cli.corpus import ROOT, make_corpus
from tests.gristmill_cli.in_process import gristmill
from tests.gristmill_cli.pages import Numbers, check_recorded

OPTIONS = {
    "tokenizer.vocab_size": 420, "filter.threshold": 100, "mix.holdout": 0.1, "model.layers": 1, "model.width": 32,
    "model.heads": 2, "data.seq_len": 128, "data.batch_size": 8, "optim.steps": 8, "eval.every": 4,
    "checkpoint.every": 8,
}  # fmt: skip


def start(*words: str) -> str:
    """What a command prints, in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "gristmill_cli", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run(*words: str) -> str:
    """What a command prints, in this process."""
    done = gristmill(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_text_becomes_an_answer_in_four_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick start prints the other three."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    corpus = make_corpus(tmp_path / "corpus")
    options = [word for name, value in OPTIONS.items() for word in (f"--{name}", str(value))]
    started = start("quickstart", str(corpus), "--out", str(tmp_path / "out"), *options)
    assert "step 8/8" in started and "holdout after step 8: loss" in started

    # as they are printed, but for the shell's quotes and stars
    printed = dict(re.findall(r"^(more text|scores|report) +gristmill (.*)$", started, re.MULTILINE))
    write, score, show = (line.replace('"', "").split() for line in printed.values())
    assert run(*write, "--tokens", "5", "--temperature", "0", "--device", "cpu").startswith("The")

    assert score[3] == f"{tmp_path}/out/tasks/*.yaml"
    tasks = sorted(map(str, (tmp_path / "out/tasks").glob("*.yaml")))
    scored = start(*score[:3], *tasks, *score[4:], "--device", "cpu", "--limit", "8")
    found = json.loads((tmp_path / "out/model/scores.json").read_text())
    assert len(found) == len(tasks) == 4
    for task, metrics in found.items():
        assert f"{task}: acc {metrics['acc']:.4f}" in scored and metrics["items"] == 8

    run(*show)
    page = (tmp_path / "out/model/report.html").read_text()
    named = check_recorded(tmp_path / "out/model", page)
    assert {f"scores.json#/{task}/acc" for task in found} <= named and "metrics.jsonl#/eval/8/loss" in named
    assert "Scores in tasks" in Numbers(page).text and "holdout_order" in Numbers(page).text


def test_a_damaged_file_of_scores_is_said_on_the_page(tmp_path: Path) -> None:
    from gristmill_cli.report.write import report
    from tests.gristmill_cli.test_report_training import write_run

    run = write_run(tmp_path / "run", 10, 0.5)
    (run / "scores.json").write_text("{")
    report((run,))
    assert "scores.json is damaged" in Numbers((run / "report.html").read_text()).text
