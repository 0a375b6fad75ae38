"""Benchmark: peak memory of every stage of a run beyond its processes' own, on a corpus made to need much.

    python benchmarks/bench_stage_memory.py --folder /tmp/memory --memory 128MiB 512MiB --longest 24MB

The corpus has long lines, texts that are several times as large in memory as in a file, Parquet row groups of
hundreds of megabytes whose values are repeated, files of zstd and gzip that are a thousandth of their content, and
many small files. What a stage's processes take themselves, interpreter and libraries, is its peak on a small corpus.
"""

import gzip
import json
import os
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if not __package__: sys.path[0] = str(ROOT)  # fmt: skip

import pyarrow as pa
import pyarrow.parquet
import tyro
import zstandard

from benchmarks.dedup_tables import markdown
from benchmarks.process_memory import MemoryPeak, measure_peak
from gristmill.engine.options import parse_size

STAGES = (
    "normalize_text", "filter", "generate_exact_pairs", "to_hash", "generate_connected_components",
    "generate_duplicates_dict", "mix", "pass1", "pass2", "dedup_train", "train_tokenizer", "encode",
)  # fmt: skip
MIB = 1 << 20
_WORDS = tuple("".join(random.Random(n).choices("etaoinshrdlu", k=2 + n % 8)) for n in range(4000))


def bench_stage_memory(
    folder: Path, memory: tuple[str, ...] = ("128MiB", "512MiB"), longest: str = "24MiB", workers: int = 2
) -> None:
    """Run the stages one by one within each budget and print a table.

    Args:
        folder: Folder for the corpora and the runs; emptied first.
        memory: Memory budgets, such as 512MiB.
        longest: Size of the longest lines of the corpus; tables and compressed files are some multiples.
        workers: Worker processes of each stage.
    """
    shutil.rmtree(folder, ignore_errors=True)
    make_corpus(folder / "small", 1 << 14)
    make_corpus(folder / "large", parse_size(longest, "--longest"))
    own = run_stages(folder / "small", folder / "own", "512MiB", workers)
    found = {budget: run_stages(folder / "large", folder / budget, budget, workers) for budget in memory}
    head = ("stage", "processes", "own MiB a process", *(f"beyond, of {budget}" for budget in memory), "seconds")
    print(markdown(f"peak memory, {workers} workers, lines of {longest}", head, _rows(own, found), []))


def _rows(own: dict[str, MemoryPeak], found: dict[str, dict[str, MemoryPeak]]) -> list[list[str]]:
    rows = []
    for stage, base in own.items():
        peaks = [of_budget.get(stage) for of_budget in found.values()]
        beyond = [_beyond(peak, base, parse_size(budget)) for peak, budget in zip(peaks, found, strict=True)]
        seconds = "/".join(f"{peak.seconds:.1f}" if peak else "" for peak in peaks)
        rows.append([stage, str(base.processes), f"{base.bytes / base.processes / MIB:.0f}", *beyond, seconds])
    return rows


def _beyond(peak: MemoryPeak | None, base: MemoryPeak, budget: int) -> str:
    if peak is None:
        return "not reached"
    if peak.exit_code:
        return peak.output.strip().splitlines()[-1][:300]
    beyond = peak.bytes - base.bytes * peak.processes // base.processes  # a small corpus may need fewer workers
    return f"{beyond / MIB:.0f}" + (" **broken**" if beyond > budget else "")


def run_stages(corpus: Path, out: Path, memory: str, workers: int) -> dict[str, MemoryPeak]:
    """Run each stage in a process tree of its own; stop at the first that fails."""
    found = {}
    for stage in STAGES:
        options = ["--workers", str(workers), "--memory", memory, "--tokenizer.vocab_size", "500",
                   "--tokenizer.exact", "false", "--mix.holdout", "0.1", "--dedup.exact", "true",
                   "--keep", "train_text"]  # fmt: skip
        command = [sys.executable, "-m", "gristmill_cli", "run", "--corpus", str(corpus), "--out", str(out),
                   "--from", stage, "--until", stage, *options]  # fmt: skip
        found[stage] = peak = measure_peak(command, os.environ | {"PYTHONPATH": str(ROOT)})
        beyond = f"{peak.bytes / MIB:,.0f} MiB, {peak.with_files / MIB:,.0f} with files, {peak.seconds:.1f} s"
        print(f"{out.name} {stage}: {beyond}, exit code {peak.exit_code}", file=sys.stderr, flush=True)
        if peak.exit_code:
            print(peak.output, file=sys.stderr)
            break
    return found


def make_corpus(root: Path, size: int) -> None:
    """Write a corpus whose longest lines have `size` bytes."""
    chance = random.Random(size)
    for number in range(2):  # for two workers at the same time
        write_lines(root / f"long/{number}.jsonl", [words(chance, size), words(chance, size // 2), words(chance, 500)])
        write_lines(root / f"accents/{number}.jsonl", ["\U0001f600 e\u0301 " + words(chance, size // 4)])
        write_lines(root / f"escapes/{number}.jsonl", ["\u4e2d" * (size // 12), words(chance, 500)], ascii=True)
        write_lines(root / f"packed/{number}.jsonl.zst", [f"{chance.random()} " * (size // 20), "b" * (size // 2)])
        write_lines(root / f"packed/{number}.jsonl.gz", (f"{n} {chance.random()} " * 500 for n in range(size // 5000)))
        write_table(root / f"table/plain{number}.parquet", [words(chance, 20_000) for _ in range(size // 20_000 + 1)])
        values = [words(chance, size // 32) for _ in range(8)]
        write_table(root / f"table/repeated{number}.parquet", [values[n % 8] for n in range(100)])
    for number in range(300):
        write_lines(root / f"many/{number:04}.jsonl", [words(chance, 300 + n * 10) for n in range(20)])


def words(chance: random.Random, size: int) -> str:
    """Random words of about `size` characters."""
    block = " ".join(chance.choices(_WORDS, k=min(size // 6 + 1, 200_000)))
    return f"{chance.random()} " + (block * (size // len(block) + 1))[:size]


def write_lines(path: Path, texts: Iterator[str] | list[str], ascii: bool = False) -> None:
    """Write texts as JSON lines, compressed as the name says; `ascii`: other characters escaped."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"text": text, "id": n}, ensure_ascii=ascii) + "\n" for n, text in enumerate(texts))
    wrap = {".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix, bytes)
    path.write_bytes(wrap(lines.encode()))


def write_table(path: Path, texts: list[str]) -> None:
    """Write texts as one row group of a Parquet file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"text": texts, "id": range(len(texts))})
    pa.parquet.write_table(table, path, row_group_size=len(texts), dictionary_pagesize_limit=1 << 30)


if __name__ == "__main__":
    tyro.cli(bench_stage_memory)
