"""Fault injection on Ray: runs whose nodes and drivers are killed at random moments write the bytes of a local run.

    python benchmarks/chaos_ray.py CORPUS --folder /tmp/chaos --seeds 20 --options="--tokenizer.vocab_size 500"

The cluster is of this machine: a head without cores and two nodes with one. In each seed the raylet of a node, Ray's
process there, is killed some times while a run works, with all its workers, and another node joins; so is the driver,
after which the same command is started again. The last one ends by itself. Then every published byte must be as in a
local run, a further run must find nothing to do, and the scratch folder must be empty.
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
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

ROOT = Path(__file__).resolve().parents[1]
if not __package__: sys.path[0] = str(ROOT)  # fmt: skip

import tyro
from rich.table import Table

from benchmarks.kill_pipeline import hash_tree
from gristmill.command import wide_console

NODE = {"num_cpus": 1, "object_store_memory": 80 << 20, "memory": 16 << 30}  # bytes
_HEALTH = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 300, "health_check_failure_threshold": 3}
_DRIVERS = 0.3  # share of the kills that meet the driver


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
        for seed in range(first_seed, first_seed + seeds):
            if time.monotonic() > ends:
                break
            _round(random.Random(seed), cluster, [*command, "--out", str(folder / f"run{seed}")], kills, done)
            out = folder / f"run{seed}"
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


def _round(chance: random.Random, cluster: Any, command: list[str], kills: int, done: Counter[str]) -> None:
    """Run to the end; meanwhile kill nodes and drivers."""
    process = _start(command)
    for _ in range(chance.randint(1, kills)):
        ends = time.monotonic() + chance.uniform(3, 25)  # the first seconds are imports
        while time.monotonic() < ends and process.poll() is None:
            time.sleep(0.05)
        if process.poll() is not None:
            break
        if chance.random() < _DRIVERS:
            process.kill()
            errors = process.communicate()[1]
            assert process.returncode == -signal.SIGKILL and "Traceback" not in errors, errors
            done["drivers killed"] += 1
            process = _start(command)
        else:
            _kill_raylet(cluster, chance.choice(sorted(cluster.worker_nodes, key=lambda node: node.node_id)))
            done["raylets killed"] += 1
    _finish(process, done)


def _kill_raylet(cluster: Any, node: Any) -> None:
    """Kill the process of a node: its workers end with it. Another node takes its place."""
    os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)
    cluster.remove_node(node, allow_graceful=False)
    cluster.add_node(**NODE)


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
