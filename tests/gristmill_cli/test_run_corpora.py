"""Runs of unusual corpora: another column, more formats, files that are not read, and folders that have moved."""

import json
import shutil
from pathlib import Path

import msgspec

from gristmill.io.corpus import list_corpus
from gristmill.io.lines import read_lines
from gristmill_cli.run import run
from gristmill_cli.run_config import Filter, RunConfig, Tokenizer
from gristmill_cli.run_records import load_record
from tests.gristmill_cli.corpus import documents, run_arguments, run_in_process, tree, write_records
from tests.gristmill_cli.in_process import gristmill


def test_a_column_of_another_name_and_more_formats_are_read_and_the_rest_is_named(tmp_path):
    corpus, (book, web) = tmp_path / "corpus", ("book", "web")
    write_records(make(corpus / book / "b.jsonl"), [{"content": d["text"], "text": 5} for d in documents(book, 60)])
    rows = "".join(f'{i},"{d["text"]}"\n' for i, d in enumerate(documents(web, 60)))
    make(corpus / web / "w.CSV").write_text(f"id,content\n{rows}")
    for number, document in enumerate(documents("notes", 3)):
        make(corpus / "notes" / f"{number}.txt").write_text(document["text"])
    make(corpus / book / "README.md").write_text("not a document")
    options = ["--text_column", "content", "--normalize.read_also", "csv", "txt", "--mix.holdout", "0.1"]
    done = run_in_process(corpus, tmp_path / "out", *options)
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
        assert run_in_process(tmp_path / "moved", tmp_path / "out", "--dry_run").returncode == 0
    done = run_in_process(tmp_path / "moved", tmp_path / "out", "--workers", "1")
    assert done.returncode == 0 and done.stderr.count("done already") >= 10, done.stderr


def test_sources_that_differ_in_format_and_text_field_are_one_corpus(tmp_path):
    """A table of sources; and whole folders of .txt are named before the run, with the option that reads them."""
    corpus, config = tmp_path / "corpus", tmp_path / "pipeline.toml"
    texts = {name: [d["text"] for d in documents(name, 60)] for name in ("book", "code", "news", "notes")}
    write_records(make(corpus / "book/b.jsonl"), [{"content": text, "id": i} for i, text in enumerate(texts["book"])])
    write_records(make(corpus / "raw/c.jsonl"), [{"meta": {"text": text}} for text in texts["code"]])
    write_records(make(corpus / "news/n.jsonl.gz"), [{"title": "News", "body": text} for text in texts["news"]])
    for number, text in enumerate(texts["notes"]):
        make(corpus / "notes" / f"{number:02}.txt").write_text(text)
    (corpus / "unused").mkdir()
    named = run_in_process(corpus, tmp_path / "out", "--dry_run")
    assert "note: 60 .txt files of 'notes' not read" in named.stderr and "read_also txt reads them" in named.stderr
    config.write_text(
        '[sources.book]\ncolumn = "content"\n[sources.code]\npath = "raw"\ncolumn = "meta.text"\n'
        '[sources.news]\ntemplate = "{title}\\n\\n{body}"\nweight = 2\n[sources.notes]\nformat = "txt"\n'
    )
    options = ["--config", str(config), "--mix.holdout", "0.1"]
    done = run_in_process(corpus, tmp_path / "out", *options)
    assert done.returncode == 0, done.stderr
    counted = msgspec.json.decode((tmp_path / "out" / "funnel.json").read_bytes())["went"]
    assert {name: counted[name]["read"]["documents"] for name in counted} == dict.fromkeys(texts, 60)
    assert counted["news"]["repeated"]["documents"] > 30 and "repeated" not in counted["book"]
    for name in texts:
        written = {json.loads(line)["text"] for line in lines_of(tmp_path / "out", name)}
        assert written and written <= {f"News\n\n{text}" if name == "news" else text for text in texts[name]}
    again = run_in_process(corpus, tmp_path / "out", *options)
    assert again.returncode == 0 and again.stderr.count("done already") >= 10, again.stderr
    config.write_text("[sources.book]\ncolum = 'content'\n")
    refused = run_in_process(corpus, tmp_path / "other", *options)
    assert refused.returncode == 2 and "sources" in refused.stderr and "did you mean column?" in refused.stderr, (
        refused.stderr
    )
    estimated = ["estimate" if word == "run" else word for word in run_arguments(corpus, tmp_path / "new", *options)]
    config.write_text("[sources.book]\ncolumn = 'content'\n[sources.code]\npath = 'raw'\n")
    done = gristmill(*estimated[3:], "--sample", "100kB")
    assert done.returncode == 0 and "would refuse this corpus. normalize_text: 60 of 120 records" in done.stderr, done


def test_how_a_corpus_is_compressed_and_cut_changes_no_token(tmp_path, monkeypatch):
    """Documents of a large file have a frame for each of its slices, by which encode cuts it again."""
    records = list(documents("book", 120))
    tokens = dict[str, dict[str, bytes]]()
    tasks = dict[str, int]()
    for suffix in (".jsonl", ".jsonl.gz", ".jsonl.zst", "cut.jsonl"):
        is_cut = suffix == "cut.jsonl"
        monkeypatch.setattr("gristmill.io.readers.SLICE_BYTES", 4_000 if is_cut else 1 << 26)
        corpus = tmp_path / suffix / "corpus"
        write_records(make(corpus / "book" / f"b{suffix.removeprefix('cut')}"), records)
        out = tmp_path / suffix / "out"
        run(RunConfig(corpus, out, workers=1, filter=Filter(100), tokenizer=Tokenizer(vocab_size=420)))
        (file,) = list_corpus(out / "normalized")
        assert file.name == "book/b.jsonl.zst"
        size_of_text = sum(len(line) for line in read_lines(file.path))
        assert 2 * file.size < size_of_text
        record = load_record(out, "encode")
        assert record is not None
        tasks[suffix] = record.tasks
        tokens[suffix] = tree(out / "tokens")
    assert all(files == tokens[".jsonl"] for files in tokens.values())
    assert tasks["cut.jsonl"] > tasks[".jsonl"] + 3
