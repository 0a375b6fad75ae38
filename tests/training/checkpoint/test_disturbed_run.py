"""A run whose node is killed, whose bucket fails and whose batch is changed ends with the losses of an undisturbed one.

Two nodes, each with a launcher of its own and no folder in common, train from a bucket and into it.
"""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.object_faults import Environment, Seldom, refuse
from tests.object_store import Store, object_store
from tests.patience import patience
from tests.training.checkpoint.test_remote_run import losses
from tests.training.conftest import REPOSITORY, small_run
from tests.training.test_cluster import free_port

STEPS = 16
BATCHES = (8, 16)  # before and after the run was resumed
LENGTH = 16
OPTIONS = {
    "optim.steps": STEPS, "optim.warmup_steps": 2, "checkpoint.every": 2, "eval.every": 4, "eval.sample_tokens": 0,
    "metrics.log_every": 1, "metrics.tensorboard": "false", "precision": "fp64",
}  # fmt: skip


class Disturbance:
    """Injects errors in a share of all requests; at the write of a checkpoint kills a node, and later refuses one."""

    def __init__(self) -> None:
        self.seldom = Seldom(3, 0.1)
        self.kills: subprocess.Popen[bytes] | None = None
        self.refuses = ""  # the checkpoint that the bucket refuses
        self.lock = threading.Lock()

    def __call__(self, application: Any, environment: Environment, start_response: Any) -> Iterable[bytes] | None:
        path = environment["PATH_INFO"]
        is_write = environment["REQUEST_METHOD"] == "PUT"
        with self.lock:
            if is_write and "/step-00000004/" in path and self.kills is not None:
                kill_all(self.kills)
                self.kills = None
        if is_write and self.refuses and f"{self.refuses}/__0_0" in path:
            return refuse("403 Forbidden", "AccessDenied")(application, environment, start_response)
        return self.seldom(application, environment, start_response)


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """Kill a launcher and its rank at once, as if the machine lost its power."""
    if process.poll() is None:
        everything = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for each in everything:
            each.kill()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with object_store() as opened:
        for name, value in {**opened.environment, "GRISTMILL_LEASE_SECONDS": "0.5"}.items():
            monkeypatch.setenv(name, value)
        yield opened


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., list[subprocess.Popen[bytes]]]]:
    """`start(nodes, *options)`: a launcher on each node; what node n says is in n.log."""
    started: list[subprocess.Popen[bytes]] = []

    def run(nodes: int, *options: str) -> list[subprocess.Popen[bytes]]:
        rendezvous = [f"--rdzv_endpoint=localhost:{free_port()}", "--rdzv_id=run1", "--rdzv_backend=c10d"]
        launcher = [sys.executable, "-m", "gristmill_cli", "torchrun", f"--nnodes={nodes}", "--nproc_per_node=1"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "ignore"}
        own = []
        for node in range(nodes):
            folders = ["--checkpoint.folder", str(tmp_path / f"node{node}"), "--data.cache", str(tmp_path / f"t{node}")]
            command = [*launcher, *rendezvous, "-m", "gristmill_cli.train", *options, *folders]
            with (tmp_path / f"{node}.log").open("ab") as log:
                own.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        started.extend(own)
        return own

    yield run
    for process in started:
        kill_all(process)
        process.wait()


def test_a_disturbed_run_ends_with_the_losses_of_an_undisturbed_one(
    store: Store,
    start: Callable[..., list[subprocess.Popen[bytes]]],
    train_in_ranks: Callable[[int, Path, list[str]], None],
    corpus: Path,
    tmp_path: Path,
) -> None:
    store.upload_tree(corpus, "mine")
    more = [word for name, value in OPTIONS.items() for word in (f"--{name}", str(value))]
    local = [*small_run(corpus), *more]
    remote = [word.replace(str(corpus), "s3://bucket/mine") for word in local] + ["--out_dir", "s3://bucket/run"]
    store.fault = disturbance = Disturbance()

    first, second = start(2, *remote, "--data.batch_size", str(BATCHES[0]))
    disturbance.kills = second
    assert first.wait(patience(120)) != 0 and second.wait(patience(30)) == -9, said(tmp_path)
    resumed = int(store.tree("run/checkpoints")["latest"].decode().partition("-")[2])
    assert 2 <= resumed < STEPS - 4

    disturbance.refuses = f"step-{resumed + 4:08d}"
    codes = [process.wait(patience(120)) for process in start(2, *remote, "--data.batch_size", str(BATCHES[1]))]
    assert all(codes) and "AccessDenied" in said(tmp_path), said(tmp_path)
    assert store.tree("run/checkpoints")["latest"].decode() == f"step-{resumed + 2:08d}"

    disturbance.refuses = ""
    (process,) = start(1, *remote, "--data.batch_size", str(BATCHES[1]))  # and with another number of nodes
    assert process.wait(patience(120)) == 0, said(tmp_path)
    changed = f"sequences per step: {BATCHES[0]} until step {resumed}, then {BATCHES[1]}"
    assert changed in said(tmp_path) and disturbance.seldom.made > 10

    ramp = ["--data.batch_ramp", f"{BATCHES[0]}:{resumed * BATCHES[0] * LENGTH}", "--data.batch_size", str(BATCHES[1])]
    train_in_ranks(2, tmp_path / "undisturbed", [*local, *ramp])
    expected = losses((tmp_path / "undisturbed/metrics.jsonl").read_bytes())
    found = losses(store.tree("run")["metrics.jsonl"])
    assert [step for step, _ in found] == [step for step, _ in expected] and len(found) == STEPS + STEPS // 4
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], rel=1e-9)


def said(folder: Path) -> str:
    """All that the nodes have said."""
    lines = "".join(path.read_text(errors="replace") for path in sorted(folder.glob("*.log")))
    return re.sub(r"^.*torch/distributed/elastic.*\n", "", lines, flags=re.MULTILINE)
