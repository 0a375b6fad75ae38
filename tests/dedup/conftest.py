"""A small corpus with planted near-duplicates, and the command lines as a user types them."""

import os
import random
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gristmill.io.writers import open_jsonl_writer
from tests.patience import patience

REPOSITORY = Path(__file__).resolve().parents[2]
ALPHABETS = ["abcdefghijklmnoprstuvwyz", "абвгдежзиклмнопрстуфхцчшыэюя", "αβγδεζηθικλμνξοπρστυφχψω"]
Run = Callable[..., subprocess.CompletedProcess[str]]


def prose(seed: int, words: int = 300) -> str:
    """Made-up words of one alphabet; two seeds share next to nothing."""
    chance = random.Random(seed)
    letters = ALPHABETS[seed % len(ALPHABETS)]
    return " ".join("".join(chance.choices(letters, k=chance.randint(3, 9))) for _ in range(words)) + "."


def alter(text: str, seed: int) -> str:
    """A near-duplicate: one word replaced, other case, other punctuation, other spaces."""
    words = text.split()
    words[random.Random(seed).randrange(len(words))] = "otherwise"
    return "  " + ", ".join(words).upper() + "!\n"


def write_documents(path: Path, texts: list[str]) -> None:
    with open_jsonl_writer(path) as sink:
        for text in texts:
            sink.write(msgspec.json.encode({"text": text}) + b"\n")


@pytest.fixture(scope="session")
def write() -> Callable[[Path, list[str]], None]:
    """Write texts as a corpus file."""
    return write_documents


@pytest.fixture(scope="session")
def texts_of() -> Callable[[int, int], list[str]]:
    """So many unrelated texts, from a first seed on."""
    return lambda count, first: [prose(seed) for seed in range(first, first + count)]


@pytest.fixture(scope="session")
def planted() -> dict[str, list[str]]:
    """File → texts. The clusters in them are PLANTED in test_command_lines."""
    strange = "book/a @1 of ::; 'naïve' файл.jsonl"
    return {
        "arxiv/a.jsonl": [prose(1), prose(2), "Short one.", prose(3), ""],
        "arxiv/b.jsonl.zst": [prose(4), alter(prose(1), 7), "short, one", prose(5)],
        strange: [alter(prose(3), 8), prose(6), "short one", alter(prose(6), 9), prose(3), "!?"],
    }


@pytest.fixture(scope="session")
def norm(tmp_path_factory: pytest.TempPathFactory, planted: dict[str, list[str]]) -> Path:
    """The planted corpus on disk."""
    root = tmp_path_factory.mktemp("corpus") / "NORM"
    for name, texts in planted.items():
        write_documents(root / name, texts)
    return root


@pytest.fixture(scope="session")
def run() -> Run:
    """Run a command line in the repository; `fails` is the exit code it must end with."""

    def run(line: str, fails: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
        ended = subprocess.run(
            arguments(line),
            cwd=REPOSITORY,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=patience(120),
        )
        assert ended.returncode == fails, ended.stdout + ended.stderr
        return ended

    return run


@pytest.fixture(scope="session")
def start() -> Callable[..., subprocess.Popen[bytes]]:
    """Start a command line in the repository and leave it running; options are those of Popen."""

    def start(line: str, **options: Any) -> subprocess.Popen[bytes]:
        options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **options}
        return subprocess.Popen(arguments(line), cwd=REPOSITORY, **options)

    return start


def arguments(line: str) -> list[str]:
    return [sys.executable if word == "python" else word for word in shlex.split(line)]


@pytest.fixture(scope="session")
def contents() -> Callable[[Path], dict[str, bytes]]:
    """Every file below a folder and its bytes, without state folders."""

    def read(folder: Path) -> dict[str, bytes]:
        paths = (path for path in folder.rglob("*") if path.is_file() and ".gristmill" not in path.parts)
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}

    return read
