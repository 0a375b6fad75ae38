"""`gristmill harvest`: the same machine gives the same bytes, and no file of the user is replaced."""

import json
from pathlib import Path

import pyarrow.parquet
import pytest
import zstandard

from gristmill.errors import UsageError
from gristmill.io.corpus import list_corpus, scan_corpus
from gristmill_cli.harvest import MARKER, docstrings, harvest_corpus

MEGABYTES = 0.6


def contents(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def records(file: Path) -> list[dict]:
    """Every record of a file, by readers that are not ours."""
    if file.suffix == ".parquet":
        return pyarrow.parquet.read_table(file).to_pylist()
    data = file.read_bytes()
    lines = zstandard.ZstdDecompressor().decompress(data) if file.suffix == ".zst" else data
    return [json.loads(line) for line in lines.splitlines()]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("harvest") / "corpus"
    harvest_corpus(folder, MEGABYTES)
    return folder


def test_the_budget_is_shared_and_every_record_has_text_and_its_path(corpus: Path) -> None:
    assert not scan_corpus(corpus).unread  # a run would name them
    sizes: dict[str, int] = {}
    for file in list_corpus(corpus):
        for record in records(file.path):
            assert record["text"] and "\0" not in record["text"] and not record["meta"]["path"].startswith("/")
            sizes[file.source] = sizes.get(file.source, 0) + len(record["text"].encode())
    assert {"docs", "github", "licences"} <= sizes.keys() and sum(sizes.values()) <= MEGABYTES * 1e6
    assert all(size <= MEGABYTES * 1e6 / 4 for source, size in sizes.items() if source != "github")


@pytest.mark.thorough
def test_one_that_was_killed_is_gathered_again_with_the_same_bytes_and_one_that_has_finished_is_left(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(corpus)
    (corpus / MARKER).write_bytes(b'{"megabytes":0.6}')
    next((corpus / "github").iterdir()).unlink()
    with pytest.raises(UsageError, match=r"has 0\.6 megabytes, not 1; try another folder"):
        harvest_corpus(corpus, 1)  # whose files would lie next to those of another size
    harvest_corpus(corpus, MEGABYTES)
    assert contents(corpus) == before
    monkeypatch.setattr("gristmill_cli.harvest._sources", lambda: pytest.fail("it has finished"))
    assert harvest_corpus(corpus, MEGABYTES).documents["github"]
    with pytest.raises(UsageError, match=r"has 0\.6 megabytes, not 1; try another folder"):
        harvest_corpus(corpus, 1)


def test_a_folder_of_the_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    for target in (tmp_path, tmp_path / "thesis.tex"):
        with pytest.raises(UsageError, match="expected a new or an empty folder"):
            harvest_corpus(target)
    with pytest.raises(UsageError, match="s3://bucket/a: expected a folder of this machine"):
        harvest_corpus(Path("s3://bucket/a"))
    with pytest.raises(UsageError, match="--megabytes: expected a number above 0"):
        harvest_corpus(tmp_path / "corpus", float("nan"))
    assert contents(tmp_path) == {"thesis.tex": b"mine"}


def test_docstrings_come_under_their_qualified_names() -> None:
    long = "Grinds corn into flour, slowly, " * 3 + "and well."
    source = f'class Mill:\n    def grind(self):\n        """{long}"""\n\ndef short():\n    """Little."""\n'
    assert docstrings(source, "town/mill.py") == f"town.mill.Mill.grind\n\n{long}"
    assert docstrings("def broken(", "town/mill.py") == ""
