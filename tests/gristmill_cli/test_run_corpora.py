"""Runs of unusual corpora: another column, more formats, files that are not read, and folders that have moved."""

import json
import shutil
from pathlib import Path

import msgspec

from gristmill.io.documents import list_corpus
from gristmill.io.lines import read_lines
from tests.gristmill_cli.corpus import documents, run, write_records


def test_a_column_of_another_name_and_more_formats_are_read_and_the_rest_is_named(tmp_path):
    corpus, (book, web) = tmp_path / "corpus", ("book", "web")
    write_records(make(corpus / book / "b.jsonl"), [{"content": d["text"], "text": 5} for d in documents(book, 60)])
    rows = "".join(f'{i},"{d["text"]}"\n' for i, d in enumerate(documents(web, 60)))
    make(corpus / web / "w.CSV").write_text(f"id,content\n{rows}")
    for number, document in enumerate(documents("notes", 3)):
        make(corpus / "notes" / f"{number}.txt").write_text(document["text"])
    make(corpus / book / "README.md").write_text("not a document")
    options = ["--text_column", "content", "--normalize.read_also", "csv", "txt", "--mix.holdout", "0.1"]
    done = run(corpus, tmp_path / "out", *options)
    assert done.returncode == 0, done.stderr
    assert "not read" in done.stdout and "files not read: 1 .md" in done.stderr, done.stderr
    assert b"not read: .md" in (tmp_path / "out/normalized/.gristmill/normalize_text.ledger").read_bytes()
    counted = msgspec.json.decode((tmp_path / "out" / "funnel.json").read_bytes())["went"]
    assert {source: counted[source]["read"]["documents"] for source in counted} == {"book": 60, "web": 60, "notes": 3}
    assert all(json.loads(line)["text"] == 5 for line in lines_of(tmp_path / "out", "book"))


def make(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def lines_of(out: Path, source: str) -> list[bytes]:
    files = [file for folder in ("train_deduped", "holdout") for file in list_corpus(out / folder)]
    lines = [line for file in files for line in read_lines(file.path)]
    return [line for line in lines if json.loads(line)["gristmill_key"].startswith(source)]


def test_a_moved_corpus_and_a_moved_folder_are_still_done(finished, tmp_path):
    shutil.copytree(finished[0], tmp_path / "corpus", copy_function=shutil.copy2)
    shutil.copytree(finished[1], tmp_path / "out", copy_function=shutil.copy2)
    (tmp_path / "corpus").rename(tmp_path / "moved")
    record = tmp_path / "out" / "run.json"
    record.write_text(record.read_text().replace(str(finished[0]), str(tmp_path / "corpus")))
    for damaged in ("damaged", '{"apply": 5}'):
        record.write_text(damaged)
        assert run(tmp_path / "moved", tmp_path / "out", "--dry_run").returncode == 0
    done = run(tmp_path / "moved", tmp_path / "out", "--workers", "1")
    assert done.returncode == 0 and done.stderr.count("done already") >= 10, done.stderr
