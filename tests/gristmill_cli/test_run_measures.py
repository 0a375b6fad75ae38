"""Runs with [scores.NAME] measure: as the rule of a recipe decides, but another limit reads no text."""

import json
import random
import re
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from gristmill.config import load_config
from gristmill.engine.options import RunOptions
from gristmill.errors import UsageError
from gristmill.io.keys import iter_keys
from gristmill_cli.preview import preview_scores
from gristmill_cli.run import run
from gristmill_cli.run_config import RunConfig
from preprocessing.filter_quality import filter_quality
from preprocessing.quality.measures import MEASURES
from preprocessing.steps.measure_score import MeasureScore

OPTIONS = ["--config", "run.toml", "--until", "choose_by_score", "--alarms.source_loss", "0", "--workers", "1"]
WORDS = ["the", "mill", "of", "grain", "grinds", "and", "a", "stone", "turns", "with", "water"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A corpus of documents of 1 to 90 words, and a folder to run in."""
    chance = random.Random(7)
    path = tmp_path / "corpus/book/a.jsonl"
    path.parent.mkdir(parents=True)
    with path.open("w") as file:
        for count in chance.sample(range(1, 91), 80):
            text = " ".join(chance.choices(WORDS, k=count)) + f" {count}."
            file.write(json.dumps({"text": text}) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def configure(table: str) -> RunConfig:
    Path("run.toml").write_text(f'corpus = "corpus"\nout = "out"\n[filter]\nthreshold = 0\n{table}')
    return load_config(RunConfig, OPTIONS)


def texts_in(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def low_rows() -> list[int]:
    (rows,) = [rows.tolist() for _, rows in iter_keys(Path("out/low_scores.parquet"))] or [[]]
    return rows


def test_limits_of_measures_decide_as_the_rules_of_a_recipe(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    limits = [(3, 70), (35, 60)]
    for low, high in limits:
        run(configure(
            f'[scores.words]\nmeasure = "words"\nmin = {low}\nmax = {high}\n'
            '[scores.stops]\nmeasure = "stop_words"\nmin = 3\n'
        ))  # fmt: skip
        said = capfd.readouterr().err
        Path("rules.toml").write_text(f"words = {{ min = {low}, max = {high} }}\nstop_words = {{ min = 3 }}\n")
        counts = filter_quality(folder / "corpus", folder / f"clean{low}", "rules.toml", RunOptions(1, quiet=True))
        for rule, reason in (("words", "words out of bounds"), ("stop_words", "low stops")):
            removed = counts.total(rule).documents
            assert (f" {removed} {reason}" in said) == (removed > 0)
        kept = texts_in(folder / f"clean{low}/book/a.jsonl")
        texts = texts_in(folder / "corpus/book/a.jsonl")
        assert low_rows() == [row for row, text in enumerate(texts) if text not in kept]
    assert "normalize_text: 80 read = 80 written | done already, nothing to do" in said


def test_every_measure_of_a_batch_is_that_of_each_text_alone() -> None:
    chance = random.Random(1)
    texts = tuple(" ".join(chance.choices([*WORDS, "#", "...", "{", "\n", "- a\n"], k=40)) for _ in range(20))
    for name in MEASURES:
        step = MeasureScore.of("score", name)
        together = step.compute(texts)
        assert together.dtype == np.float32
        assert together.tolist() == [float(step.compute((text,))[0]) for text in texts], name


def test_a_preview_shows_both_limits(folder: Path) -> None:
    configure('[scores.words]\nmeasure = "words"\nmin = 20\nmax = 70\n')
    console = Console(width=100, record=True, file=StringIO())
    console.print(preview_scores(Path("run.toml"), examples=2))
    shown = console.export_text()
    assert "20 to 70" in shown and "just above max, and left out" in shown
    assert shown.count(".jsonl@") == 8


def test_a_preview_says_which_documents_have_no_score(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "odd_scores.py").write_text(
        "def f(texts):\n    return ['no' if text.endswith(' 7.') else 1 for text in texts]\n"
    )
    monkeypatch.syspath_prepend(folder)
    configure('[scores.own]\nfunction = "odd_scores:f"\n')
    console = Console(width=200, record=True, file=StringIO())
    console.print(preview_scores(Path("run.toml")))
    shown = console.export_text()
    said = r"1 not scored: failed: score own, such as book/a.jsonl@\d+: odd_scores:f returned 'no' for a text: expected"
    assert "80 of 80 documents drawn\n" in shown and re.search(said, shown), shown


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ('measure = "wrods"', r"\[scores.x\]: unknown measure 'wrods': did you mean words\?"),
        ('measure = "words"\nlabel = "a"', "label has no effect on a measure; leave it out"),
        ('measure = "words"\nmin = 3\nmax = 2', "min 3.0 and max 2.0: expected min below max"),
        ('measure = "words"\nmax = 2\nquantile = 0.5', "got max and quantile"),
        ('measure = "words"\nfasttext = "a.bin"', "got a.bin and words"),
    ],
)
def test_what_cannot_be_is_refused(folder: Path, table: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run(configure(f"[scores.x]\n{table}\n"))
