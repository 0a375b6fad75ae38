"""Runs with [scores.NAME]: documents go by the scores of a model, and another limit reads no text."""

import json
import random
import re
from collections import Counter
from io import StringIO
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from gristmill.config import load_config
from gristmill.counts import READ, WRITTEN
from gristmill.errors import UsageError
from gristmill.io.documents import DocKey
from gristmill.io.keys import iter_keys
from gristmill.io.token_shards import Manifest, read_sources
from gristmill_cli.cards.data_card import card
from gristmill_cli.documents.document_scores import describe_scores
from gristmill_cli.funnel import read_funnel
from gristmill_cli.preview import preview_scores
from gristmill_cli.report.write import report
from gristmill_cli.run import run
from gristmill_cli.run_config import RunConfig
from gristmill_cli.run_records import load_record
from preprocessing.from_facts.low_scores import read_score_sums
from preprocessing.mixing.mix_manifest import MixManifest
from tests.gristmill_cli.documentation import PAGES, commands, shell
from tests.preprocessing.fasttext_models import BAD, GOOD, write_model

PAGE = "guides/scores.md"
OPTIONS = ["--config", "pipeline.toml", "--mix.holdout", "0.05", "--tokenizer.vocab_size", "300"]
OPTIONS += ["--tokenizer.exact", "false", "--alarms.source_loss", "0", "--workers", "1"]


def toml_of_page() -> list[str]:
    return re.findall(r"```toml\n(.*?)```", PAGES[PAGE], re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A corpus of two sources, the first mostly advertisements, with the page's model and configuration."""
    chance = random.Random(4)
    for source, share in (("ads", 0.42), ("mills", 0.55)):
        path = tmp_path / "corpus" / source / "a.jsonl"
        path.parent.mkdir(parents=True)
        with path.open("w") as file:
            for _ in range(120):
                words = [chance.choice(GOOD if chance.random() < share else BAD) for _ in range(60)]
                file.write(json.dumps({"text": " ".join(words)}) + "\n")
    write_model("softmax.bin", tmp_path / "edu.bin")
    (tmp_path / "pipeline.toml").write_text(toml_of_page()[0])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def configure(folder: Path, **replaced: str) -> RunConfig:
    """The page's configuration, with lines of its table replaced."""
    path = folder / "pipeline.toml"
    text = path.read_text()
    for old, new in replaced.items():
        text = re.sub(rf"(?m)^{old} = .*$", new, text)
    path.write_text(text)
    return load_config(RunConfig, OPTIONS)


def scores_in(folder: Path) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for path in sorted((folder / "out/facts").rglob("*.facts.parquet")):
        table = pq.read_table(path)
        (name,) = [name for name in table.schema.names if name.startswith("edu@")]
        found[path.parent.name] = table.column(name).to_pylist()
    return found


def counts_of(folder: Path, stage: str, reason: str, source: str | None = None) -> int:
    record = load_record(folder / "out", stage)
    assert record is not None
    return record.counts.total(reason, source).documents


def test_the_lines_of_the_page(folder: Path) -> None:
    block, _ = commands(PAGE)
    done = shell(f"cd {folder}\n" + block, on_one_core=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"ads +120 .*\n *mills +120 ", done.stdout), done.stdout
    assert "just below, and left out" in done.stdout and "just above, and kept" in done.stdout
    assert re.search(r"choose_by_score: 240 read = \d+ kept \+ \d+ low edu \|", done.stderr)
    assert "normalize_text: 240 read = 240 written | done already, nothing to do" in done.stderr


def test_a_scorer_is_trained_and_used(folder: Path) -> None:
    _, block = commands(PAGE)
    sources = {"GOOD": str(folder / "corpus/mills"), "ORDINARY": str(folder / "corpus/ads"), "OUT": str(folder)}
    done = shell(block, on_one_core=True, **sources)
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout and "words for positive" in done.stdout
    run(configure(folder, fasttext='fasttext = "own.bin"', label='label = "positive"', min="quantile = 0.5"))
    assert counts_of(folder, "choose_by_score", "low edu") == 120


def test_another_limit_reads_no_text_and_decides_the_mix(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(configure(folder))
    scores = scores_in(folder)
    low = {source: sum(score < 0.5 for score in own) for source, own in scores.items()}
    assert low["ads"] > low["mills"] > 0
    for source, count in low.items():
        assert counts_of(folder, "choose_by_score", "low edu", source) == count
        assert counts_of(folder, "mix", "low score", source) == count
    capfd.readouterr()
    run(configure(folder, min="quantile = 0.25"))
    said = capfd.readouterr().err
    for stage in ("normalize_text", "filter", "to_hash"):
        assert re.search(rf"{stage}: 240 read = .* \| done already, nothing to do", said), said
    rows = {file.partition("/")[0]: rows.tolist() for file, rows in iter_keys(folder / "out/low_scores.parquet")}
    for source, own in scores.items():
        lowest = sorted(range(120), key=own.__getitem__)[:30]
        assert rows[source] == sorted(lowest)
    assert counts_of(folder, "mix", "low score") == 60
    assert counts_of(folder, "mix", READ) == 240


def test_a_quantile_of_all_and_a_score_that_is_only_noted(folder: Path) -> None:
    run(configure(folder, min='quantile = 0.5\nof = "all"'))
    assert counts_of(folder, "choose_by_score", "low edu") == 120
    assert counts_of(folder, "choose_by_score", "low edu", "ads") > 100
    run(configure(folder, quantile="", of=""))
    assert counts_of(folder, "choose_by_score", "low edu") == 0
    assert counts_of(folder, "choose_by_score", "kept") == 240


def test_a_near_duplicate_of_a_better_score_stays(folder: Path) -> None:
    """The first of a cluster, which would be kept, is too low: its copy is kept in its place."""
    good = [GOOD[i * 7 % len(GOOD)] for i in range(300)]
    first = [*good, *(["click", "here"] * 10)]
    second = [*good, *(["the", "mill"] * 10)]
    path = folder / "corpus/mills/a.jsonl"
    path.write_text("".join(json.dumps({"text": " ".join(words)}) + "\n" for words in (first, second)) * 1)
    config = configure(folder)
    run(config)
    both = scores_in(folder)["mills"]
    assert both[0] < both[1]
    run(configure(folder, min=f"min = {(both[0] + both[1]) / 2}"))
    assert counts_of(folder, "mix", "low score", "mills") == 1
    assert counts_of(folder, "mix", "duplicate", "mills") == 0


def test_text_that_is_kept_leaves_out_the_same(folder: Path) -> None:
    configure(folder)
    run(load_config(RunConfig, [*OPTIONS, "--keep", "train_text"]))
    low = sum(score < 0.5 for own in scores_in(folder).values() for score in own)
    assert counts_of(folder, "pass1", "low score") == low
    assert counts_of(folder, "pass1", WRITTEN) == counts_of(folder, "choose_by_score", "kept") - counts_of(
        folder, "pass1", "duplicate"
    )


def test_another_model_scores_anew(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(load_config(RunConfig, [*OPTIONS, "--until", "choose_by_score"]))
    before = scores_in(folder)
    write_model("hs.bin", folder / "edu.bin")
    capfd.readouterr()
    run(load_config(RunConfig, [*OPTIONS, "--until", "choose_by_score"]))
    assert "done already" not in capfd.readouterr().err.partition("\n")[0]
    assert scores_in(folder) != before


def test_what_cannot_be_is_said_before_anything_runs(folder: Path) -> None:
    with pytest.raises(UsageError, match="expected label to be one of hq, cc, got 'edu'"):
        run(configure(folder, label='label = "edu"'))
    assert not (folder / "out/normalized").exists()


def test_scores_are_shown_by_source_and_an_odd_one_is_told(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = [*OPTIONS, "--until", "choose_by_score"]
    run(load_config(RunConfig, [*options, "--alarms.score", "0.01"]))
    said = capfd.readouterr()
    scores = scores_in(folder)
    mean = sum(scores["ads"]) / 120
    assert re.search(rf"edu +ads +120 +{mean:.4g}", said.out), said.out
    assert re.search(r"warning: the source explains \d+% of the score edu \(on average ads 0\.\d+, mills 0", said.err)
    run(load_config(RunConfig, options))
    assert "explains" not in capfd.readouterr().err or np.ptp([np.mean(own) for own in scores.values()]) > 0.3


def test_a_preview_is_what_a_run_does(folder: Path) -> None:
    configure(folder, min="quantile = 0.3")
    console = Console(width=100, record=True, file=StringIO())
    console.print(preview_scores(Path("pipeline.toml"), examples=3))
    shown = console.export_text()
    assert not (folder / "out").exists()
    run(load_config(RunConfig, [*OPTIONS, "--until", "choose_by_score"]))
    for source, own in scores_in(folder).items():
        limit = np.quantile(own, 0.3)
        assert re.search(rf"{source} +120 .*{limit:.3g} +70.0%", shown), shown
    below, above = shown.split("just above, and kept")
    assert below.count(".jsonl@") == 3 == above.count(".jsonl@")


def test_a_preview_of_bands_and_of_a_curve(folder: Path) -> None:
    configure(folder, min="")
    toml = folder / "pipeline.toml"
    toml.write_text(toml.read_text() + BANDS)
    console = Console(width=100, record=True, file=StringIO())
    console.print(preview_scores(Path("pipeline.toml")))
    shown = console.export_text()
    assert re.search(r"source +high ×2.5 +medium ×1 +low ×0.25", shown), shown
    assert re.search(r"mills +25.0% +25.0% +50.0%", shown), shown
    toml.write_text(toml.read_text().partition("[scores.edu.bands]")[0] + "keep = [[0.0, 0.4], [1.0, 0.4]]\n")
    console.print(preview_scores(Path("pipeline.toml")))
    assert re.search(r"mills +120 .* none +40.0%", console.export_text())


def test_a_preview_without_scores_and_of_no_documents(folder: Path) -> None:
    with pytest.raises(UsageError, match="--documents 0: expected 1 or more"):
        preview_scores(Path("pipeline.toml"), documents=0)
    (folder / "pipeline.toml").write_text("corpus = 'corpus'\nout = 'out'\n")
    with pytest.raises(UsageError, match=r"pipeline.toml: expected a table \[scores.NAME\], got none"):
        preview_scores(Path("pipeline.toml"))


BANDS = """[scores.edu.bands]
high = {quantile = 0.75, weight = 2.5}
medium = {quantile = 0.5}
low = {weight = 0.25}
"""


def copies_in(folder: Path) -> dict[str, list[int]]:
    """How often the mix has each document, or 1 if it is held out, by source and row."""
    found: dict[str, list[int]] = {}
    for path in sorted((folder / "out/mix").rglob("*.parquet")):
        table = pq.read_table(path)
        if "copies" in table.schema.names:
            source = path.relative_to(folder / "out/mix").parts[0]
            found.setdefault(source, [0] * 120)
            for row, copies in zip(table["row"].to_pylist(), table["copies"].to_pylist(), strict=True):
                found[source][row] = abs(copies)
    return found


def test_bands_have_weights_of_their_own_in_the_mix(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    configure(folder, min="")
    toml = folder / "pipeline.toml"
    toml.write_text(toml.read_text() + BANDS)
    options = [*OPTIONS, "--mix.weights", "mills", "2", "--mix.holdout", "0"]
    config = load_config(RunConfig, options)
    run(config)
    said = capfd.readouterr()
    assert re.search(r"mills +high +30 +5 +150", said.out), said.out
    assert re.search(r"ads +low +60 +0.25 +15", said.out), said.out
    card(folder / "out")
    written = (folder / "out/tokens/README.md").read_text()
    assert "| mills | high | 30 | 5 | 150 |" in written and "| edu | bands" in written, written
    report((folder / "out",))
    page = (folder / "out/report.html").read_text()
    assert "mills: high" in page and "Bands of the score" in page
    copies = copies_in(folder)
    manifest = Manifest.load(folder / "out/tokens/train")
    documents = {name: record.documents for name, record in manifest.sources.items()}
    shares = MixManifest.load(folder / "out/mix").bands
    assert documents == {f"{share.source}/{share.band}": share.mixed for share in shares}
    assert documents["mills/high"] == 150
    in_shards = Counter[str]()
    for shard in manifest.shards:
        in_shards.update(np.array(shard.sources)[read_sources(folder / "out/tokens/train", shard)].tolist())
    assert in_shards == documents
    funnel = read_funnel(folder / "out")
    assert funnel.tokens["train"]["mills"] == sum(
        record.tokens for name, record in manifest.sources.items() if name.startswith("mills/")
    )
    for source, own in scores_in(folder).items():
        weight = 2 if source == "mills" else 1
        limits = np.quantile(np.array(own, np.float64), [0.5, 0.75])
        bands = np.searchsorted(limits, np.array(own, np.float64), side="right")
        for row, number in enumerate(bands[:40].tolist()):
            said_of_row = describe_scores(config, DocKey(f"{source}/a.jsonl.zst", row))
            assert said_of_row.endswith(f", in the band {('low', 'medium', 'high')[number]} of edu")
        for band, of_band in enumerate((0.25, 1.0, 2.5)):
            chosen = [times for times, number in zip(copies[source], bands, strict=True) if number == band]
            epochs = weight * of_band
            assert sum(chosen) == round(epochs * len(chosen))
            assert {*chosen} <= {int(epochs), int(epochs) + 1}
    run(load_config(RunConfig, [*options, "--workers", "2", "--out", "again"]))
    for name in ("score_bands.json", "low_scores.parquet"):
        assert (folder / "again" / name).read_bytes() == (folder / "out" / name).read_bytes()
    decided = sorted((folder / "out/mix").rglob("*.parquet"))
    assert decided
    for path in decided:
        assert (folder / "again/mix" / path.relative_to(folder / "out/mix")).read_bytes() == path.read_bytes()
    toml.write_text(toml.read_text().replace("weight = 0.25", "weight = 0"))
    run(load_config(RunConfig, options))
    said = capfd.readouterr()
    assert re.search(r"normalize_text: 240 read = .* \| done already, nothing to do", said.err), said.err
    assert counts_of(folder, "mix", "low score") == 120


def test_bands_are_refused_where_they_would_have_no_effect(folder: Path) -> None:
    configure(folder, min="")
    toml = folder / "pipeline.toml"
    toml.write_text(toml.read_text() + BANDS)
    with pytest.raises(UsageError, match="bands have no effect on --keep train_text"):
        run(load_config(RunConfig, [*OPTIONS, "--keep", "train_text"]))
    second = BANDS.replace("scores.edu", "scores.own")
    toml.write_text(toml.read_text() + '[scores.own]\nfasttext = "edu.bin"\nlabel = "hq"\n' + second)
    with pytest.raises(UsageError, match="expected bands in one table, got edu and own"):
        run(load_config(RunConfig, OPTIONS))


def test_a_curve_keeps_by_chance_the_same_documents_for_any_workers(folder: Path) -> None:
    config = configure(folder, min="keep = [[0.0, 0.1], [1.0, 0.9]]")
    run(config)
    first = (folder / "out/low_scores.parquet").read_bytes()
    low = {source: counts_of(folder, "choose_by_score", "low edu", source) for source in ("ads", "mills")}
    assert low["ads"] > low["mills"] > 5
    run(load_config(RunConfig, [*OPTIONS[:-2], "--workers", "2", "--out", "again"]))
    assert (folder / "again/low_scores.parquet").read_bytes() == first


def test_the_tables_of_the_page(folder: Path) -> None:
    configure(folder, min="")
    plain, _, measures, bands, curve, ensemble = toml_of_page()
    toml = folder / "pipeline.toml"
    toml.write_text(plain.replace("min = 0.5\n", "") + bands)
    run(load_config(RunConfig, [*OPTIONS, "--until", "mix"]))
    assert counts_of(folder, "choose_by_score", "kept") == 240
    toml.write_text(plain.partition("[scores")[0] + curve)
    run(load_config(RunConfig, [*OPTIONS, "--until", "mix"]))
    assert 0 < counts_of(folder, "choose_by_score", "kept") < 240
    toml.write_text(plain.partition("[scores")[0] + measures.replace("min = 2", "min = 0"))
    run(load_config(RunConfig, [*OPTIONS, "--until", "choose_by_score"]))
    assert counts_of(folder, "choose_by_score", "kept") == 240
    toml.write_text(plain.partition("[scores")[0] + ensemble)
    run(load_config(RunConfig, [*OPTIONS, "--until", "mix"]))
    assert 50 < counts_of(folder, "choose_by_score", "kept") < 80  # a quarter of 240, and ties
    assert counts_of(folder, "choose_by_score", "low best") == counts_of(folder, "mix", "low score")


def test_an_ensemble_has_bands_and_reads_no_text(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    toml = folder / "pipeline.toml"
    (own,) = [text for text in toml_of_page() if "mean_of" in text]
    toml.write_text(toml.read_text().partition("[scores")[0] + own)
    run(load_config(RunConfig, OPTIONS))
    bands = BANDS.replace("scores.edu", "scores.best")
    toml.write_text(toml.read_text().replace("quantile = 0.75 ", "# ") + bands)
    run(load_config(RunConfig, OPTIONS))
    said = capfd.readouterr()
    assert re.search(r"normalize_text: 240 read = .* \| done already, nothing to do", said.err), said.err
    assert re.search(r"mills +high +\d+ +2.5 ", said.out), said.out
    report((folder / "out",))
    assert "documents by the score best" in (folder / "out/report.html").read_text()
    stdout = StringIO()
    Console(file=stdout, width=200).print(preview_scores(toml))
    assert "edu" in stdout.getvalue() and "words" in stdout.getvalue()


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ('mean_of = ["edu"]', "mean_of: expected two tables of scores or more, each once, got edu"),
        ('mean_of = ["edu", "edu"]', "expected two tables of scores or more, each once"),
        ('mean_of = ["edu", "none"]', r"mean_of: expected tables of scores \(edu\), got 'none'"),
        ('mean_of = ["edu", "best"]', r"mean_of: expected tables of scores \(edu\), got 'best'"),
        ('mean_of = ["edu", "x"]\nmeasure = "words"', "expected one of fasttext, transformers, function, measure and"),
        ('mean_of = ["edu", "x"]\nlabel = "hq"', "label has no effect on mean_of"),
    ],
)
def test_ensembles_that_cannot_be(folder: Path, table: str, said: str) -> None:
    toml = folder / "pipeline.toml"
    toml.write_text(f"{toml.read_text()}\n[scores.best]\n{table}\n")
    with pytest.raises(UsageError, match=said):
        run(load_config(RunConfig, OPTIONS))


def test_the_report_draws_scores_and_quotes_documents_at_the_limit(folder: Path) -> None:
    run(configure(folder))
    report((folder / "out",))
    page = (folder / "out/report.html").read_text()
    assert "documents by the score edu" in page and "Just below the limit of edu" in page
    quoted = page.partition("Just above it, by edu")[0].partition("Just below the limit of edu")[2]
    scores = scores_in(folder)
    for source, own in scores.items():
        below = sorted((score for score in own if score < 0.5), reverse=True)[:3]
        for score in below:
            assert f"{source}/a.jsonl.zst@{own.index(score)}" in quoted and f"{score:.4g}" in quoted
    sums = read_score_sums(folder / "out/low_scores.parquet")["edu"]
    for source, own in scores.items():
        width = sums[source].width
        numbers, counts = np.unique(np.floor(np.array(own) / width).astype(int), return_counts=True)
        assert sums[source].bins == list(zip(numbers.tolist(), counts.tolist(), strict=True))
