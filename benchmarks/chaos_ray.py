"""Fault injection on Ray: runs whose nodes, workers and drivers are killed write the bytes of a local run.

    python benchmarks/chaos_ray.py CORPUS --folder /tmp/chaos --seeds 20 --options="--tokenizer.vocab_size 500"

The cluster is of this machine: a head without cores and two nodes with one. At random moments of a run one of these
happens, one to three times in a seed: the raylet of a node, Ray's process there, is killed with all its workers, and
another node joins; a node is stopped until its tasks run elsewhere, and comes back; a worker is killed; the driver is
killed, and the same command started again, or a second one has waited for the lock. The last driver ends by itself.
Then every published byte must be as in a local run, a further run must find nothing to do, and the scratch folder must
be empty.
"""

import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

ROOT = Path(__file__).resolve().parents[1]
if not __package__: sys.path[0] = str(ROOT)  # fmt: skip

import tyro
from rich.table import Table

from benchmarks.kill_pipeline import hash_tree
from benchmarks.process_memory import descendants
from gristmill.console import wide_console

NODE = {"num_cpus": 1, "object_store_memory": 80 << 20, "memory": 16 << 30}  # bytes
_HEALTH = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 300, "health_check_failure_threshold": 3}
_LATE_SECONDS = 2.5  # more than three health checks
_START_SECONDS = 5.0  # of a driver
_KINDS = ("drivers killed", "workers killed", "raylets killed", "nodes that came back late")


def chaos_ray(
    corpus: Annotated[Path, tyro.conf.Positional],
    folder: Path,
    seeds: int = 20,
    options: str = "",
    kills: int = 3,
    first_seed: int = 0,
    minutes: float = 60.0,
) -> Table:
    """Run the pipeline on Ray, with kills; raises AssertionError with the seed if a byte differs.

    Args:
        corpus: CORPUS/<source>/**.
        folder: Folder for the runs and for scratch; it is removed first.
        seeds: Number of rounds.
        options: More options of `gristmill run`.
        kills: Most kills in a round; each has one at least.
        first_seed: Seed of the first round.
        minutes: No round begins after so many.
    """
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "scratch").mkdir(parents=True)
    done, ends = Counter[str](), time.monotonic() + 60 * minutes
    command = [sys.executable, "-m", "gristmill_cli", "run", "--corpus", str(corpus), *shlex.split(options)]
    subprocess.run([*command, "--out", folder / "local"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    expected = hash_tree(folder / "local")
    with _cluster() as cluster:
        command += ["--executor", "ray", "--address", cluster.address, "--workers", "2"]
        command += ["--scratch", str(folder / "scratch")]
        started = time.monotonic()
        _finish(_start([*command, "--out", str(folder / "undisturbed")]), done)
        seconds = time.monotonic() - started
        for seed in range(first_seed, first_seed + seeds):
            if time.monotonic() > ends:
                break
            out = folder / f"run{seed}"
            started = time.monotonic()
            _round(seed, cluster, [*command, "--out", str(out)], kills, seconds, done)
            seconds = min(seconds, time.monotonic() - started)  # one that ended before its first kill was faster
            assert hash_tree(out) == expected, f"seed {seed}: {out} differs from {folder / 'local'}"
            again = _finish(_start([*command, "--out", str(out)]), done)
            stages = [line for line in again.splitlines() if " read = " in line]
            assert stages and all("done already" in line for line in stages), f"seed {seed}: {again}"
            left = [*(folder / "scratch").iterdir(), *out.glob(".gristmill/*scratch*")]
            assert not left, f"seed {seed}: {left}"
            shutil.rmtree(out)
            done["rounds"] += 1
            print(f"seed {seed}: {dict(done)}", file=sys.stderr, flush=True)
    table = Table("event", "times", title="every byte as in a local run", box=None)
    for event, times in sorted(done.items()):
        table.add_row(event, f"{times:,}")
    return table


def _round(seed: int, cluster: Any, command: list[str], kills: int, seconds: float, done: Counter[str]) -> None:
    """Run to the end; meanwhile kill drivers, nodes and workers, first that whose turn it is.

    `seconds` is what the fastest run took: each kill comes 0.1 to 0.6 of that after the start or the kill before.
    """
    process, chance = _start(command), random.Random(seed)
    for i in range(chance.randint(1, kills)):
        ends = time.monotonic() + chance.uniform(0.1, 0.6) * seconds  # it begins with imports
        while time.monotonic() < ends and process.poll() is None:
            time.sleep(0.05)
        if process.poll() is not None:
            break
        what = chance.choice(_KINDS) if i else _KINDS[seed % len(_KINDS)]
        if what == "drivers killed":
            process = _kill_driver(process, command, two=chance.random() < 0.5, done=done)
        else:
            node = chance.choice(sorted(cluster.worker_nodes, key=lambda node: node.node_id))
            if what == "workers killed":
                _kill_worker(node)
            else:
                (_kill_raylet if what == "raylets killed" else _come_back_late)(cluster, node)
        done[what] += 1
    _finish(process, done)


def _kill_driver(
    process: subprocess.Popen[str], command: list[str], two: bool, done: Counter[str]
) -> subprocess.Popen[str]:
    """Kill the driver, and return the one that goes on: a new one, or one of two that has waited for the lock."""
    waiting = _start(command) if two else None
    if waiting:
        done["two drivers at once"] += 1
        time.sleep(_START_SECONDS)
    process.kill()
    errors = process.communicate()[1]
    assert process.returncode in (0, -signal.SIGKILL) and "Traceback" not in errors, errors
    return waiting or _start(command)


def _kill_worker(node: Any) -> None:
    """Kill a process in which Ray runs tasks, if a node has one."""
    for pid in descendants(node.all_processes["raylet"][0].process.pid):
        with suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::_run_call"):
                os.kill(pid, signal.SIGKILL)
                return


def _kill_raylet(cluster: Any, node: Any) -> None:
    """Kill the process of a node: its workers end with it. Another node takes its place."""
    os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)
    cluster.remove_node(node, allow_graceful=False)
    cluster.add_node(**NODE)


def _come_back_late(cluster: Any, node: Any) -> None:
    """Stop a node's processes until it is taken for dead, and let them go on when its tasks run elsewhere."""
    raylet = node.all_processes["raylet"][0].process.pid
    processes = [raylet, *descendants(raylet)]
    cluster.add_node(**NODE)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, number)
        time.sleep(_LATE_SECONDS)
    cluster.remove_node(node, allow_graceful=False)


def _start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def _finish(process: subprocess.Popen[str], done: Counter[str]) -> str:
    """Wait for the end, which must be a good one; return what it printed."""
    errors = process.communicate()[1]
    assert process.returncode == 0 and "Traceback" not in errors, errors
    done["runs that ended"] += 1
    return errors


@contextmanager
def _cluster() -> Iterator[Any]:
    """Context: a head without cores and two nodes with one core each."""
    from ray.cluster_utils import Cluster

    os.environ["PYTHONPATH"] = str(ROOT)
    head = {**NODE, "num_cpus": 0, "_system_config": _HEALTH}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        cluster.add_node(**NODE)
    try:
        yield cluster
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    wide_console().print(tyro.cli(chaos_ray))
