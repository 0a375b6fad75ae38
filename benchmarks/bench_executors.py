"""Benchmark: 100,000 tasks that do nothing through each executor: seconds, memory of the driver, tasks in flight.

    python benchmarks/bench_executors.py --folder /tmp/executors --tasks 10_000 100_000

With `shards` two processes share the tasks; with `ray` they run on a cluster of this machine's cores. Memory is the
peak of the process in charge; the plan itself, which is made before, is told apart. Each measurement is a process
of its own.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[1]
if not __package__: sys.path[0] = str(ROOT)  # fmt: skip

import tyro

from benchmarks.dedup_tables import markdown
from gristmill.counts import Counts
from gristmill.engine.executors.context import open_execution_context
from gristmill.engine.executors.local import Call, LocalExecutor
from gristmill.engine.ledger import Ledger
from gristmill.engine.options import RunOptions
from gristmill.engine.task import Task
from gristmill.engine.worker import run_task
from gristmill.errors import FinishedElsewhere
from gristmill.io.files import STATE_DIR

Name = Literal["local", "shards", "ray"]
MIB = 1 << 20


def bench_executors(
    folder: Path, tasks: tuple[int, ...] = (10_000, 100_000),
    executors: tuple[Name, ...] = ("local", "shards", "ray"), workers: int = 2,
) -> None:  # fmt: skip
    """Run so many tasks through each executor and print a table.

    Args:
        folder: Folder for the done records; emptied first.
        tasks: Numbers of tasks.
        executors: The executors.
        workers: Worker processes; with `shards` of both processes together, with `ray` the cores of the machine.
    """
    rows = []
    for name in executors:
        for number in tasks:
            shutil.rmtree(folder, ignore_errors=True)
            found = _measure(name, folder, number, workers)
            seconds, memory = found["seconds"], [f"{found[what] / MIB:.0f}" for what in ("plan", "beyond")]
            rows.append(
                [name, f"{number:,}", f"{seconds:.1f}", f"{1e6 * seconds / number:,.0f}", *memory, found["flight"]]
            )
            print(*rows[-1], file=sys.stderr, flush=True)
    head = ("executor", "tasks", "seconds", "µs a task", "plan, MiB", "beyond it, MiB", "most in flight")
    print(markdown(f"tasks that do nothing, {workers} workers", head, rows, []))


def nothing(number: int) -> Counts:
    """Task: nothing."""
    assert number >= 0
    return Counts({}, [])


def _measure(name: Name, folder: Path, tasks: int, workers: int) -> dict[str, Any]:
    shards = ["1/2", "2/2"] if name == "shards" else [""]
    each = max(1, workers // len(shards))
    command = [sys.executable, __file__, "--one", folder, str(tasks), str(each), "ray" if name == "ray" else "local"]
    processes = [subprocess.Popen([*command, shard], stdout=subprocess.PIPE, text=True) for shard in shards]
    lines = [line for process in processes for line in process.communicate()[0].splitlines()]
    assert all(process.returncode == 0 for process in processes)
    return next(found for found in map(json.loads, lines) if found)


def run_one(folder: Path, tasks: int, workers: int, executor: Literal["local", "ray"], shard: str) -> dict[str, Any]:
    """Run the tasks as the process in charge, and measure; or help it, and return nothing."""
    flight = _count_ray_flights() if executor == "ray" else _count_flights()
    lock = folder / STATE_DIR / "nothing.lock"
    address = "local" if executor == "ray" else ""  # else Ray joins a cluster that is there
    options = RunOptions(workers, "64MiB", shard=shard, quiet=True, executor=executor, address=address)
    try:
        with open_execution_context(options, lock) as place:
            ledger = Ledger(folder / STATE_DIR, "nothing")
            calls = [
                Call(run_task, {
                    "step": "nothing", "task": Task(str(i), _by_name(), {"number": i}), "identity": {"number": str(i)},
                    "ledger": ledger, "inputs": {}, "hashes": {}, "scratch": place.scratch, "budget": None,
                })
                for i in range(tasks)
            ]  # fmt: skip
            plan, started = _peak(), time.monotonic()
            ended = sum(1 for _ in place.executor.run(calls))
            assert ended == tasks
            seconds = time.monotonic() - started
    except FinishedElsewhere:
        return {}
    return {"seconds": seconds, "plan": plan, "beyond": _peak() - plan, "flight": str(flight[0])}


def _by_name() -> Any:
    """`nothing` as workers import it."""
    from benchmarks.bench_executors import nothing as by_name

    return by_name


def _count_flights() -> list[int]:
    """The number of tasks in flight whenever one ends, of all executors that are made from now on."""
    found, take = [0], LocalExecutor.take_finished

    def counting(self: LocalExecutor, pending: dict[Any, int], seconds: float | None = None) -> Any:
        found[0] = max(found[0], len(pending))
        return take(self, pending, seconds)

    LocalExecutor.take_finished = counting  # type: ignore[method-assign]
    return found


def _count_ray_flights() -> list[int]:
    """As _count_flights, of tasks that Ray has."""
    import ray

    found, wait = [0], ray.wait

    def counting(references: Any, **options: Any) -> Any:
        found[0] = max(found[0], len(references))
        return wait(references, **options)

    ray.wait = counting
    return found


def _peak() -> int:
    """Most resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        os.environ.setdefault("PYTHONPATH", str(ROOT))
        os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's workers are nicer by 15: others would starve them
        name: Any = sys.argv[5]
        print(json.dumps(run_one(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), name, sys.argv[6])))
    else:
        tyro.cli(bench_executors)
