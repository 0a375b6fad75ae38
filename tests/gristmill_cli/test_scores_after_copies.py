"""Runs with scores after copies: one more read of the documents that are left, and the same scores of them."""

import json
import random
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from gristmill.config import load_config
from gristmill.counts import READ
from gristmill.errors import UsageError
from gristmill.io import readers
from gristmill.io.documents import DocKey
from gristmill.io.keys import read_keys
from gristmill_cli.documents.document_scores import read_scores
from gristmill_cli.documents.trace import trace
from gristmill_cli.report.write import report
from gristmill_cli.run import run
from gristmill_cli.run_config import RunConfig
from gristmill_cli.run_records import load_record
from tests.gristmill_cli.documentation import PAGES
from tests.preprocessing.fasttext_models import BAD, GOOD, write_model

OPTIONS = ["--config", "pipeline.toml", "--mix.holdout", "0", "--alarms.source_loss", "0", "--workers", "1"]
OPTIONS += ["--until", "mix"]
AFTER = re.findall(r"```toml\n(.*?)```", PAGES["guides/scores.md"], re.DOTALL)[1]
EDU = AFTER.replace(re.findall("transformers.*", AFTER)[0], 'fasttext = "edu.bin"\nlabel = "hq"')
MANY = 60  # documents of a source


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A corpus of two sources with a model; each document of the first is there twice."""
    chance = random.Random(4)
    for source, share, times in (("ads", 0.42, 2), ("mills", 0.55, 1)):
        lines = list[str]()
        for number in range(MANY):
            words = [chance.choice(GOOD if chance.random() < share else BAD) for _ in range(60)]
            lines.append(json.dumps({"id": f"{source}-{number}", "text": " ".join(words)}) + "\n")
        path = tmp_path / "corpus" / source / "a.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text("".join(lines * times))
    write_model("softmax.bin", tmp_path / "edu.bin")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def configure(folder: Path, tables: str, *options: str) -> RunConfig:
    (folder / "pipeline.toml").write_text(f'corpus = "corpus"\nout = "out"\n{tables}')
    return load_config(RunConfig, [*OPTIONS, *options])


def counts_of(folder: Path, stage: str, reason: str, source: str | None = None) -> int:
    record = load_record(folder / "out", stage)
    assert record is not None
    return record.counts.total(reason, source).documents


def all_keys(folder: Path) -> list[DocKey]:
    keys = list[DocKey]()
    for path in sorted((folder / "corpus").glob("*/a.jsonl")):
        count = len(path.read_text().splitlines())
        keys += [DocKey(f"{path.parent.name}/a.jsonl.zst", row) for row in range(count)]
    return keys


def test_the_documents_that_are_left_are_scored_as_in_the_pass(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = configure(folder, EDU.replace("min = 3", "quantile = 0.25"))
    run(config)
    said = capfd.readouterr().err
    counts = f"{3 * MANY} read = {MANY} duplicate [+] {2 * MANY} noted"
    assert re.search(f"score_after_copies: {counts} ", said), said
    scores = read_scores(config, all_keys(folder))["edu"]
    assert len(scores) == 2 * MANY
    low = read_keys(folder / "out/low_scores_after_copies.parquet")
    for source in ("ads", "mills"):
        own = {key.row: score for key, score in scores.items() if key.source == source}
        limit = np.quantile(np.array([*own.values()]), 0.25)
        expected = sorted(row for row, score in own.items() if score < limit)
        assert low[f"{source}/a.jsonl.zst"].tolist() == expected and len(expected) == MANY // 4
    assert counts_of(folder, "mix", READ) == 3 * MANY
    assert counts_of(folder, "mix", "duplicate") == MANY
    assert counts_of(folder, "mix", "low score") == MANY // 2
    lowest = min(scores, key=scores.__getitem__)
    capfd.readouterr()
    trace(folder / "out", (str(lowest),))
    shown = capfd.readouterr().out
    assert re.search(rf"choose_after_copies +edu {scores[lowest]:.4g}", shown) and "low score" in shown, shown
    report((folder / "out",))
    page = (folder / "out/report.html").read_text()
    assert "Scores after copies" in page and "documents by the score edu" in page
    run(configure(folder, EDU.replace("min = 3", "min = 0.5")))
    said = capfd.readouterr().err
    assert re.search(f"score_after_copies: {counts} .*done already, nothing to do", said), said
    assert counts_of(folder, "mix", "low score") == sum(score < 0.5 for score in scores.values())
    in_rules = EDU.replace('"copies"', '"rules"').replace("min = 3", "min = 0")
    in_pass = configure(folder, in_rules, "--until", "choose_by_score")
    run(in_pass)
    of_all = read_scores(in_pass, all_keys(folder))["edu"]
    assert len(of_all) == 3 * MANY
    assert {key: of_all[key] for key in scores} == scores


BANDS = """[scores.edu.bands]
high = {quantile = 0.75, weight = 2.5}
medium = {quantile = 0.5}
low = {weight = 0.25}
"""


def test_bands_after_copies_where_files_are_cut(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "SLICE_BYTES", 3_000)
    tables = EDU.replace("min = 3\n", "") + BANDS
    run(configure(folder, tables))
    assert len([*(folder / "out/scores").rglob("*.facts.parquet")]) > 3
    scores = read_scores(load_config(RunConfig, OPTIONS), all_keys(folder))["edu"]
    copies = dict[DocKey, int]()
    for path in sorted((folder / "out/mix").rglob("*.parquet")):
        table = pq.read_table(path)
        if "copies" in table.schema.names:
            for row in table.to_pylist():
                copies[DocKey(row["file"], row["row"])] = row["copies"]
    assert len(copies) == 3 * MANY
    for source in ("ads", "mills"):
        own = [key for key in scores if key.source == source]
        values = np.array([scores[key] for key in own], np.float64)
        bands = np.searchsorted(np.quantile(values, [0.5, 0.75]), values, side="right")
        for band, weight in enumerate((0.25, 1.0, 2.5)):
            chosen = [copies[key] for key, number in zip(own, bands, strict=True) if number == band]
            assert sum(chosen) == round(weight * len(chosen))
            assert {*chosen} <= {int(weight), int(weight) + 1}
    assert sum(copies.values()) == sum(copies[key] for key in scores)
    run(configure(folder, tables, "--workers", "2", "--out", "again"))
    for name in ("score_bands.json", "low_scores_after_copies.parquet"):
        assert (folder / "again" / name).read_bytes() == (folder / "out" / name).read_bytes()
    for path in (folder / "out/scores").rglob("*.facts.parquet"):
        assert (folder / "again" / path.relative_to(folder / "out")).read_bytes() == path.read_bytes()


FUNCTION = """
def score(texts):
    assert not any("mill-0 " in text for text in texts), "no score of that"
    return [text.count("the") for text in texts]
"""


def test_a_low_document_goes_with_its_copies_and_one_without_a_score_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "scoring.py").write_text(FUNCTION)
    monkeypatch.syspath_prepend(folder)
    words = [f"{GOOD[i * 7 % len(GOOD)]}" for i in range(300)]
    near = [" ".join([*words, *(["the"] * 5)]), " ".join([*words, *(["the"] * 9)])]
    texts = [*near, "mill-0 " + " ".join(words[::-1]), " ".join(words[::2] + ["the"] * 50)]
    (folder / "corpus/ads/a.jsonl").unlink()
    (folder / "corpus/mills/a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    function = '[scores.own]\nfunction = "scoring:score"\nafter = "copies"\n'
    config = configure(folder, f"{function}min = {near[0].count('the') + 1}\n", "--max_failed", "0.5")
    run(config)
    assert counts_of(folder, "score_after_copies", "duplicate") == 1
    assert counts_of(folder, "score_after_copies", "failed: score own") == 1
    assert counts_of(folder, "choose_after_copies", "low own") == 1
    assert counts_of(folder, "mix", "duplicate") == 1
    assert counts_of(folder, "mix", "low score") == 1
    assert counts_of(folder, "mix", "failed") == 1
    assert counts_of(folder, "mix", "written") == 1
    capfd.readouterr()
    trace(folder / "out", ("mills/a.jsonl@2",))
    shown = capfd.readouterr().out
    assert "score_after_copies" in shown and "no score of that" in shown and "left out: failed" in shown, shown
    (folder / "list.txt").write_text("keep mills/a.jsonl.zst@1\n")
    run(configure(folder, f"{function}min = 1\n", "--max_failed", "0.5", "--keep_list", "list.txt"))
    assert DocKey("mills/a.jsonl.zst", 1) in read_scores(config, all_keys(folder))["own"]
    assert counts_of(folder, "mix", "written") == 3


@pytest.mark.parametrize(
    ("tables", "options", "said"),
    [
        (EDU, ("--keep", "train_text"), "after = 'copies' has no effect on --keep train_text; leave out one of them"),
        (
            EDU + '[scores.words]\nmeasure = "words"\n[scores.both]\nmean_of = ["edu", "words"]\n', (),
            "expected scores after rules, or scores after copies, got edu after copies and words after rules",
        ),
        (
            EDU + '[scores.words]\nmeasure = "words"\n[scores.both]\nmean_of = ["edu", "words"]\nafter = "copies"', (),
            "after has no effect on mean_of",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be(folder: Path, tables: str, options: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run(configure(folder, tables, *options))
    assert not (folder / "out/normalized").exists()
