"""The stages that a run has if they are asked for: the same bytes on disk, in a bucket, by shards, and after kills."""

import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from gristmill.io.readers import read_corpus
from gristmill_cli.report.write import report
from tests.gristmill_cli.corpus import ROOT, documents, run, run_arguments, run_in_process, tree, write_records
from tests.gristmill_cli.pages import Numbers, check_recorded
from tests.object_store import Store, object_store
from tests.patience import patience

STAGES = ("normalized", "lines", "decontaminated")
NOTICE = "All rights are reserved by the miller and his heirs."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus with a line that repeats, words of a list, and items of a benchmark; the recipe and the benchmark."""
    folder, chance = tmp_path_factory.mktemp("rewriting"), random.Random(3)
    for name in ("book/b.jsonl", "web/2023/w.jsonl.gz", "code/x.parquet"):
        rows = list(documents(name, 60))
        for row in rows:
            words = row["text"].split()
            row["text"] += f"\n{NOTICE}" * (chance.random() < 0.5)
            is_bad = name.startswith("web") and chance.random() < 0.2
            row["text"] += " tares and chaff" * is_bad * len(words)
            row["url"] = f"https://{chance.choice('abc') if name.startswith('web') else 'a'}.example/{row['id']}"
        (folder / "corpus" / name).parent.mkdir(parents=True)
        write_records(folder / "corpus" / name, rows)
    items = [row["text"].split()[9:40] for row in chance.sample(list(documents("book/b.jsonl", 60)), 5)]
    (folder / "quiz").mkdir()
    (folder / "quiz/q.jsonl").write_text("".join(json.dumps({"question": " ".join(item)}) + "\n" for item in items))
    (folder / "tares.txt").write_text("tares\nchaff\n")
    (folder / "c.txt").write_text("c.example\n")
    (folder / "own.toml").write_text(
        'listed_urls.file = "c.txt"\nlisted_words = { file = "tares.txt", max = 0.2 }\nlatin_letters.min = 0.1\n'
    )
    return folder


def options(folder: Path, quiz: str = "") -> tuple[str, ...]:
    return ("--recipe", str(folder / "own.toml"), "--lines.unit", "line", "--decontaminate.against",
            quiz or str(folder / "quiz"), "--decontaminate.policy", "cut", "--workers", "2")  # fmt: skip


@pytest.fixture(scope="module")
def alone(folder: Path) -> Path:
    done = run_in_process(folder / "corpus", folder / "out", *options(folder))
    assert done.returncode == 0, done.stderr
    assert "quiz/q: 5 of 5 items found" in done.stderr
    return folder / "out"


def written(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if ".gristmill/" not in name and name != "run.json"}


def test_each_stage_takes_what_it_is_for(folder: Path, alone: Path) -> None:
    texts = {stage: [it.text for it in read_corpus(alone / stage)] for stage in STAGES}
    urls = [it.value("url") for it in read_corpus(folder / "corpus") if it.value("url")]
    assert len(urls) > len(texts["normalized"]) - 60 and any("c.example" in url for url in urls)
    assert sum(NOTICE in text for text in texts["normalized"]) > 20
    assert sum(NOTICE in text for text in texts["lines"]) == 1
    assert len(texts["decontaminated"]) == len(texts["lines"])
    assert sum(a != b for a, b in zip(texts["lines"], texts["decontaminated"], strict=True)) >= 5
    assert not any(str(it.value("url")).startswith("https://c.") for it in read_corpus(alone / "train"))


def test_the_report_shows_what_they_took(alone: Path) -> None:
    report((alone,))
    page = (alone / "report.html").read_text()
    (alone / "report.html").unlink()
    named = check_recorded(alone, page)
    assert "decontaminated.benchmarks.json#/benchmarks/quiz~1q/documents/book" in named
    lost = pq.read_table(alone / "lines.lines.parquet").filter(pc.field("file") == "book/b.jsonl.zst")
    row = [len(lost), sum(lost["units"].to_pylist()), sum(lost["bytes"].to_pylist())]
    assert re.search(
        r"<td[^>]*>book</td><td [^>]*>60</td>" + "".join(rf'<td data-value="{it}"[^>]*>.*?</td>' for it in row), page
    )
    text = Numbers(page).text
    spans = pq.read_table(alone / "decontaminated.contamination.parquet").to_pylist()
    found = len({(it["file"], it["row"]) for it in spans})
    assert f"Policy cut: {found} documents with an item; 0 removed, {found} rewritten" in text and NOTICE in text
    shown = [it for it in spans if " ".join(it["text"].split()) in text and it["item_text"] in text]
    assert len({it["item"] for it in shown}) == 2


@pytest.mark.thorough
def test_three_shards_write_the_same_bytes(folder: Path, alone: Path, tmp_path: Path) -> None:
    command = run_arguments(folder / "corpus", tmp_path / "out", *options(folder))
    shards = [subprocess.Popen([*command, "--shard", f"{number}/3"], cwd=ROOT) for number in range(3)]
    assert [shard.wait(patience(180)) for shard in shards] == [0, 0, 0]
    assert written(tree(tmp_path / "out")) == written(tree(alone))


@pytest.mark.thorough
def test_killed_runs_end_with_the_same_bytes(folder: Path, alone: Path, tmp_path: Path) -> None:
    chance = random.Random(1)
    for _ in range(4):
        process = subprocess.Popen(run_arguments(folder / "corpus", tmp_path / "out", *options(folder)), cwd=ROOT,
                                   start_new_session=True, stderr=subprocess.DEVNULL)  # fmt: skip
        deadline = time.monotonic() + chance.uniform(1, 5)
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    done = run(folder / "corpus", tmp_path / "out", *options(folder))
    assert done.returncode == 0, done.stderr
    assert written(tree(tmp_path / "out")) == written(tree(alone))


@pytest.fixture(scope="module")
def store(folder: Path) -> Iterator[Store]:
    with object_store() as running:
        running.upload_tree(folder / "corpus", "corpus")
        running.upload_tree(folder / "quiz", "quiz")
        yield running


@pytest.mark.thorough
def test_a_bucket_has_the_same_bytes(store: Store, folder: Path, alone: Path) -> None:
    done = run(
        Path("s3://bucket/corpus"), Path("s3://bucket/out"), *options(folder, "s3://bucket/quiz"), **store.environment
    )
    assert done.returncode == 0, done.stderr
    assert written(store.tree("out")) == written(tree(alone))
