"""Fixtures: small corpora, readers, and command lines run as processes."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from gristmill.counts import Counts
from gristmill.engine.options import RunOptions
from gristmill.io.artefacts import write_table
from gristmill.io.corpus import list_corpus
from gristmill.io.lines import read_lines
from gristmill.io.readers import plan_slices, read_documents
from gristmill.io.writers import Rejects
from preprocessing.shuffle_holdout import pass1, pass2
from tests.patience import patience

ROOT = Path(__file__).resolve().parents[2]
Records = list[dict[str, Any]]


def keys_of(records: list[dict]) -> list[str]:
    return [record["gristmill_key"] for record in records]


def write_provenance(path: Path, lines: list[tuple[str, int, str, int]]) -> None:
    columns = zip(*lines, strict=True)
    write_table(path, {n: pa.array(c) for n, c in zip(("file", "row", "kept_file", "kept_row"), columns, strict=True)})


@pytest.fixture
def quiet() -> RunOptions:
    return RunOptions(workers=1, quiet=True)


@pytest.fixture
def write() -> Callable[[Path, Records], Path]:
    """Write records as JSON lines."""

    def write(path: Path, records: Records) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
        return path

    return write


@pytest.fixture
def read() -> Callable[[Path], Records]:
    """Every record below a folder, in the order of files and rows."""

    def read(folder: Path) -> Records:
        files = list_corpus(folder)
        return [msgspec.json.decode(line) for file in files for line in read_lines(file.path) if line]

    return read


@pytest.fixture
def read_texts(tmp_path: Path) -> Callable[[Path], list[str]]:
    def texts(folder: Path) -> list[str]:
        slices = [part for file in list_corpus(folder) for part in plan_slices(file)]
        found = [read_documents(part, Counts({}, []), Rejects(tmp_path / "rejects")) for part in slices]
        return [document.text for documents in found for document in documents]

    return texts


@pytest.fixture
def corpus(tmp_path: Path, write: Callable[[Path, Records], Path]) -> Callable[..., Path]:
    """Write NORM/<source>/<i>.jsonl with a number of documents for each source: corpus(book=10, c4=20)."""

    def corpus(name: str = "norm", files: int = 2, **sizes: int) -> Path:
        for source, size in sizes.items():
            texts = [{"text": f"{source} document {i} " + "and more of it " * (i % 5), "id": i} for i in range(size)]
            for part in range(files):
                write(tmp_path / name / source / f"{part}.jsonl", texts[part::files])
        return tmp_path / name

    return corpus


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Start a command line, such as start("preprocessing/filter.py", …), outside the repository's folder."""

    def start(*arguments: object, seed: str = "0") -> subprocess.Popen[str]:
        words = list(map(str, arguments))
        if words[0].endswith(".py"):
            words[0] = str(ROOT / words[0])
        return subprocess.Popen(
            [sys.executable, *words],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": "" if words[0].endswith(".py") else str(ROOT)},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


@pytest.fixture
def run(start: Callable[..., subprocess.Popen[str]]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command line to its end."""

    def run(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
        process = start(*arguments, **options)
        out, err = process.communicate(timeout=patience(120))
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    return run


@pytest.fixture
def digest() -> Callable[[Path], dict[str, str]]:
    """Name and SHA-256 of every file below a folder, outside .gristmill."""

    def digest(folder: Path) -> dict[str, str]:
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and ".gristmill" not in path.parts]
        return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}

    return digest


@pytest.fixture
def mix(tmp_path: Path, quiet: RunOptions, read) -> Callable[..., list[str]]:
    """Run both passes; return the keys of all output documents, train and holdout."""

    def mix(norm: Path, name: str = "mixed", holdout: float = 0.0, **arguments) -> list[str]:
        out = tmp_path / name
        pass1(norm, out / "pass1", options=quiet, **arguments)
        pass2(0, 10**9, 1, out / "pass1", out / "train", out / "holdout", holdout, quiet)
        return keys_of(read(out / "train")) + keys_of(read(out / "holdout"))

    return mix
