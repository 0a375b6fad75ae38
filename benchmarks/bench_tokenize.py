"""Benchmark: tokenization speed on one core, our encoder against the tokenizer's own library, ids compared.

    python benchmarks/bench_tokenize.py tokenizer.model NORM/book NORM/wikipedia …
    python benchmarks/bench_tokenize.py tokenizer.json NORM/book NORM/wikipedia …

The library is SentencePiece for its models, and tokenizers for a tokenizer.json or a rank file of tiktoken; our encoder
is bpe.py or gigatoken. Each path, a corpus file or folder, is a row of the table. Cold: an encoder with an empty word
cache. Warm: a second run of the same encoder, as on a much larger corpus. Repetitive text favours our encoder.
"""

import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import numpy as np
import tyro
from rich.table import Column, Table

from gristmill.batches import batched
from gristmill.command import run_with_exit_code
from gristmill.counts import Counts
from gristmill.errors import UsageError
from gristmill.io.corpus import list_corpus
from gristmill.io.documents import CorpusFile
from gristmill.io.readers import plan_slices, read_documents
from gristmill.io.writers import Rejects
from gristmill.text import utf8_size
from preprocessing.tokenize_corpus import BATCH_CHARACTERS
from preprocessing.tokenizer.loading import new_encoder

MEGABYTE = 1_000_000


@dataclass
class Result:
    """Measurements of one text: sizes, MB per processor second of each encoder, and documents with different ids."""

    name: str
    documents: int
    megabytes: float
    tokens: int
    library: float
    cold: float
    warm: float
    different: int


def bench_tokenize(
    tokenizer: tyro.conf.Positional[Path],
    paths: tyro.conf.Positional[list[Path]],
    megabytes: float = 50,
    repeat: int = 3,
) -> Table:
    """Encode each text with the tokenizer's own library and with our encoder, on one core.

    Args:
        tokenizer: A SentencePiece .model file, a tokenizer.json, or a rank file of tiktoken.
        paths: Corpus files (.jsonl, .jsonl.zst, .parquet, …) or folders of them.
        megabytes: Maximum text per path, in millions of bytes.
        repeat: Runs of our encoder; the fastest is reported. The library runs once.
    """
    if not tokenizer.is_file():
        raise UsageError(f"{tokenizer}: no such file: give a tokenizer")
    model, encoder = new_encoder(tokenizer)
    results = [measure(str(path), read_texts(path, megabytes), tokenizer, repeat) for path in paths]
    return results_table(results, encoder.fallback, "SentencePiece" if model.kind == "sentencepiece" else "tokenizers")


def measure(name: str, texts: list[list[str]], tokenizer: Path, repeat: int) -> Result:
    """Time both encoders on the same batches, and compare every document's ids."""
    cold, warm = [], []
    for _ in range(max(1, repeat)):
        model, encoder = new_encoder(tokenizer)
        for times in (cold, warm):
            start = time.process_time()
            ours = [encoder.encode(batch) for batch in texts]
            times.append(time.process_time() - start)
    slow, different = 0.0, 0
    for batch, (ids, offsets) in zip(texts, ours, strict=True):
        start = time.process_time()
        theirs = [model.encode(text) for text in batch]
        slow += time.process_time() - start
        parts = (ids[start:end] for start, end in pairwise(offsets))
        different += sum(not np.array_equal(part, expected) for part, expected in zip(parts, theirs, strict=True))
    size = sum(utf8_size(text) for batch in texts for text in batch) / MEGABYTE
    tokens, documents = sum(len(ids) for ids, _ in ours), sum(map(len, texts))
    speeds = (size / max(seconds, 1e-9) for seconds in (slow, min(cold), min(warm)))
    return Result(name, documents, size, tokens, *speeds, different)


def read_texts(path: Path, megabytes: float) -> list[list[str]]:
    """The first texts of a corpus file or folder, up to a size, in the batches of tokenize_corpus."""
    files = list_corpus(path) if path.is_dir() else [CorpusFile(path, path.name, path.stat().st_size)]
    slices = (part for file in files for part in plan_slices(file))
    found, left = [], megabytes * MEGABYTE
    with TemporaryDirectory() as folder:
        rejects = Rejects(Path(folder) / "rejects")
        for document in (document for part in slices for document in read_documents(part, Counts({}, []), rejects)):
            left -= utf8_size(document.text)
            if left < 0:
                break
            found.append(document)
    return [
        [document.text for document in batch]
        for batch in batched(found, size=BATCH_CHARACTERS, size_of=lambda document: len(document.text))
    ]


def results_table(results: list[Result], fallback: str, library: str) -> Table:
    """The table, one row per text."""
    numbers = ("documents", "MB", "bytes/token", f"{library} MB/s", "ours, cold", "ours, warm", "different")
    title = f"One core. Encoded by {library}: {fallback}" if fallback else "One core"
    table = Table("text", *(Column(name, justify="right") for name in numbers), title=title)
    for result in results:
        table.add_row(
            result.name, f"{result.documents:,}", f"{result.megabytes:.1f}",
            f"{result.megabytes * MEGABYTE / max(1, result.tokens):.2f}", f"{result.library:.1f}",
            *(f"{speed:.1f} ({speed / result.library:.1f}×)" for speed in (result.cold, result.warm)),
            f"{result.different:,}",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    sys.exit(run_with_exit_code(lambda: tyro.cli(bench_tokenize)))
