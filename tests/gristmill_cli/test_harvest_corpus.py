"""The corpus gathered from this machine: as a real process, and the manual pages that a machine may lack."""

import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pyarrow.parquet
import pytest
import zstandard

SCRIPT = Path(__file__).resolve().parents[2] / "gristmill_cli" / "harvest_corpus.py"
BUDGET = 600_000


def harvest(*arguments: object, hash_seed: str = "0", cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command line, as a user does."""
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "COLUMNS": "100"}
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
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


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module; it is in no package."""
    monkeypatch.syspath_prepend(SCRIPT.parents[1])
    spec = importlib.util.spec_from_file_location("gristmill_cli.harvest_corpus", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def corpus_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*/*") if file.is_file())


def test_the_same_machine_gives_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    result = harvest("again", "--megabytes", BUDGET / 1e6, hash_seed="2", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert contents(tmp_path / "again") == contents(corpus)


def test_every_record_has_text_and_says_where_it_is_from(corpus: Path) -> None:
    for file in corpus_files(corpus):
        for record in records(file):
            assert isinstance(record["text"], str) and record["text"]
            assert "\0" not in record["text"]
            assert record["meta"]["path"] and record["meta"]["origin"]
            assert not record["meta"]["path"].startswith("/")


def test_sources_and_formats_are_several(corpus: Path) -> None:
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


def test_running_again_touches_nothing_but_what_a_larger_run_left(corpus: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(corpus, tmp_path / "corpus")
    times = {file: file.stat().st_mtime_ns for file in corpus_files(folder)}
    (folder / "github" / "github_07.jsonl").write_text("{}\n")
    assert harvest(folder, "--megabytes", BUDGET / 1e6).returncode == 0
    assert {file: file.stat().st_mtime_ns for file in corpus_files(folder)} == times


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    for target in (tmp_path, tmp_path / "thesis.tex"):
        result = harvest(target)
        assert result.returncode == 2
        assert str(target) in result.stderr and "Traceback" not in result.stderr
    assert contents(tmp_path) == {"thesis.tex": b"mine"}


@pytest.mark.parametrize("megabytes", ["0", "nan"])
def test_a_budget_that_is_none_is_refused(tmp_path: Path, megabytes: str) -> None:
    result = harvest(tmp_path / "corpus", "--megabytes", megabytes)
    assert result.returncode == 2
    assert "--megabytes" in result.stderr and "Traceback" not in result.stderr
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


def test_a_manual_page_becomes_plain_text(script: ModuleType) -> None:
    assert script.manual_page(PAGE, "").split("\n\n") == [
        "GRIND(1)",
        "NAME\ngrind - make flour",
        "WHAT IT DOES\nWords run on, see sieve(1), and caf\u0065\u0308.",
        "• a point",
        "-v\nSay more.\n  kept   as\n  it \\is\\n",
    ]


def test_what_is_no_manual_page_gives_nothing(script: ModuleType) -> None:
    assert script.manual_page(".so man1/other.1\n", "") == ""
    assert script.manual_page(".Dd today\n.Dt LS 1\n.Sh NAME\n", "") == ""


def test_docstrings_stand_under_their_names(script: ModuleType) -> None:
    long = "Grinds corn into flour, slowly, " * 3 + "and well."
    source = f'class Mill:\n    def grind(self):\n        """{long}"""\n\ndef short():\n    """Little."""\n'
    assert script.docstrings(source, "town/mill.py") == f"town.mill.Mill.grind\n\n{long}"
    assert script.docstrings("def broken(", "town/mill.py") == ""
