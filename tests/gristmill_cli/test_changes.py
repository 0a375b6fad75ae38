"""A run whose corpus was edited, extended and shortened, or that was moved, has the bytes of a fresh run."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from gristmill_cli.run import run
from gristmill_cli.run_config import Filter, Mix, RunConfig, Tokenizer
from tests.gristmill_cli.corpus import documents, tree, write_records


def change(corpus: Path) -> None:
    """Edit a file, add one with copies of its documents, add a source, and remove another."""
    records = list(documents("book/b.jsonl", 150))
    records[3]["text"] = records[3]["text"].upper() + " and more"
    write_records(corpus / "book/b.jsonl", records[:-1])
    write_records(corpus / "c4/copies.jsonl.gz", records[10:20])
    (corpus / "new").mkdir()
    write_records(corpus / "new/n.parquet", list(documents("new", 40)))
    shutil.rmtree(corpus / "tiny")


def different(one: Path, other: Path) -> list[str]:
    """The files that only one of two folders has, or that are different in them."""
    ours, theirs = tree(one), tree(other)
    return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))


@pytest.mark.thorough
def test_a_changed_corpus_and_back_again_elsewhere(
    finished: tuple[Path, Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    for folder, name in zip(finished, ("corpus", "out"), strict=False):
        shutil.copytree(folder, tmp_path / name)
    record = tmp_path / "out/run.json"
    record.write_text(record.read_text().replace(str(finished[0]), str(tmp_path / "corpus")))
    shared = {"filter": Filter(100), "mix": Mix(holdout=0.05), "tokenizer": Tokenizer(vocab_size=420)}
    config = RunConfig(tmp_path / "corpus", tmp_path / "out", workers=1, **shared)
    change(config.corpus)
    run(config)
    run(replace(config, out=tmp_path / "fresh"))
    assert different(config.out, tmp_path / "fresh") == [] != different(config.out, finished[1])
    shutil.rmtree(config.corpus)
    shutil.copytree(finished[0], config.corpus)
    (tmp_path / "elsewhere/deeper").mkdir(parents=True)
    config.out.rename(tmp_path / "elsewhere/moved")
    monkeypatch.chdir(tmp_path / "elsewhere/deeper")
    back = replace(config, corpus=Path("../../corpus"), out=Path("../moved"))
    run(back)
    assert different(Path("../moved"), finished[1]) == []
    capfd.readouterr()
    run(back)
    assert all("done already" in line for line in capfd.readouterr().err.splitlines() if " read = " in line)
