"""Benchmark: pairs, components and duplicates of many synthetic signatures within a memory budget.

    python benchmarks/bench_scale.py --folder /data/scale --documents 20_000_000 --memory 1GiB

A fifth of the signatures are near-copies of another one. Peak memory is that of the main process, from the
kernel, and that of all processes together, sampled five times per second.
"""

import hashlib
import os
import shutil
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if not __package__: sys.path[0] = str(ROOT)  # fmt: skip

import numpy as np
import psutil
import tyro
from numpy.typing import NDArray
from rich.table import Table

from dedup.candidates.signature_shards import write_shard
from dedup.minhash.signatures import Sketch
from gristmill.console import wide_console

SHARD_DOCUMENTS = 100_000
BATCH_DOCUMENTS = 10_000
REDPAJAMA_DOCUMENTS = 931_000_000


@dataclass(frozen=True)
class Measurement:
    """Measurements of one command: seconds; peak bytes of its main process, of all processes, and on disk."""

    name: str
    seconds: float
    peak: int
    peak_all: int
    peak_disk: int


def bench_scale(
    folder: Path,
    documents: int = 1_000_000,
    memory: str = "1GiB",
    large: str = "16GiB",
    target: int = REDPAJAMA_DOCUMENTS,
    pairs: bool = True,
) -> None:
    """Measure the stages that compare signatures.

    Args:
        folder: Folder for signatures (512 bytes per document) and results.
        documents: Number of signatures.
        memory: Memory budget, such as 1GiB.
        large: A second budget in which all data fits; it must give the same bytes.
        target: Number of documents to extrapolate to.
        pairs: Also measure SlimPajama's method, which writes candidate pairs to disk.
    """
    console = wide_console()
    signatures = folder / f"signatures-{documents}"
    if not signatures.is_dir():
        make_signatures(signatures, documents)
    found = {budget: run_stages(signatures, folder / budget, budget, pairs) for budget in (memory, large)}
    console.print(results_table(found, documents))
    same = digests(folder / memory) == digests(folder / large)
    console.print(f"results with {memory} and with {large}: {'the same bytes' if same else 'DIFFERENT BYTES'}")
    console.print(extrapolate(found[memory], documents, target))
    sys.exit(0 if same else 1)


def make_signatures(folder: Path, documents: int) -> None:
    """Write shards of random signatures, every fifth a copy that keeps 80 to 100 % of another's slots."""
    pool = np.random.default_rng(0).integers(0, 1 << 32, (BATCH_DOCUMENTS, 128), np.uint32)
    whole = folder.with_suffix(".partial")
    for start in range(0, documents, SHARD_DOCUMENTS):
        with write_shard(
            whole / f"part{start // SHARD_DOCUMENTS:05}.signatures.arrow", f"s/{start:012}.jsonl", Sketch()
        ) as shard:
            for row in range(0, min(SHARD_DOCUMENTS, documents - start), BATCH_DOCUMENTS):
                count = min(BATCH_DOCUMENTS, documents - start - row)
                chance = np.random.default_rng((start, row))
                shard.add(np.arange(row, row + count), _batch(chance, pool, count))
    whole.rename(folder)


def _batch(chance: np.random.Generator, pool: NDArray[np.uint32], count: int) -> NDArray[np.uint32]:
    values = chance.integers(0, 1 << 32, (count, 128), np.uint32)
    copies = np.arange(0, count, 5)
    others = np.where(chance.random((len(copies), 1)) < 0.5, pool[chance.integers(0, len(pool), len(copies))],
                      values[chance.integers(0, count, len(copies))])  # fmt: skip
    keeps = chance.random((len(copies), 128)) < chance.uniform(0.8, 1, (len(copies), 1))
    values[copies] = np.where(keeps, others, values[copies])
    return values


def run_stages(signatures: Path, out: Path, memory: str, pairs: bool) -> list[Measurement]:
    """Run and measure every command from scratch within a memory budget."""
    shutil.rmtree(out, ignore_errors=True)
    direct, seed = out / "direct", out / "pairs"
    command_lines = [
        ("components, no pairs", f"generate_connected_components --input_dir {direct} --signatures {signatures} "
                                 f"--out_file {direct}/c.parquet"),
        ("duplicates", f"generate_duplicates_dict --input_file {direct}/c.parquet --out_file {direct}/d.parquet"),
        ("pairs", f"generate_duplicate_pairs --input_dir {signatures} --out_file {seed}/duplicate_pairs.txt"),
        ("components of pairs", f"generate_connected_components --input_dir {seed} --out_file {seed}/c.parquet"),
    ]  # fmt: skip
    return [
        run_command(name, f"{command_line} --memory {memory}", out)
        for name, command_line in command_lines[: 4 if pairs else 2]
    ]


def run_command(name: str, command_line: str, out: Path) -> Measurement:
    """Run `gristmill <command_line>` and measure it."""
    out.mkdir(parents=True, exist_ok=True)
    start, disk, peak_all, ended = time.perf_counter(), 0, 0, 0
    process = psutil.Popen([sys.executable, "-m", "gristmill_cli", *command_line.split()], cwd=ROOT)
    while not ended:
        disk, peak_all = max(disk, folder_bytes(out)), max(peak_all, resident_bytes(process))
        time.sleep(0.2)
        ended, status, usage = os.wait4(process.pid, os.WNOHANG)
    if status:
        raise SystemExit(f"{command_line}: exit code {os.waitstatus_to_exitcode(status)}")
    return Measurement(name, time.perf_counter() - start, usage.ru_maxrss * 1024, peak_all, disk)


def resident_bytes(process: psutil.Process) -> int:
    """Resident bytes of a process and its descendants; shared pages count once per process."""
    total = 0
    for one in [process, *process.children(recursive=True)]:
        with suppress(psutil.Error):
            total += one.memory_info().rss
    return total


def folder_bytes(folder: Path) -> int:
    """Total bytes of the files below a folder; files removed meanwhile are skipped."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every result file, by relative path."""
    paths = [path for path in folder.rglob("*") if path.is_file() and ".gristmill" not in path.parts]
    found = {}
    for path in paths:
        with path.open("rb") as file:
            found[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def results_table(found: dict[str, list[Measurement]], documents: int) -> Table:
    table = Table(
        "budget", "stage", "seconds", "documents/s", "main process", "all processes", "disk at most", box=None
    )
    for column in table.columns[2:]:
        column.justify = "right"
    for budget, stages in found.items():
        for one in stages:
            table.add_row(budget, one.name, f"{one.seconds:,.1f}", f"{documents / one.seconds:,.0f}",
                          f"{one.peak / 2**20:,.0f} MiB",
                          f"{one.peak_all / 2**20:,.0f} MiB", f"{one.peak_disk / 2**30:,.1f} GiB")  # fmt: skip
    return table


def extrapolate(stages: list[Measurement], documents: int, target: int) -> str:
    """Linear extrapolation to `target` documents."""
    factor = target / documents
    hours = sum(one.seconds for one in stages[:2]) * factor / 3600
    disk = max(one.peak_disk for one in stages[:2]) * factor / 1e12
    return (
        f"{target:,} documents, extrapolated: {target * 520 / 1e12:.2f} TB of signatures, {disk:.2f} TB of work files, "
        f"{hours:.1f} hours on these {len(os.sched_getaffinity(0))} cores for components and duplicates"
    )


if __name__ == "__main__":
    tyro.cli(bench_scale)
