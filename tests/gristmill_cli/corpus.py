"""A small deterministic corpus in every format, with near-duplicates and short documents."""

import gzip
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import zstandard

from tests.gristmill_cli.in_process import gristmill

ROOT = Path(__file__).resolve().parents[2]
WORDS = (ROOT / "tests" / "gristmill_cli" / "words.txt").read_text(encoding="utf-8").split()


def documents(source: str, count: int) -> Iterator[dict]:
    """Texts of 0 to 250 words; every tenth nearly repeats one before it, every twelfth is short."""
    chance = random.Random(source)
    texts: list[str] = []
    for number in range(count):
        words = chance.choices(WORDS, k=chance.randrange(60, 250))
        if number % 10 == 9:
            words = texts[chance.randrange(len(texts))].split(" ")
            words[len(words) // 2] = "altered"
        text = " ".join(words[:5] if number % 12 == 7 else words)
        texts.append(text)
        yield {"text": text, "id": f"{source}-{number}", "score": 1.50, "meta": {"n": 12345678901234567890123}}


def make_corpus(root: Path, reverse: bool = False) -> Path:
    """Five sources, six files, five formats; written in the other order when `reverse`."""
    names = ["book/b.jsonl", "c4/a.jsonl.gz", "c4/nested/deep er@1/ö.jsonl", "code/x.parquet", "web/2023/w.jsonl.zst",
             "tiny/t.arrow"]  # fmt: skip
    for name in reversed(names) if reverse else names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_records(path, list(documents(name, 3 if name.startswith("tiny") else 150)))
    return root


def write_records(path: Path, records: list[dict]) -> None:
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
    if path.suffix in (".parquet", ".arrow"):
        table = pa.table({"text": [record["text"] for record in records], "id": [record["id"] for record in records]})
        if path.suffix == ".parquet":
            pa.parquet.write_table(table, path, row_group_size=40)
        else:
            with pa.ipc.new_stream(str(path), table.schema) as stream:
                stream.write_table(table)
    else:
        wrap = {".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix, bytes)
        path.write_bytes(wrap(lines))


def tree(folder: Path, skip: tuple[str, ...] = ("run.json",)) -> dict[str, bytes]:
    """Every file a run wrote for others to read: name → bytes."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".gristmill" not in path.parts and path.name not in skip
    }


def run_arguments(corpus: Path, out: Path, *more: str) -> list[str]:
    options = ["--tokenizer.vocab_size", "420", "--mix.holdout", "0.05", "--filter.threshold", "100"]
    options += ["--keep", "train_text", *more]
    return [sys.executable, "-m", "gristmill_cli", "run", "--corpus", str(corpus), "--out", str(out), *options]


def run(corpus: Path, out: Path, *more: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`gristmill run` as a process of its own."""
    return subprocess.run(
        run_arguments(corpus, out, *more), cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def run_in_process(corpus: Path, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """`gristmill run` in this process, which has all modules and a fork server."""
    return gristmill(*run_arguments(corpus, out, *more)[3:])
