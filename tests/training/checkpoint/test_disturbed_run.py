"""A run whose node is killed, whose bucket fails and whose batch is changed ends with the losses of an undisturbed one.

Two nodes, each with a process of its own and no folder in common, train from a bucket and into it.
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.object_faults import Environment, Seldom, refuse
from tests.object_store import Store, object_store
from tests.training.checkpoint.test_remote_run import losses
from tests.training.conftest import small_run
from tests.training.launch import Launched, be_command, launch_all, rank_variables
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
        self.kills: BaseProcess | None = None
        self.refuses = ""  # the checkpoint that the bucket refuses
        self.lock = threading.Lock()

    def __call__(self, application: Any, environment: Environment, start_response: Any) -> Iterable[bytes] | None:
        path = environment["PATH_INFO"]
        is_write = environment["REQUEST_METHOD"] == "PUT"
        with self.lock:
            if is_write and "/step-00000004/" in path and self.kills is not None:
                self.kills.kill()
                self.kills = None
        if is_write and self.refuses and f"{self.refuses}/__0_0" in path:
            return refuse("403 Forbidden", "AccessDenied")(application, environment, start_response)
        return self.seldom(application, environment, start_response)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with object_store() as opened:
        for name, value in {**opened.environment, "GRISTMILL_LEASE_SECONDS": "0.5"}.items():
            monkeypatch.setenv(name, value)
        yield opened


@contextmanager
def started(nodes: int, folder: Path, *options: str) -> Iterator[Launched]:
    """A process on each node, as one that a launcher starts there; what it says is in a folder of this start."""
    port = free_port()
    on_nodes = [{**rank_variables(node, nodes, port), "LOCAL_RANK": "0"} for node in range(nodes)]
    environments = [variables | {"LOCAL_WORLD_SIZE": "1"} for variables in on_nodes]
    with launch_all(train_on_node, (folder, options), environments, folder / f"said{port}") as launched:
        yield launched


def train_on_node(folder: Path, options: tuple[str, ...]) -> None:
    node = os.environ["RANK"]
    folders = ["--checkpoint.folder", str(folder / f"node{node}"), "--data.cache", str(folder / f"t{node}")]
    be_command("train", *options, *folders)


def test_a_disturbed_run_ends_with_the_losses_of_an_undisturbed_one(
    store: Store,
    train_in_ranks: Callable[[int, Path, list[str]], None],
    corpus: Path,
    tmp_path: Path,
) -> None:
    store.upload_tree(corpus, "mine")
    more = [word for name, value in OPTIONS.items() for word in (f"--{name}", str(value))]
    local = [*small_run(corpus), *more]
    remote = [word.replace(str(corpus), "s3://bucket/mine") for word in local] + ["--out_dir", "s3://bucket/run"]
    store.fault = disturbance = Disturbance()

    with started(2, tmp_path, *remote, "--data.batch_size", str(BATCHES[0])) as nodes:
        disturbance.kills = nodes.processes[1]
        assert nodes.codes() == [1, -9], said(tmp_path)
    resumed = int(store.tree("run/checkpoints")["latest"].decode().partition("-")[2])
    assert 2 <= resumed < STEPS - 4

    disturbance.refuses = f"step-{resumed + 4:08d}"
    with started(2, tmp_path, *remote, "--data.batch_size", str(BATCHES[1])) as nodes:
        assert all(nodes.codes()) and "AccessDenied" in said(tmp_path), said(tmp_path)
    assert store.tree("run/checkpoints")["latest"].decode() == f"step-{resumed + 2:08d}"

    disturbance.refuses = ""
    with started(1, tmp_path, *remote, "--data.batch_size", str(BATCHES[1])) as nodes:  # with another number of nodes
        assert nodes.codes() == [0], said(tmp_path)
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
    return "".join(path.read_text(errors="replace") for path in sorted(folder.glob("said*/*")))
