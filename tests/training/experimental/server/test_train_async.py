"""Asynchronous runs of real processes: as synchronous ones without staleness, surviving a killed worker, resumed."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.bench_replicas import free_port
from gristmill.errors import UsageError
from gristmill.processes import exit_with_parent
from tests.patience import patience, wait_until
from tests.training.conftest import REPOSITORY, small_run
from tests.training.parallel.test_layouts import assert_same, recorded
from training.checkpoint.checkpoint_config import CheckpointConfig
from training.config import TrainConfig
from training.data.data_config import DataConfig
from training.distributed.process_group import init_distributed
from training.experimental.local_steps.replicas_config import ReplicasConfig
from training.experimental.parallel_config import ParallelConfig
from training.experimental.server.async_config import AsyncConfig
from training.experimental.server.async_trainer import plan_async
from training.experimental.server.async_worker import work
from training.experimental.server.messages import Link
from training.experimental.server.part_queue import Part, PartQueue
from training.experimental.server.server import GradientServer
from training.reporting.metrics_file import METRICS, read_metrics
from training.train import train
from training.train_async import train_async
from training.trainer import Trainer


@pytest.fixture
def exact(config: TrainConfig) -> AsyncConfig:
    """Eight steps in float64 of three parts, of a batch of twelve sequences, saved after each two."""
    given = {field.name: getattr(config, field.name) for field in fields(config)}
    given |= {"optim": replace(config.optim, steps=8, min_lr=1e-2), "precision": "fp64"}
    given |= {"checkpoint": CheckpointConfig(every=2, keep=9)}
    return AsyncConfig(**given | {"timeout": patience(60)}, parts=3, staleness=0, port=free_port(), role="server")


def be_worker(config: AsyncConfig, everybody: Barrier, dies: bool) -> None:
    exit_with_parent()
    torch.set_num_threads(1)
    begun = list[Part]()

    def on_part(part: Part) -> None:
        if not begun:
            everybody.wait(patience(90))  # or one would do it all before the others have started
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
        begun.append(part)

    plan = plan_async(replace(config, role="worker"))
    with init_distributed("cpu") as device:
        work(plan, device, on_part)


@contextmanager
def workers(config: AsyncConfig, *dying: bool) -> Iterator[list[BaseProcess]]:
    """A worker for each of `dying`: whether it is killed in its first part. They begin theirs together."""
    context = multiprocessing.get_context("forkserver")
    everybody = context.Barrier(len(dying))
    started: list[BaseProcess] = [context.Process(target=be_worker, args=(config, everybody, dies)) for dies in dying]
    for process in started:
        process.start()
    try:
        yield started
        for process in started:
            process.join(patience(90))
    finally:
        for process in started:
            process.kill()
            process.join()


def wait_for_steps(config: AsyncConfig, count: int) -> None:
    """Return as soon as so many steps are recorded: the server listens to signals by then."""
    metrics = config.out_dir / METRICS
    wait_until(lambda: metrics.is_file() and len(recorded(config.out_dir)[0]) >= count)


def synchronous(config: AsyncConfig, out_dir: Path) -> Path:
    given = {field.name: getattr(config, field.name) for field in fields(TrainConfig)}
    train(TrainConfig(**given | {"out_dir": out_dir}))
    return out_dir


def test_without_staleness_a_run_is_synchronous_and_a_killed_worker_loses_its_part_only(
    exact: AsyncConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with workers(exact, False, True) as started:
        train_async(exact)
    assert [process.exitcode for process in started] == [0, -signal.SIGKILL]
    said = capfd.readouterr().out
    assert "has stopped: part" in said and "of step 1 goes to another; 1 worker active" in said
    assert_same(synchronous(exact, tmp_path / "one"), exact.out_dir)


def test_model_flops_are_compared_with_the_peak_of_all_workers(exact: AsyncConfig, tmp_path: Path) -> None:
    exact = replace(exact, metrics=replace(exact.metrics, peak_tflops=0.1))
    with workers(exact, False, False):
        train_async(exact)
    flops = []  # per token
    for out_dir, devices in ((exact.out_dir, 2), (synchronous(exact, tmp_path / "one"), 1)):
        steps = [record for record in read_metrics(out_dir / METRICS) if record["kind"] == "step"]
        flops += [devices * record["mfu"] * 1e11 / record["tokens_per_second"] for record in steps]
    assert len(flops) == 16 and flops == pytest.approx([flops[-1]] * 16)


def test_a_gradient_that_is_added_twice_is_noticed(
    exact: AsyncConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = GradientServer._add

    def twice(self: GradientServer, worker: int, link: Link, part: Part, gradient: torch.Tensor, loss: float) -> None:
        right(self, worker, link, part, gradient * (2 if part == (1, 1) else 1), loss)

    monkeypatch.setattr(GradientServer, "_add", twice)
    with workers(exact, False):
        train_async(exact)
    with pytest.raises(AssertionError):
        assert_same(synchronous(exact, tmp_path / "one"), exact.out_dir)


def test_a_resumed_server_uses_each_part_once(exact: AsyncConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    stale, given = replace(exact, staleness=2), list[Part]()
    give, step = PartQueue.give, Trainer.step

    def noted(self: PartQueue, worker: int, part: Part) -> None:
        give(self, worker, part)
        given.append(part)

    def failing(self: Trainer, number: int) -> bool:
        if number == 7:
            raise RuntimeError("an error of our own")
        return step(self, number)

    monkeypatch.setattr(PartQueue, "give", noted)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", failing)
        with workers(stale, False, False), pytest.raises(RuntimeError, match="of our own"):
            train_async(stale)
    used = given[: 6 * 3]  # of the checkpoint after step 6
    given.clear()
    with workers(stale, False, False) as started:
        train_async(stale)
    assert [process.exitcode for process in started] == [0, 0]
    assert sorted(used + given) == [(step, number) for step in range(8) for number in range(3)]
    losses = recorded(stale.out_dir)[0]
    assert losses[-1][0] == 8 and losses[-1][1] < losses[0][1]


def test_a_signal_while_the_server_waits_loses_no_step(exact: AsyncConfig, tmp_path: Path) -> None:
    """As of a scheduler, to server and workers: the weights of the last update are saved."""
    config = replace(exact, checkpoint=CheckpointConfig(every=100))
    with workers(config, False) as started:

        def stop() -> None:
            wait_for_steps(exact, 4)
            started[0].terminate()
            os.kill(os.getpid(), signal.SIGTERM)

        thread = threading.Thread(target=stop)
        thread.start()
        with pytest.raises(SystemExit) as ended:
            train_async(config)
        thread.join()
    assert ended.value.code == 128 + signal.SIGTERM
    with workers(config, False):
        train_async(config)
    assert_same(synchronous(config, tmp_path / "one"), exact.out_dir)


def test_a_worker_says_that_its_server_has_stopped(exact: AsyncConfig) -> None:
    """And ends with an error, so that what started it does so again."""
    config = replace(exact, optim=replace(exact.optim, steps=100_000))
    with workers(config, False) as started:

        def stop() -> None:
            wait_for_steps(config, 4)
            os.kill(os.getpid(), signal.SIGTERM)

        thread = threading.Thread(target=stop)
        thread.start()
        with pytest.raises(SystemExit):
            train_async(config)
        thread.join()
    assert started[0].exitcode == 1


def test_workers_with_other_options_are_refused(exact: AsyncConfig) -> None:
    other = replace(exact, seed=7)
    with init_distributed("cpu") as device, workers(exact, False):
        said = list[str]()

        def be_other() -> None:
            try:
                work(plan_async(replace(other, role="worker")), device)
            except UsageError as error:
                said.append(str(error))

        thread = threading.Thread(target=be_other)
        thread.start()
        train_async(exact)
        thread.join()
    assert said == [
        "the server has another run, which differs in seed (1 at the server, 7 here); give this worker the server's "
        "options"
    ]


def test_a_server_without_workers_and_a_worker_without_server_end(exact: AsyncConfig) -> None:
    with pytest.raises(UsageError, match="no worker connected within 1 s; start some with --role worker"):
        train_async(replace(exact, timeout=1))
    with pytest.raises(UsageError, match=r"no server at host 127.0.0.1, port \d+ .*; start it with --role server"):
        train_async(replace(exact, role="worker", timeout=1))
    with socket.create_server(("127.0.0.1", exact.port)), pytest.raises(UsageError, match="try another --port"):
        train_async(exact)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parallel": ParallelConfig(tp=2)}, "a worker of asynchronous training is one process; try --parallel.tp 1"),
        ({"parallel": ParallelConfig(compression="int8")}, "in full; try --parallel.compression none"),
        ({"precision": "fp16"}, "workers do not know it; try --precision bf16"),
        ({"parts": 5}, r"batch_size 12 is not divisible by parts 5 .*; try --data.batch_size 15"),
        ({"data": DataConfig(Path(), Path(), batch_ramp=("6:99",))}, "batch_ramp 6:99: .* how much was read; leave it"),
        ({"branch_from": Path("x")}, "which parts are done; try --init_from"),
        ({"staleness": -1}, "staleness is -1"),
        ({"replicas": ReplicasConfig(folder=Path("x"))}, "no steps of their own; try .*, and no --replicas.folder"),
    ],
)
def test_what_cannot_be_is_refused(exact: AsyncConfig, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        train_async(replace(exact, **changes))


@pytest.mark.thorough
def test_torchrun_starts_a_server_and_workers(exact: AsyncConfig, corpus: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3"]
    options = ["--out_dir", str(tmp_path / "run"), "--port", str(exact.port), "--optim.steps", "3"]
    options += ["--metrics.tensorboard", "false", "--eval.sample_tokens", "0"]
    script = [str(REPOSITORY / "training/train_async.py"), *small_run(corpus), *options]
    done = subprocess.run(command + script, capture_output=True, text=True, timeout=patience(120), check=False)
    assert done.returncode == 0, done.stderr
    assert "serving 2 parts per step" in done.stdout and "worker 2 joined" in done.stdout
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == ["latest", "step-00000003"]
