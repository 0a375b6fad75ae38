"""Stages on a Ray cluster of one machine: the same files as in one process, also when a node is lost."""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from benchmarks.process_memory import descendants
from gristmill.budget import Budget, memory_budget, reserve_memory
from gristmill.engine.execution.call import Call
from gristmill.engine.execution.shards import check_same_code, code_versions
from gristmill.engine.execution.staging import Scratch
from gristmill.engine.options import RunOptions
from gristmill.engine.run import open_stage
from gristmill.engine.task import Task
from gristmill.errors import InputError, UsageError
from tests.gristmill.engine.upper_stage import STAGE, Settings, upper_stage
from tests.gristmill_cli.corpus import tree
from tests.gristmill_cli.deadly_corpus import POISON, STEPS, gristmill, run_until_filter, write_deadly_corpus

pytest.importorskip("ray")
ROOT = Path(__file__).resolve().parents[4]
STORE = 80 << 20  # bytes of a node's object store, the least
ROUNDS = 40


@pytest.fixture(scope="module")
def user_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder on the PYTHONPATH of nodes."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "of_node.py").write_text("")
    return folder


@pytest.fixture(scope="module")
def cluster(user_folder: Path) -> Iterator[Any]:
    """A head without cores and two nodes with one each."""
    from ray.cluster_utils import Cluster

    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{user_folder}"
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


@pytest.fixture(scope="module")
def driver(cluster: Any) -> Iterator[ProcessPoolExecutor]:
    """A process for drivers: where Ray finds a fault of its own, it aborts the process."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        yield pool


def run_stage(source: Path, target: Path, settings: Settings, options: RunOptions, folder: Path = ROOT) -> int:
    """Run the stage in a working folder; return how many tasks ran."""
    os.chdir(folder)
    return upper_stage(source, target, settings, options).ran


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    for name in "abcdefgh":
        (folder / name).write_text(f"text {name}\n")
    return folder


def test_a_stage_writes_what_it_writes_in_one_process(
    driver: ProcessPoolExecutor, source: Path, tmp_path: Path, options: RunOptions
) -> None:
    relative = Path("in"), Path("out"), Settings(), options, tmp_path  # nodes have other working folders
    assert driver.submit(run_stage, *relative).result() == 17
    upper_stage(source, tmp_path / "alone")
    assert read(tmp_path / "out") == read(tmp_path / "alone")
    assert not list(tmp_path.glob("out/.gristmill/*scratch*"))
    assert driver.submit(run_stage, *relative).result() == 0


def kill(cluster: Any, node: Any) -> None:
    cluster.remove_node(node, allow_graceful=False)


def come_back_late(cluster: Any, node: Any) -> None:
    """Stop all processes of a node until it is taken for dead; then its tasks, which run elsewhere by now, go on."""
    raylet = node.all_processes["raylet"][0].process.pid
    processes = [raylet, *descendants(raylet)]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, number)
        time.sleep(2.5)  # more than three health checks
    cluster.remove_node(node, allow_graceful=False)


@pytest.mark.every(2)
@pytest.mark.parametrize("lose", [kill, come_back_late])
def test_tasks_of_a_lost_node_run_elsewhere(
    cluster: Any, driver: ProcessPoolExecutor, source: Path, tmp_path: Path, options: RunOptions,
    lose: Callable[[Any, Any], None],
) -> None:  # fmt: skip
    killer = threading.Timer(2.5, lose, [cluster, next(iter(cluster.worker_nodes))])
    killer.start()
    driver.submit(run_stage, source, tmp_path / "out", Settings(seconds=1.0), options).result()
    killer.join()
    add_node(cluster)
    upper_stage(source, tmp_path / "alone")
    assert read(tmp_path / "out") == read(tmp_path / "alone")


def refuse(source: Path, target: Path) -> None:
    """Task: find fault with a file."""
    raise InputError(f"{source} line 3: bad record; mend it")


def run_to_refuse(source: Path, target: Path, options: RunOptions) -> None:
    """Run a stage whose tasks fail."""
    with open_stage(STAGE, target, options) as run:
        outputs = {path: run.work / path.name for path in source.iterdir()}
        run.step(
            "refuse", [Task(to.name, refuse, {"source": path, "target": to}, (to,)) for path, to in outputs.items()]
        )


def test_an_error_of_a_task_keeps_its_class_and_its_line(
    driver: ProcessPoolExecutor, source: Path, tmp_path: Path, options: RunOptions
) -> None:
    with pytest.raises(InputError, match=r"^/.*/in/[a-h] line 3: bad record; mend it$"):
        driver.submit(run_to_refuse, source, tmp_path / "out", options).result()


def refuse_often(folder: Path, address: str) -> int:
    """Run tasks that all fail, many times; return how often an error was raised."""
    calls, errors = [Call(refuse, {"source": folder, "target": folder})] * 8, 0
    from gristmill.engine.execution.ray import NodeScratch, ray_executor

    with ray_executor(address, 32 << 20, NodeScratch("run", folder / "scratch")) as executor:
        for _ in range(ROUNDS):
            with suppress(InputError):
                deque(executor.run(calls), maxlen=0)
                errors -= 1
            errors += 1
    return errors


@pytest.mark.thorough
def test_errors_at_the_same_time_do_not_abort_the_driver(
    cluster: Any, driver: ProcessPoolExecutor, tmp_path: Path
) -> None:
    assert driver.submit(refuse_often, tmp_path, cluster.address).result() == ROUNDS


def test_documents_and_a_file_on_which_workers_die_are_set_aside_as_without_ray(cluster: Any, tmp_path: Path) -> None:
    """One segfaults in a step, others end the process of `apply`, and a reader crashes on a file."""
    folder = write_deadly_corpus(tmp_path)
    on_one_text = STEPS.replace('any(text.startswith("deadly")', 'any(text.startswith("deadly 1 30")')
    assert on_one_text != STEPS
    (folder / "deadly.py").write_text(on_one_text)
    (folder / "sitecustomize.py").write_text(POISON.format(slice_bytes=1 << 20))
    words = ("--apply.function", "deadly:in_batches", "--max_failed", "0.1", "--max_malformed", "0.5")
    alone = run_until_filter(folder, *words, "--out", "alone")
    assert alone.returncode == 0, alone.stderr
    on_ray = run_until_filter(folder, *words, "--executor", "ray", "--address", cluster.address)
    assert on_ray.returncode == 0, on_ray.stderr
    assert "normalize_text: 180 read = 179 written + 1 failed: a worker process died" in on_ray.stderr
    assert "apply: 179 read = 177 written + 2 failed: in_batches" in on_ray.stderr
    assert "web/1.jsonl (a worker process died of reading it)" in on_ray.stderr
    for table in ("normalized.removed.parquet", "applied.failed.parquet"):
        assert pq.read_table(folder / "out" / table).equals(pq.read_table(folder / "alone" / table))
    for name in ("normalized", "applied"):
        assert tree(folder / "out" / name) == tree(folder / "alone" / name)


def test_without_max_failed_the_document_is_named_as_without_ray(cluster: Any, tmp_path: Path) -> None:
    folder = write_deadly_corpus(tmp_path)
    words = ("deadly:one_by_one", "--executor", "ray", "--address", cluster.address)
    done = gristmill(folder, "apply", "corpus/web", "kept", *words, own_process=True)
    assert done.returncode == 1
    (said,) = done.stderr.splitlines()[-1:]
    assert said.startswith(
        "error: a worker process died in deadly:one_by_one on 0.jsonl, row 59 or soon after (SIGKILL)"
    )


def file_of(name: str) -> str:
    """Task: where a module is found."""
    return str(import_module(name).__file__)


def hold_much(budget: Budget) -> str:
    """Task: hold memory for a large record; return the folder of its lock."""
    with memory_budget(budget), reserve_memory(budget.limit, "a record"):
        return str(budget.lock.parent)


def reserve(scratch: Scratch, starts: Path) -> int:
    """Task: work for a moment with copies that take all the scratch; return how many tasks did so at that time."""
    with scratch.reserve("a task", 500, 500), (starts / secrets.token_hex(8)).open("w") as file:
        time.sleep(0.5)
        found = len(list(starts.iterdir()))
        Path(file.name).unlink()
    return found


def run_on_nodes(calls: list[Call], address: str, scratch: dict[str, Any], python_path: str) -> list[Any]:
    """Run calls as a driver with PYTHONPATH does."""
    from gristmill.engine.execution.ray import NodeScratch, ray_executor

    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = python_path
    try:
        with ray_executor(address, 32 << 20, NodeScratch("run", **scratch)) as executor:
            return [result for _, result in sorted(executor.run(calls))]
    finally:
        os.environ["PYTHONPATH"] = before


def test_a_user_s_modules_are_found_on_the_paths_of_driver_and_node(
    cluster: Any, driver: ProcessPoolExecutor, tmp_path: Path, user_folder: Path
) -> None:
    (tmp_path / "of_driver.py").write_text("")
    calls = [Call(file_of, {"name": name}) for name in ("of_driver", "of_node", "gristmill")]
    found = driver.submit(run_on_nodes, calls, cluster.address, {}, f"{tmp_path}{os.pathsep}{ROOT}").result()
    assert found == [str(folder / name) for folder, name in (
        (tmp_path, "of_driver.py"), (user_folder, "of_node.py"), (ROOT / "gristmill", "__init__.py"))]  # fmt: skip


@pytest.mark.thorough
def test_a_large_record_is_held_by_a_lock_of_the_node(
    cluster: Any, driver: ProcessPoolExecutor, tmp_path: Path
) -> None:
    """The folder of the driver's temporary files need not be there."""
    calls = [Call(hold_much, {"budget": Budget.of(1 << 30, 2, tmp_path / "none/gristmill-1-2.memory")})] * 2
    found = driver.submit(run_on_nodes, calls, cluster.address, {}, str(ROOT)).result()
    assert found == [tempfile.gettempdir()] * 2


@pytest.mark.thorough
def test_the_scratch_size_holds_for_all_tasks_of_a_node(
    cluster: Any, driver: ProcessPoolExecutor, tmp_path: Path
) -> None:
    (tmp_path / "starts").mkdir()
    calls = [Call(reserve, {"scratch": None, "starts": tmp_path / "starts"})] * 6
    scratch = {"folder": tmp_path / "scratch", "size": 1999}
    assert driver.submit(run_on_nodes, calls, cluster.address, scratch, str(ROOT)).result() == [1] * 6
    assert not list((tmp_path / "scratch").iterdir())


def test_sigterm_ends_a_driver_as_it_ends_one_without_ray(cluster: Any, source: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from gristmill.command import run_with_exit_code as run; "
        "from gristmill.engine.options import RunOptions; "
        "from tests.gristmill.engine.upper_stage import Settings, upper_stage; "
        f"options = RunOptions(workers=2, memory='64MiB', executor='ray', address={cluster.address!r}); "
        f"paths = Path({str(source)!r}), Path({str(tmp_path / 'out')!r}); "
        "sys.exit(run(lambda: upper_stage(*paths, Settings(seconds=5), options) and None))"
    )
    driver = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.glob("out/.gristmill/*.unfinished")) and driver.poll() is None:
        time.sleep(0.1)
    time.sleep(1)  # of the tasks' five
    driver.terminate()
    _, said = driver.communicate()
    assert driver.returncode == 143 and said.endswith("terminated: run the same command again to resume\n"), said
    assert "SIGTERM" not in said


def test_no_cluster_and_no_room_are_told(
    driver: ProcessPoolExecutor, source: Path, tmp_path: Path, options: RunOptions
) -> None:
    for changed, message in (
        (replace(options, memory="32GiB"), r"a task takes .* smaller --memory"),
        (replace(options, address="127.0.0.1:9"), "no Ray cluster answers.*refused.*RAY_AUTH_MODE=token"),
        (replace(options, shard="1/2"), "give one"),
    ):
        with pytest.raises(UsageError, match=message):
            driver.submit(run_stage, source, tmp_path / "out", Settings(), changed).result()


def test_a_node_with_other_versions_is_refused() -> None:
    check_same_code(code_versions(), "here")
    with pytest.raises(UsageError, match=r"node n has unicode .* instead of 1\.0"):
        check_same_code(code_versions() | {"unicode": "1.0"}, "the node n")


def read(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
