"""Rounds of bench_dedup: each contender in its own process, under the first Python that has its package."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple

from rich.console import Console

from benchmarks.dedup_worker import THREAD_POOLS
from benchmarks.peers_graph import GraphContender
from benchmarks.peers_minhash import Contender
from gristmill.errors import UsageError

WORKER = Path(__file__).with_name("dedup_worker.py")
Report = dict[str, Any]  # the JSON that dedup_worker.py prints


@dataclass
class Measurement:
    """A contender and its measurements: `reports[cores]` lists, per round, the reports of its processes."""

    contender: Contender | GraphContender
    python: Path | None = None
    version: str = ""
    failure: str = ""
    reports: dict[int, list[list[Report]]] = field(default_factory=dict)

    @property
    def is_measured(self) -> bool:
        return bool(self.reports) and not self.failure

    def all_reports(self, cores: int = 1) -> list[Report]:
        return [report for reports in self.reports.get(cores, []) for report in reports]


class Worker(NamedTuple):
    """A contender's process and its standard error."""

    process: subprocess.Popen[str]
    errors: IO[str]


def find_installed(
    contenders: Sequence[Contender | GraphContender], pythons: Sequence[Path], only: Sequence[str]
) -> list[Measurement]:
    """Contenders whose name contains a word of `only`, each with the first interpreter that has its package."""
    results = [Measurement(one) for one in contenders if not only or any(word in one.name for word in only)]
    for python in [Path(sys.executable), *pythons]:
        versions = _installed(python)
        for result in results:
            if result.python is None and versions.get(result.contender.name):
                result.python, result.version = python, versions[result.contender.name]
    return results


@cache
def _installed(python: Path) -> dict[str, str]:
    """Package versions by contender name, for the contenders that an interpreter can run."""
    command = [str(python), str(WORKER), "installed"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=_environment())
    except OSError as error:
        raise UsageError(f"--python {python}: {error.strerror}. Give the path of a Python interpreter") from error
    if done.returncode:
        raise UsageError(
            f"--python {python}: needs Python 3.11 or later with NumPy; its error was {done.stderr[-200:]!r}"
        )
    return json.loads(done.stdout)


def _environment() -> dict[str, str]:
    return os.environ | {f"{pool}_THREADS": "1" for pool in THREAD_POOLS}


def run_rounds(results: Sequence[Measurement], rounds: int, tasks: dict[int, list[Report]]) -> None:
    """Measure every contender in every round, in rotating order; `tasks[cores]` has a task per concurrent process."""
    console, installed = Console(stderr=True), [result for result in results if result.python]
    for round_ in range(rounds):
        start = round_ * len(installed) // rounds
        for result in (installed[start:] + installed[:start])[:: -1 if round_ % 2 else 1]:
            for cores, core_tasks in tasks.items():
                if not result.failure:
                    console.print(f"round {round_ + 1}: {result.contender.name}, cores: {cores}", highlight=False)
                    # The error of the estimates is the same in every round.
                    _measure(result, [task | {"agreement": round_ == 0 and cores == 1} for task in core_tasks])


def _measure(result: Measurement, tasks: list[Report]) -> None:
    """Run one process per task, each pinned to its own core, all started together."""
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [None]
    workers = [_start(result, task | {"cpu": cpus[-1 - i % len(cpus)]}) for i, task in enumerate(tasks)]
    for worker in workers:
        assert worker.process.stdout
        while worker.process.stdout.readline() not in ("ready\n", ""):
            pass  # output of the peer's own import
    for worker in workers:
        assert worker.process.stdin
        try:
            worker.process.stdin.write("go\n")
            worker.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has already failed: its exit code is checked below
    outputs = [worker.process.communicate()[0] for worker in workers]
    if any(worker.process.returncode for worker in workers):
        result.failure = " / ".join(filter(None, map(_error_of, workers)))
    else:
        result.reports.setdefault(len(tasks), []).append([json.loads(text.splitlines()[-1]) for text in outputs])


def _start(result: Measurement, task: Report) -> Worker:
    errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (open as long as its worker runs)
    command = [str(result.python), str(WORKER), "run", json.dumps(task | {"name": result.contender.name})]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=_environment())
    return Worker(process, errors)


def _error_of(worker: Worker) -> str:
    worker.errors.seek(0)
    lines = worker.errors.read().strip().splitlines()
    return f"exit code {worker.process.returncode}: {lines[-1] if lines else ''}" if worker.process.returncode else ""
