"""Benchmark: how requests, driver time and memory of every stage grow with the slices of a corpus in a bucket.

    python benchmarks/bench_scaling.py --slices 1_000 10_000 100_000

Stages of a run are called as `gristmill run` calls them, one after the other; commands, such as `gristmill filter`, by
themselves. Measured: the stages' own code in the driver (listing, planning, identities, records, ledgers), which runs
as it is, against a bucket in memory that counts requests. Modelled: the tasks. None runs; each counts the requests that
it would send, and its outputs, counts and value are made up. A slice is a file of 60 MB, with no content.
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
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import tyro

from benchmarks.scaling_stages import COMMANDS, FIRST_STAGE, RUN_STAGES, STAGES, call_stage, corpus_names, make_corpus
from benchmarks.scaling_store import CountingStore
from benchmarks.scaling_tasks import ModelExecutor, TaskModel
from gristmill.console import wide_console
from gristmill.engine.execution.context import ExecutionContext
from gristmill.engine.execution.staging import Scratch
from gristmill.engine.options import RunOptions

MEMORY = "1GiB"  # so little that no stage joins in memory what larger corpora join on disk


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


def run_stage(stage: str, files: Sequence[str], store: CountingStore, memory: str = MEMORY) -> Cost:
    """Run a stage, or a command, twice over a corpus of `files` in `store`; `memory` is the option of that name."""
    executor = ModelExecutor(store, TaskModel(files))
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
        stage, len(files), tasks, requests + sent, requests, seconds, resident, pickled, again_requests, again_seconds
    )


def _driver_cost(stage: str, options: RunOptions, executor: ModelExecutor) -> tuple[int, float]:
    """Run a stage; return the driver's requests and processor time."""
    requests, seconds, started = executor.store.requests.total(), executor.seconds, time.process_time()
    call_stage(stage, options)
    seconds = time.process_time() - started - (executor.seconds - seconds)
    return executor.store.requests.total() - requests, seconds


def measure_run(slices: int, until: str, memory: str = MEMORY) -> Iterator[Cost]:
    """Yield what each stage of a run costs, to the stage `until`; each is called in a process of its own.

    Memory is that of a whole process.
    """
    files = corpus_names(slices)
    store = make_corpus(FIRST_STAGE, files)
    for stage in RUN_STAGES:
        with _new_process() as pool:
            cost, store = pool.submit(_measure, stage, files, store, memory).result()
        yield cost
        if stage == until:
            break


def measure_command(command: str, slices: int, memory: str = MEMORY) -> Cost:
    """Return what a command costs, called in a process of its own."""
    files = corpus_names(slices)
    with _new_process() as pool:
        cost, _ = pool.submit(_measure, command, files, make_corpus(command, files), memory).result()
    return cost


def _measure(stage: str, files: Sequence[str], store: CountingStore, memory: str) -> tuple[Cost, CountingStore]:
    cost = run_stage(stage, files, store, memory)
    return cost, store


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
    slices: tuple[int, ...] = (1_000, 10_000, 100_000), stages: tuple[str, ...] = STAGES, memory: str = MEMORY
) -> None:
    """Run every stage over corpora of several sizes, and print what a slice costs at each, and the exponents.

    Args:
        slices: Sizes of the corpora. 1_000_000 needs some 10 GB of memory and half an hour.
        stages: The stages, and commands as `gristmill filter`; those of a run before them are called, too.
        memory: Of the machine that would run the tasks, as --memory of a stage.
    """
    costs: dict[str, list[Cost]] = {stage: [] for stage in stages}
    of_run = [stage for stage in RUN_STAGES if stage in costs]
    for count in slices:
        if of_run:
            for cost in measure_run(count, of_run[-1], memory):
                if cost.stage in costs:
                    costs[cost.stage].append(cost)
                    print(_row(cost), file=sys.stderr, flush=True)
        for command in COMMANDS:
            if command in costs:
                costs[command].append(measure_command(command, count, memory))
                print(_row(costs[command][-1]), file=sys.stderr, flush=True)
    console = wide_console()
    console.print("| stage | slices | tasks | requests | of the driver | driver µs | memory kB | sent kB | again µs |")
    console.print("|---|---|---|---|---|---|---|---|---|")
    for stage, measured in costs.items():
        for cost in measured:
            console.print(_row(cost), soft_wrap=True)
        if len(measured) > 1:
            console.print(_exponents(stage, measured), soft_wrap=True)


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
