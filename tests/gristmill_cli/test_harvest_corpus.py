"""`gristmill harvest_corpus` in a process, and the rendering of manual pages, which needs groff."""

import hashlib
import io
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet
import pytest
import zstandard

from gristmill.errors import UsageError
from gristmill_cli.harvest.harvest_corpus import (
    Candidate,
    SearchRule,
    _find_candidates,
    docstrings,
    harvest_corpus,
    render_manual,
    troff_source,
)
from tests.gristmill_cli.corpus import ROOT

BUDGET = 600_000
needs_groff = pytest.mark.skipif(
    shutil.which("groff") is None, reason="groff, which renders manual pages, is not installed"
)


def harvest(*arguments: object, hash_seed: str = "0", cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command line, as a user does."""
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "gristmill_cli", "harvest_corpus", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd, check=False)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def records(file: Path) -> list[dict]:
    """Every record of a file, by readers that are not ours."""
    if file.suffix == ".parquet":
        return pyarrow.parquet.read_table(file).to_pylist()
    data = file.read_bytes()
    if file.suffix == ".zst":
        data = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)).read()
    assert data.endswith(b"\n")
    return [json.loads(line) for line in data[:-1].split(b"\n")]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("harvest") / "corpus"
    result = harvest(folder, "--megabytes", BUDGET / 1e6, hash_seed="1")
    assert result.returncode == 0, result.stderr
    assert all(word in result.stdout for word in ("docs", "licences", "manual", "github", "documents"))
    return folder


@pytest.fixture(scope="module")
def listed() -> Iterator[None]:
    """This machine's files are listed once for runs in this process: that takes longer than all else."""
    found: dict[str, list[Candidate]] = {}

    def once(rules: list[SearchRule]) -> list[Candidate]:
        key = repr([rule[:2] for rule in rules])
        return found.get(key) or found.setdefault(key, _find_candidates(rules))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gristmill_cli.harvest.harvest_corpus._find_candidates", once)
        yield


def corpus_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*/*") if file.is_file())


def test_the_same_machine_gives_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    result = harvest("again", "--megabytes", BUDGET / 1e6, hash_seed="2", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert contents(tmp_path / "again") == contents(corpus)


def test_every_record_has_text_and_its_path(corpus: Path) -> None:
    for file in corpus_files(corpus):
        for record in records(file):
            assert isinstance(record["text"], str) and record["text"]
            assert "\0" not in record["text"]
            assert record["meta"]["path"] and record["meta"]["origin"]
            assert not record["meta"]["path"].startswith("/")


def test_there_are_several_sources_and_formats(corpus: Path) -> None:
    files = corpus_files(corpus)
    assert {"docs", "github", "licences"} <= {file.parent.name for file in files}
    assert {file.name.partition(".")[2] for file in files} == {"jsonl", "jsonl.zst", "parquet"}
    assert all(file.name.startswith(f"{file.parent.name}_0") for file in files)


def test_the_budget_is_respected_and_shared(corpus: Path) -> None:
    sizes: dict[str, int] = {}
    for file in corpus_files(corpus):
        text = sum(len(record["text"].encode()) for record in records(file))
        sizes[file.parent.name] = sizes.get(file.parent.name, 0) + text
    assert 0.8 * BUDGET < sum(sizes.values()) <= BUDGET
    assert all(size <= BUDGET // 4 for source, size in sizes.items() if source != "github")


def test_running_again_only_removes_files_of_a_larger_run(corpus: Path, tmp_path: Path, listed: None) -> None:
    folder = shutil.copytree(corpus, tmp_path / "corpus")
    times = {file: file.stat().st_mtime_ns for file in corpus_files(folder)}
    (folder / "github" / "github_07.jsonl").write_text("{}\n")
    with (folder / ".harvest").open("a") as marker:
        marker.write(f"{hashlib.sha256(b'{}' + chr(10).encode()).hexdigest()}  github/github_07.jsonl\n")
    harvest_corpus(folder, BUDGET / 1e6)
    assert {file: file.stat().st_mtime_ns for file in corpus_files(folder)} == times


@pytest.mark.parametrize("name", ["github/github_2024_mine.jsonl", "github/github_00.jsonl", "docs/docs_07.parquet"])
def test_files_of_the_user_are_never_replaced(corpus: Path, tmp_path: Path, listed: None, name: str) -> None:
    folder = shutil.copytree(corpus, tmp_path / "corpus")
    (folder / name).write_text("mine")
    with pytest.raises(UsageError, match=f"{name} was not written by this command, or changed since"):
        harvest_corpus(folder, BUDGET / 2e6)
    assert (folder / name).read_text() == "mine"


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    for target in (tmp_path, tmp_path / "thesis.tex"):
        result = harvest(target)
        assert result.returncode == 2
        assert str(target) in result.stderr and "Traceback" not in result.stderr
    assert contents(tmp_path) == {"thesis.tex": b"mine"}


@pytest.mark.parametrize("megabytes", [0.0, math.nan])
def test_a_budget_of_nothing_is_refused(tmp_path: Path, megabytes: float) -> None:
    with pytest.raises(UsageError, match="--megabytes"):
        harvest_corpus(tmp_path / "corpus", megabytes)
    assert not (tmp_path / "corpus").exists()


PAGE = r"""'\" t
.\" a comment
.de Vb
.ft CW
..
.TH GRIND 1 "today" "mill"
.SH NAME
grind \- make \fIflour\fR
.SH "WHAT IT DOES"
Words run
on, see
.BR sieve (1),
and caf\(:e.
.if t .B for printers only
.ie n \{\
.IP \(bu 2
.\}
.el \{\
.IP x 2
.\}
a point
.TP
.B \-v
Say more.
.nf
  kept   as
  it \\is\en
.fi
"""


@needs_groff
def test_a_manual_page_is_rendered_as_plain_text() -> None:
    header, *parts = render_manual([PAGE])[0].split("\n\n")
    assert header.split()[0] == header.split()[-1] == "GRIND(1)"
    assert [" ".join(part.split()) for part in parts[:4]] == [
        "NAME grind - make flour",
        "WHAT IT DOES Words run on, see sieve(1), and cafë.",
        "• a point",
        "-v Say more. kept as it \\is\\n",
    ]
    assert "kept   as\n" in parts[3]  # verbatim, between .nf and .fi


@needs_groff
def test_pages_are_rendered_apart_from_their_neighbours() -> None:
    pages = [PAGE.replace("GRIND", f"GRIND{number}") for number in range(4)]
    alone = [render_manual([page])[0] for page in pages]
    assert render_manual(pages) == alone
    assert [text.partition("(")[0] for text in alone] == ["GRIND0", "GRIND1", "GRIND2", "GRIND3"]
    broken = [".TH OPEN 1\n.de NAMED endofmacro\n", ".TH END 1\n.ex\n"]
    assert render_manual([*pages[:2], *broken, *pages[2:]])[::5] == [alone[0], alone[3]]


def test_manual_pages_are_told_from_other_files() -> None:
    assert troff_source(PAGE, "") == PAGE
    assert troff_source(".so man1/other.1\n", "") == ""
    assert troff_source("Words that are no troff\n", "") == ""


def test_without_groff_there_are_no_manual_pages(
    tmp_path: Path, listed: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    harvest_corpus(tmp_path / "corpus", 0.1)
    assert capsys.readouterr().err == "note: groff is not installed: the corpus will have no manual pages\n"
    found = [record for file in corpus_files(tmp_path / "corpus") for record in records(file)]
    assert found and all(record["meta"]["origin"] != "man" for record in found)


def test_docstrings_come_under_their_qualified_names() -> None:
    long = "Grinds corn into flour, slowly, " * 3 + "and well."
    source = f'class Mill:\n    def grind(self):\n        """{long}"""\n\ndef short():\n    """Little."""\n'
    assert docstrings(source, "town/mill.py") == f"town.mill.Mill.grind\n\n{long}"
    assert docstrings("def broken(", "town/mill.py") == ""


def test_a_bucket_is_refused() -> None:
    with pytest.raises(UsageError, match="s3://bucket/a: expected a folder of this machine"):
        harvest_corpus(Path("s3://bucket/a"))
