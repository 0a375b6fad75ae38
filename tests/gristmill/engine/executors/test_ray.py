"""Stages on a Ray cluster of one machine: the same files as in one process, also when a node is lost."""

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gristmill.engine.executors.same_code import check_same_code, code_versions
from gristmill.engine.options import RunOptions
from gristmill.engine.run import open_stage
from gristmill.engine.task import Task
from gristmill.errors import InputError, UsageError
from tests.gristmill.engine.upper_stage import STAGE, Settings, upper_stage

pytest.importorskip("ray")
ROOT = Path(__file__).resolve().parents[4]
STORE = 80 << 20  # bytes of a node's object store, the least


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without cores and two nodes with one each."""
    from ray.cluster_utils import Cluster

    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = str(ROOT)
    watch = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 300, "health_check_failure_threshold": 3}
    head = {"num_cpus": 0, "object_store_memory": STORE, "_system_config": watch}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        add_node(nodes)
    yield nodes
    nodes.shutdown()
    os.environ["PYTHONPATH"] = before


def add_node(cluster: Any) -> Any:
    return cluster.add_node(num_cpus=1, object_store_memory=STORE, memory=8 << 30)


@pytest.fixture
def options(cluster: Any) -> RunOptions:
    return RunOptions(workers=2, memory="64MiB", quiet=True, executor="ray", address=cluster.address)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    for name in "abcdefgh":
        (folder / name).write_text(f"text {name}\n")
    return folder


def test_a_stage_writes_what_it_writes_in_one_process(
    source: Path, tmp_path: Path, options: RunOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # nodes have other working folders
    assert upper_stage(Path("in"), Path("out"), options=options).ran == 17
    upper_stage(source, tmp_path / "alone")
    assert read(tmp_path / "out") == read(tmp_path / "alone")
    assert not list(tmp_path.glob("out/.gristmill/*scratch*"))
    assert upper_stage(source, tmp_path / "out", options=options).ran == 0


def test_tasks_of_a_lost_node_run_elsewhere(cluster: Any, source: Path, tmp_path: Path, options: RunOptions) -> None:
    lost = next(iter(cluster.worker_nodes))
    killer = threading.Timer(2.5, lambda: cluster.remove_node(lost, allow_graceful=False))
    killer.start()
    upper_stage(source, tmp_path / "out", Settings(seconds=1.0), options)
    killer.join()
    add_node(cluster)
    upper_stage(source, tmp_path / "alone")
    assert read(tmp_path / "out") == read(tmp_path / "alone")


def refuse(source: Path, target: Path) -> None:
    """Task: find fault with a file."""
    raise InputError(f"{source} line 3: bad record; mend it")


def test_an_error_of_a_task_keeps_its_class_and_its_line(source: Path, tmp_path: Path, options: RunOptions) -> None:
    with (
        pytest.raises(InputError, match=r"^/.*/in/[ab] line 3: bad record; mend it$"),
        open_stage(STAGE, tmp_path / "out", options) as run,
    ):
        outputs = {path: run.work / path.name for path in (source / "a", source / "b")}
        run.step(
            "refuse", [Task(to.name, refuse, {"source": path, "target": to}, (to,)) for path, to in outputs.items()]
        )


def test_no_cluster_and_no_room_are_told(cluster: Any, source: Path, tmp_path: Path, options: RunOptions) -> None:
    with pytest.raises(UsageError, match=r"a task takes .* smaller --memory"):
        upper_stage(source, tmp_path / "out", options=replace(options, memory="32GiB"))
    with pytest.raises(UsageError, match="no Ray cluster answers"):
        upper_stage(source, tmp_path / "out", options=replace(options, address="127.0.0.1:9"))
    with pytest.raises(UsageError, match="give one"):
        upper_stage(source, tmp_path / "out", options=replace(options, shard="1/2"))


def test_a_node_with_other_versions_is_refused() -> None:
    check_same_code(code_versions(), "here")
    with pytest.raises(UsageError, match=r"node n has Unicode .* instead of 1\.0"):
        check_same_code(code_versions() | {"Unicode": "1.0"}, "the node n")


def read(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
