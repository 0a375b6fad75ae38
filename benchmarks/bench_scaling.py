"""Benchmark: how requests, driver time and memory of every stage grow with the slices of a corpus in a bucket.

    python benchmarks/bench_scaling.py --slices 1_000 10_000 100_000

Measured: the stages' own code in the driver (listing, planning, identities, records, ledgers), which runs as it is,
against a bucket in memory that counts requests. Modelled: the tasks. None runs; each counts the requests that it would
send, and its outputs, counts and value are made up. A slice is a file of 60 MB, with no content.
See docs/concepts/scaling.md.
"""

import ctypes
import gc
import math
import multiprocessing
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import tyro

from benchmarks.scaling_store import BUCKET, CountingStore
from benchmarks.scaling_tasks import DOCUMENTS, SLICE_BYTES, ModelExecutor, TaskModel
from dedup.candidates.signature_shards import SUFFIX
from dedup.dedup_train import dedup_train
from dedup.generate_connected_components import generate_connected_components
from dedup.generate_duplicates_dict import generate_duplicates_dict
from dedup.generate_exact_pairs import generate_exact_pairs
from dedup.to_hash import to_hash
from gristmill.console import wide_console
from gristmill.engine.executors.context import ExecutionContext
from gristmill.engine.executors.staging import Scratch
from gristmill.engine.options import RunOptions
from preprocessing.filter import filter as find_short
from preprocessing.normalize_text import normalize_text
from preprocessing.shuffle_holdout import pass1, pass2
from preprocessing.tokenize_corpus import tokenize_corpus
from preprocessing.train_tokenizer import train_tokenizer

SOURCES = 5
MEMORY = "1GiB"  # so little that no stage joins in memory what larger corpora join on disk
_RAW, _NORM, _SIGNED, _DUP = (BUCKET / name for name in ("raw", "norm", "minhash", "dup"))
_SHORT, _COPIES = BUCKET / "filtered.pickle", _DUP / "duplicate_pairs_exact.parquet"
_MIXED, _TRAIN, _HOLDOUT, _CLEAN, _TOKENIZER = (
    BUCKET / name for name in ("pass1", "train", "holdout", "clean", "tokenizer/tokenizer.model")
)
_ALL = sys.maxsize
_HOLDOUT_BYTES = 200_000
_CLUSTERS, _DUPLICATES = _DUP / "connected_components.parquet", _DUP / "duplicates.parquet"
_AFTER_MIX = {"dedup_train": _TRAIN, "train_tokenizer": _CLEAN, "tokenize_corpus": _CLEAN}  # what they read
_FILES: dict[str, tuple[Path, ...]] = {  # single files that the stages read
    "to_hash": (_COPIES,),
    "generate_connected_components": (_COPIES.with_suffix(".txt"),),
    "generate_duplicates_dict": (_CLUSTERS, _SHORT),
    "pass1": (_DUPLICATES, _SHORT),
    "tokenize_corpus": (_TOKENIZER,),
}


def _normalize(options: RunOptions) -> Any:
    normalize_text(_RAW, _NORM, options=options)


def _sign(options: RunOptions) -> Any:
    to_hash("all", _NORM, _SIGNED, 0, "0", 0, _ALL, skip=_COPIES, options=options)


def _remove(options: RunOptions) -> Any:
    generate_duplicates_dict(_CLUSTERS, _DUPLICATES, options, dropped=(_SHORT,), verify="jaccard", corpus=_NORM)


def _mix(options: RunOptions) -> Any:
    pass1(_NORM, _MIXED, _DUPLICATES, _SHORT, "s0=1.5", options=options)


STAGES: dict[str, Callable[[RunOptions], Any]] = {
    "normalize_text": _normalize,
    "filter": lambda options: find_short(_NORM, _SHORT, 0, "all", 200, options),
    "generate_exact_pairs": lambda options: generate_exact_pairs(
        _NORM, _COPIES.with_suffix(".txt"), options=options
    ),
    "to_hash": _sign,
    "generate_connected_components": lambda options: generate_connected_components(
        _DUP, _CLUSTERS, _SIGNED, options=options
    ),
    "generate_duplicates_dict": _remove,
    "pass1": _mix,
    "pass2": lambda options: pass2(0, _ALL, 1, _MIXED, _TRAIN, _HOLDOUT, options=options),
    "dedup_train": lambda options: dedup_train(1, _TRAIN, _HOLDOUT, _CLEAN, options),
    "train_tokenizer": lambda options: train_tokenizer(_CLEAN, _TOKENIZER.parent, options=options),
    "tokenize_corpus": lambda options: tokenize_corpus(_CLEAN, _TOKENIZER, BUCKET / "tokens", options),
}  # fmt: skip


@dataclass(frozen=True)
class Cost:
    """What one run of a stage over so many slices cost.

    Attributes:
        requests: Of the driver and of all tasks.
        driver_requests: Of the driver alone, such as a LIST for 1,000 objects.
        seconds: Processor time of the driver.
        memory: Bytes of resident memory at the peak, beyond those before the run.
        pickled: Bytes of all tasks as they are sent to workers.
        again_requests, again_seconds: The same of a second run, which finds everything done.
    """

    stage: str
    slices: int
    tasks: int
    requests: int
    driver_requests: int
    seconds: float
    memory: int
    pickled: int
    again_requests: int
    again_seconds: float


def run_stage(stage: str, slices: int, store: CountingStore, memory: str = MEMORY) -> Cost:
    """Run a stage twice over the corpus in `store`; `memory` is the option of that name."""
    executor = ModelExecutor(store, TaskModel(corpus_names(slices)))
    with store.in_use(), tempfile.TemporaryDirectory() as folder:
        place = ExecutionContext(executor, Scratch(Path(folder)), lambda: None, set())
        options = RunOptions(workers=4, memory=memory, quiet=True, of_run=place)
        before = _resident_bytes()
        requests, seconds = _driver_cost(stage, options, executor)
        resident = _status("VmHWM") - before
        tasks, sent, pickled = executor.tasks, executor.requests, executor.pickled
        again_requests, again_seconds = _driver_cost(stage, options, executor)
        assert executor.tasks == tasks, f"{stage}: {executor.tasks - tasks} tasks ran again"
    return Cost(
        stage, slices, tasks, requests + sent, requests, seconds, resident, pickled, again_requests, again_seconds
    )


def _driver_cost(stage: str, options: RunOptions, executor: ModelExecutor) -> tuple[int, float]:
    """Run a stage; return the driver's requests and processor time."""
    requests, seconds, started = executor.store.requests.total(), executor.seconds, time.process_time()
    STAGES[stage](options)
    seconds = time.process_time() - started - (executor.seconds - seconds)
    return executor.store.requests.total() - requests, seconds


def corpus_names(slices: int) -> list[str]:
    """Names of the files of a corpus, one for each slice."""
    return [f"s{i % SOURCES}/{i:07}.jsonl" for i in range(slices)]


def make_inputs(stage: str, slices: int) -> CountingStore:
    """A store with what a stage reads; but for pass2, which reads what pass1 leaves in its own."""
    store, names = CountingStore(), corpus_names(slices)
    for path in _FILES.get(stage, ()):
        store.add(path, SLICE_BYTES)
    for i, name in enumerate(names):
        if stage in _AFTER_MIX:
            store.add(_AFTER_MIX[stage] / f"chunk1/example_train_{i}.jsonl.zst", SLICE_BYTES)
            store.add(_HOLDOUT / f"chunk1/example_holdout_{i}.jsonl.zst", _HOLDOUT_BYTES)
        elif stage == "generate_connected_components":
            store.add(_SIGNED / f"{name}+0{SUFFIX}", 520 * DOCUMENTS)
        else:
            store.add((_RAW if stage == "normalize_text" else _NORM) / name, SLICE_BYTES)
    return store


def measure(stage: str, slices: int, memory: str = MEMORY) -> Cost:
    """Run a stage over so many slices; in a process of its own, as memory is that of the whole process."""
    if stage == "pass2":
        with _new_process() as pool:
            store = pool.submit(_mixed, slices, memory).result()
    else:
        store = make_inputs(stage, slices)
    return run_stage(stage, slices, store, memory)


def _mixed(slices: int, memory: str) -> CountingStore:
    store = make_inputs("pass1", slices)
    run_stage("pass1", slices, store, memory)
    return store


def _new_process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def _resident_bytes() -> int:
    """Bytes of resident memory, after all that is free was returned; the peak is counted from now on."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) << 10 if found else 0


def exponent(costs: Sequence[Cost], value: str) -> float:
    """The slope of the logarithm of a total over that of the slices, by least squares: 1 if it is proportional."""
    x = [math.log(cost.slices) for cost in costs]
    y = [math.log(max(getattr(cost, value), 1e-9)) for cost in costs]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


def bench_scaling(
    slices: tuple[int, ...] = (1_000, 10_000, 100_000), stages: tuple[str, ...] = tuple(STAGES), memory: str = MEMORY
) -> None:
    """Run every stage over corpora of several sizes, and print what a slice costs at each, and the exponents.

    Args:
        slices: Sizes of the corpora. 1_000_000 needs some 10 GB of memory and half an hour.
        stages: The stages.
        memory: Of the machine that would run the tasks, as --memory of a stage.
    """
    console = wide_console()
    console.print("| stage | slices | tasks | requests | of the driver | driver µs | memory kB | sent kB | again µs |")
    console.print("|---|---|---|---|---|---|---|---|---|")
    for stage in stages:
        costs = []
        for count in slices:
            with _new_process() as pool:
                costs.append(pool.submit(measure, stage, count, memory).result())
            console.print(_row(costs[-1]), soft_wrap=True)
        if len(costs) > 1:
            console.print(_exponents(stage, costs), soft_wrap=True)


def _row(cost: Cost) -> str:
    """A row of the table, per slice."""
    n = cost.slices
    cells = [
        cost.stage, f"{n:,}", f"{cost.tasks / n:.2f}", f"{cost.requests / n:.2f}", f"{cost.driver_requests / n:.2f}",
        f"{cost.seconds / n * 1e6:,.0f}", f"{cost.memory / n / 1e3:.1f}", f"{cost.pickled / n / 1e3:.1f}",
        f"{cost.again_seconds / n * 1e6:,.0f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _exponents(stage: str, costs: Sequence[Cost]) -> str:
    values = ("tasks", "requests", "driver_requests", "seconds", "memory", "pickled", "again_seconds")
    return f"| {stage} | exponent | {' | '.join(f'{exponent(costs, value):.2f}' for value in values)} |"


if __name__ == "__main__":
    tyro.cli(bench_scaling)
