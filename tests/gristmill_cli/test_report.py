"""`gristmill report`: its numbers are the records', its texts do nothing, and Chromium shows it."""

import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from matplotlib.figure import Figure

from gristmill.counts import READ, Counts
from gristmill.engine.staleness.ledger import Ledger
from gristmill.errors import UsageError
from gristmill.io.files import STATE_DIR
from gristmill.io.keys import iter_keys
from gristmill.io.readers import read_corpus
from gristmill.storage.files import read_file
from gristmill_cli.funnel import TRAIN, show_funnel
from gristmill_cli.report.benchmarks import sample_spans
from gristmill_cli.report.pictures import draw_curves
from gristmill_cli.report.write import report
from gristmill_cli.run import run
from gristmill_cli.run_config import Dedup, Filter, Mix, RunConfig, Tokenizer, load_options, read_options
from gristmill_cli.run_records import load_record
from tests.dedup.template_pages import template_pages
from tests.gristmill_cli.pages import Numbers, check_recorded, dumped, in_a_browser
from tests.object_store import BUCKET, object_store

HOSTILE = '<script>document.title = "ran"</script><img src=x onerror="document.title=1"> & $x_1$ '


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two sources: pages of a template, which its options wipe out, and texts with markup."""
    root = tmp_path_factory.mktemp("report")
    words = [f"word{number}" for number in range(60)]
    others = [" ".join(f"{word}{number}" for word in words) for number in range(40)]
    others += [HOSTILE + others[0], HOSTILE + others[0] + " once more"]
    for source, texts in (("web", template_pages(1200)), ("b&<i>", others)):
        (root / "corpus" / source).mkdir(parents=True)
        ids = [{"id": f"{row}th"} if source != "web" else {} for row in range(len(texts))]
        lines = (json.dumps({"text": text} | own) + "\n" for text, own in zip(texts, ids, strict=True))
        (root / "corpus" / source / "a.jsonl").write_text("".join(lines))
    run(
        RunConfig(
            root / "corpus", root / "out", workers=1, dedup=Dedup(verify="none", exact=False), mix=Mix(holdout=0.1),
            filter=Filter(threshold=10), tokenizer=Tokenizer(vocab_size=400, exact=False),
        )
    )  # fmt: skip
    return root / "out"


@pytest.fixture(scope="module")
def written(out: Path) -> str:
    report((out,))
    return (out / "report.html").read_text()


def check_numbers(out: Path, page: str) -> None:
    """Each number that names its record equals it, and they are all counts of the funnel and the manifest."""
    named = check_recorded(out, page)
    for source, reasons in json.loads((out / "funnel.json").read_text())["went"].items():
        for reason in reasons:
            assert f"funnel.json#/went/{source}/{reason}/documents" in named
    assert ".gristmill/run/encode.json#/counts/lengths/web/10" in named
    assert any(name.startswith("tokens/train/manifest.json#/sources/web/tokens") for name in named)


def test_numbers_are_those_of_the_records(out: Path, written: str) -> None:
    check_numbers(out, written)
    counts = Counts(show_funnel(out).tallies, [])
    values = {it["data-value"] for it in Numbers(written).found if not it.get("data-record")}
    assert {str(counts.total(reason).documents) for reason in (READ, TRAIN, "duplicate")} <= values


@in_a_browser
def test_chromium_shows_the_same_numbers_and_runs_nothing(out: Path, written: str) -> None:
    page = dumped(out / "report.html")
    check_numbers(out, page)
    assert Numbers(page).found == Numbers(written).found
    assert "<title>gristmill: out</title>" in page


def test_core_hours_and_retries_of_a_stage_are_those_of_its_tasks(out: Path, written: str) -> None:
    named = check_recorded(out, written)
    for stage, folder in (("to_hash", "minhash"), ("encode", "tokens")):
        costs = [cost for ledger in Ledger.all_in(out / folder / STATE_DIR) for cost in ledger.costs()]
        record = json.loads((out / f".gristmill/run/{stage}.json").read_text())
        assert record["tasks"] == len(costs) > 0 and record["retries"] == sum(cost.retries for cost in costs)
        assert record["core_seconds"] == pytest.approx(sum(cost.core_seconds for cost in costs), abs=0.001)
        assert {f".gristmill/run/{stage}.json#/{name}" for name in ("core_seconds", "tasks", "retries")} <= named
    assert json.loads((out / ".gristmill/run/to_hash.json").read_text())["core_seconds"] > 0


def test_lengths_are_those_of_the_documents(out: Path) -> None:
    duplicates = iter_keys(out / "dup" / "duplicates.parquet")
    removed = {row for file, rows in duplicates if file == "web/a.jsonl.zst" for row in rows.tolist()}
    assert removed
    for stage, left_out in (("normalize_text", set()), ("encode", removed)):
        lengths = json.loads((out / f".gristmill/run/{stage}.json").read_text())["counts"]["lengths"]
        documents = [it for it in read_corpus(out / "normalized" / "web") if it.key.row not in left_out]
        sizes = [len(document.text.encode()) for document in documents]
        expected = Counter(map(int.bit_length, sizes))
        assert {bits: count for bits, count in enumerate(lengths["web"]) if count} == expected


def test_a_wipe_out_heads_the_page(written: str) -> None:
    head = written.partition('<section id="where-the-documents-went">')[0]
    assert re.search(r'class="warn">The source web loses \d+% of its documents', head)
    assert re.search(r'loses [^<]* <a href="#what-is-alike">show</a>', head)
    assert 'class="warn">Documents that are not similar are removed' in head


def test_the_contents_lead_to_each_section(written: str) -> None:
    (contents,) = re.findall("<nav>(.*?)</nav>", written, re.DOTALL)
    links = re.findall('<a href="#([^"]*)">', contents)
    assert links == re.findall('<section id="([^"]*)">', written) and len(links) > 5


def test_a_stage_that_was_skipped_keeps_its_time(out: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(out, tmp_path / "out")
    before = load_record(copied, "normalize_text")
    record = copied / ".gristmill/run/normalize_text.json"
    record.write_bytes(msgspec.json.encode(msgspec.structs.replace(before, seconds=1234.5)))
    run(replace(load_options(read_options(copied), copied), until="filter"))
    assert load_record(copied, "normalize_text").seconds == 1234.5


def test_texts_and_names_are_only_text(written: str) -> None:
    assert not {"script", "img", "iframe", "link"} & Numbers(written).tags
    assert "onerror" in Numbers(written).text and "b&<i>" in Numbers(written).text
    assert "default-src 'none'" in written and len(written) < 5e6


def test_documents_are_named_by_their_own_ids_too(written: str) -> None:
    assert "b&<i>/a.jsonl.zst@40 (id 40th) next to b&<i>/a.jsonl.zst@0 (id 0th)" in Numbers(written).text


def test_pictures_are_there_and_in_the_colours_of_the_page(written: str) -> None:
    pictures = re.findall(r"<svg.*?</svg>", written, re.DOTALL)
    assert len(pictures) >= 8
    for picture in pictures:
        assert len(re.findall("<(path|rect|use|text)", picture)) > 5 and "var(--ink)" in picture
        assert "#0102" not in picture and "#0103" not in picture


def test_the_same_records_give_the_same_bytes(out: Path, written: str, tmp_path: Path) -> None:
    report((out,), tmp_path / "again.html")
    assert (tmp_path / "again.html").read_text() == written


@pytest.mark.thorough
def test_a_run_in_a_bucket_is_reported(out: Path, written: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with object_store() as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        store.upload_tree(out, "out")
        report((Path(f"s3://{BUCKET}/out"),))
        page = read_file(Path(f"s3://{BUCKET}/out/report.html")).decode()
    assert Numbers(page).found == Numbers(written).found


@pytest.fixture
def copy(out: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(out, tmp_path / "out"))


def test_an_unfinished_run_is_said_to_be(copy: Path) -> None:
    (copy / "funnel.json").unlink()
    for name in ("train_tokenizer", "encode"):
        (copy / f".gristmill/run/{name}.json").unlink()
    report((copy,))
    page = (copy / "report.html").read_text()
    assert "The run has not finished: train_tokenizer, encode" in page
    assert "What is alike" in page and "Where the documents went, so far" in page
    assert ".gristmill/run/mix.json#/counts/tallies/web/duplicate/documents" in check_recorded(copy, page)
    head = page.partition("<section>")[0]
    assert "The source web loses" in head and "Documents that are not similar" in head


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("funnel.json", "funnel.json is damaged"),
        (".gristmill/run/mix.json", "the record of mix"),
        ("dup/duplicates.parquet", "duplicates.parquet is damaged"),
        ("dup/connected_components.parquet", "connected_components.parquet is damaged"),
        ("tokens/train/manifest.json", "manifest.json is damaged"),
    ],
)
def test_a_damaged_record_is_named(copy: Path, name: str, said: str) -> None:
    (copy / name).write_bytes(b"{")
    report((copy,))
    head = (copy / "report.html").read_text().partition("<section>")[0]
    assert said in head and "This record cannot be used" in head


def test_a_folder_of_no_run(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/run.json").write_text('{"steps": 20, "model.layers": 2}')  # of a training run
    with pytest.raises(UsageError, match="expected the --out of a gristmill run"):
        report((tmp_path / "model",))
    with pytest.raises(UsageError, match=r"expected the --out of a gristmill run, got no run\.json of one"):
        report((tmp_path,))


def write_clusters(path: Path, count: int) -> None:
    """Clusters of two to eleven documents, as the stage writes them."""
    members = [number for number in range(count) for _ in range(2 + number % 10)]
    table = {"cluster": members, "file": ["web/a.jsonl"] * len(members), "row": range(len(members))}
    pq.write_table(pa.table(table), path, row_group_size=1000)


def test_clusters_are_counted_by_size(copy: Path) -> None:
    pages = list[str]()
    for count in (100, 100_000):
        write_clusters(copy / "dup/connected_components.parquet", count)
        report((copy,))
        pages.append((copy / "report.html").read_text())
    small, page = pages
    assert "100,000 clusters by size; the largest has 11 documents" in page
    numbers = re.search(r'<table id="clusters">.*?</table>', page)
    assert numbers and re.findall(r'data-value="(\d+)"', numbers[0]) == ["10000", "20000", "40000", "30000"]
    assert page.count("<") < 1.1 * small.count("<")  # a browser has about as much to lay out, but for ticks of an axis


def test_a_place_is_shown_once_though_it_is_exact_and_near(tmp_path: Path) -> None:
    row = {"file": "web/a.jsonl", "row": 3, "benchmark": "quiz", "item": "quiz.jsonl@0", "text": "x", "item_text": "y"}
    rows = [
        row | {"match": "exact", "share": 0.5},
        row | {"match": "near", "share": 0.8},
        row | {"match": "near", "share": 0.7, "row": 4},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "spans.parquet")
    with pq.ParquetFile(tmp_path / "spans.parquet") as file:
        shown = sample_spans(file)["quiz"]
    assert sorted((span.key.row, span.match) for span in shown) == [(3, "exact 50%"), (4, "near 70%")]


def test_a_picture_is_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """matplotlib's savefig would draw it twice, which is a fifth of a report's time."""
    drawn = list[Figure]()
    draw = Figure.draw

    def count(figure: Figure, renderer: Any) -> None:
        drawn.append(figure)
        draw(figure, renderer)

    monkeypatch.setattr(Figure, "draw", count)
    assert draw_curves({"loss": [(1, 2), (2, 1)]}, "step", "loss").startswith("<svg")
    assert len(drawn) == 1
