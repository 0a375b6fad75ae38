"""Worker process of bench_dedup: sets up one contender, warms it up, waits for a signal, and times it.

python benchmarks/dedup_worker.py installed
python benchmarks/dedup_worker.py run '{"table": …, "name": …}'     ready → go → a JSON line
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

THREAD_POOLS = ("OMP_NUM", "OPENBLAS_NUM", "MKL_NUM", "RAYON_NUM", "NUMBA_NUM", "POLARS_MAX")  # …_THREADS
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")  # writing 5 resets the peak of resident memory
_WARM_CHARACTERS = 50_000


def main(command: str, task_json: str = "{}") -> None:
    """Print the installed contenders, or run one task."""
    if command == "installed":
        from benchmarks.peers_graph import graph_contenders
        from benchmarks.peers_minhash import contenders

        every: list[Any] = [*contenders(), *graph_contenders("lsh"), *graph_contenders("components")]
        print(json.dumps({contender.name: contender.installed() for contender in every}))
        return
    task = json.loads(task_json)
    if task["cpu"] is not None:
        os.sched_setaffinity(0, {task["cpu"]})  # before a library counts the cores
    job, finish = (_set_up_signatures if task["table"] == "signatures" else _set_up_graph)(task)
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(_measure(job, task["seconds"], CLOCKS[task["clock"]]) | finish()))


def _set_up_signatures(task: dict[str, Any]) -> tuple[Callable[[], Any], Callable[[], dict[str, Any]]]:
    """Set up a contender of the signature table; return the function to time, and one that returns more results."""
    from benchmarks.peers_minhash import contenders

    given = json.loads(Path(task["input"]).read_text())
    contender = next(contender for contender in contenders() if contender.name == task["name"])
    engine, texts = contender.make(), given["texts"][task["part"] :: task["parts"]]
    engine.sign(_warm_up_texts(texts))

    def agreement() -> dict[str, Any]:
        if not task["agreement"] or not given["pairs"]:
            return {}
        ones, others = zip(*given["pairs"], strict=True)
        exact = [
            _jaccard(contender.shingles(one), contender.shingles(other))
            for one, other in zip(ones, others, strict=True)
        ]
        return {"exact": exact, "estimated": list(map(float, engine.estimate(ones, others)))}

    return lambda: engine.sign(texts), agreement


def _warm_up_texts(texts: Sequence[str]) -> list[str]:
    size, warm = 0, []
    for text in texts:
        warm.append(text)
        size += len(text)
        if size > _WARM_CHARACTERS:
            break
    return warm


def _jaccard(one: set, other: set) -> float:
    return len(one & other) / max(1, len(one | other))


def _set_up_graph(task: dict[str, Any]) -> tuple[Callable[[], Any], Callable[[], dict[str, Any]]]:
    """Set up a contender of a graph table; return the function to time, and one that returns more results."""
    import numpy as np

    from benchmarks.peers_graph import graph_contenders

    contender = next(contender for contender in graph_contenders(task["table"]) if contender.name == task["name"])
    given, count, answers = np.load(task["input"]), contender.make(), []
    count(given[:1000], task["nodes"] if task["table"] == "components" else 1000)
    return lambda: answers.append(count(given, task["nodes"])), lambda: {"components": answers}


def _measure(job: Callable[[], Any], seconds: float, clock: Callable[[], float]) -> dict[str, Any]:
    """Run `job` for at least `seconds`; report its times, the first run's memory in MB, and a calibration time."""
    times: list[float] = []
    before, _ = _memory(reset=True)
    while not times or sum(times) < seconds:
        start = clock()
        result = job()
        times.append(clock() - start)
        if len(times) == 1:
            _, peak = _memory()
        del result
    return {"times": times, "growth": peak - before, "peak": peak, "calibration": _calibrate(clock)}


def _memory(reset: bool = False) -> tuple[float, float]:
    """Resident memory and its peak, in MB; NaN without /proc."""
    if not _STATUS.exists():
        return float("nan"), float("nan")
    if reset:
        _CLEAR_REFS.write_text("5")
    fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return tuple(int(fields[name].split()[0]) * 1024 / 1e6 for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]


def _calibrate(clock: Callable[[], float]) -> float:
    """Seconds of a fixed loop: a measure of the machine's speed during the measurement."""
    start, total = clock(), 0
    for i in range(1_000_000):
        total += i & 3
    return clock() - start


if __name__ == "__main__":
    main(*sys.argv[1:])
