"""Stops under torchrun: exit codes, ranks of a killed launcher, nodes that come and go, and what comes first."""

import io
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from benchmarks.kill_training import metric_values, steps_done
from gristmill_cli.quickstart import train_with_torchrun
from tests.patience import patience, wait_until
from tests.training.conftest import REPOSITORY, small_run
from tests.training.launch import be_command, launch_all
from tests.training.test_cluster import free_port
from training import train_step
from training.checkpoint.checkpoint_config import CheckpointConfig
from training.config import TrainConfig
from training.distributed import launchers, torchrun
from training.experimental.parallel_config import ParallelConfig
from training.loop import train_as_planned
from training.run_plan import RunPlan
from training.train import train
from training.trainer import Trainer

OURS = [sys.executable, "-m", "gristmill_cli", "torchrun"]
QUICKSTART = "import sys; from gristmill_cli.quickstart import train_with_torchrun as train; train(sys.argv[3:], 2)"
OFTEN = "--metrics.log_every 1 --metrics.tensorboard false --eval.sample_tokens 0 --optim.warmup_steps 2"
LONG = ["--optim.steps", "100000", "--checkpoint.every", "1000", "--checkpoint.keep", "2"]


def wait_with(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait for a condition, as long as the process runs."""
    deadline = time.monotonic() + patience(120)
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


@contextmanager
def running(command: list[str], corpus: Path, out_dir: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A launcher that trains into `out_dir` and logs next to it; it and its ranks end with the block."""
    trainer = ["-m", "gristmill_cli.train", *small_run(corpus), "--out_dir", str(out_dir), *OFTEN.split(), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "ignore"}
    with out_dir.with_suffix(".log").open("a") as log:
        process = subprocess.Popen([*command, *trainer], env=environment, text=True, stdout=log, stderr=log)
    children: list[psutil.Process] = []
    try:
        yield process
    finally:
        if process.poll() is None:
            children = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            process.wait()
        for child in children:
            child.kill()


def checkpoints(out_dir: Path) -> list[int]:
    return sorted(int(path.name.partition("-")[2]) for path in out_dir.glob("checkpoints/step-*[0-9]"))


def test_a_user_s_error_has_its_own_exit_code(corpus: Path, tmp_path: Path) -> None:
    """As a stop has, in test_restart. The launcher is the one of the quick start and of recipes."""
    command = [sys.executable, "-c", QUICKSTART]
    with running(command, corpus, tmp_path / "wrong", "--optim.steps", "0") as launcher:
        assert launcher.wait(patience(60)) == 2
    said = (tmp_path / "wrong.log").read_text()
    assert "error: optim.steps is 0; expected 1 or more" in said and "Root Cause" not in said
    failed = rf"torchrun: rank [01] on {re.escape(socket.gethostname())} failed first, with exit code 2; "
    assert re.match(failed, said.splitlines()[-1])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_quick_start_passes_a_signal_on(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends when the launcher has, which saves a checkpoint first."""
    sent: list[int] = []

    class Launcher:
        def __init__(self, *_words: object, **_options: object) -> None:
            self.send_signal = sent.append

        def wait(self) -> int:
            signal.raise_signal(number)
            return 128 + number

    monkeypatch.setattr(subprocess, "Popen", Launcher)
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with pytest.raises(SystemExit) as ended:
            train_with_torchrun([], 2)
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)
    assert sent == [number] and ended.value.code == 128 + number


def test_a_port_that_is_taken_is_said_in_a_sentence() -> None:
    with socket.create_server(("0.0.0.0", 0)) as other:
        port = other.getsockname()[1]
        command = [*OURS, "--nnodes=1", f"--master_port={port}", "-m", "gristmill_cli.train", "--help"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == f"error: cannot listen at port {port}, as another program does; try another one\n"
    assert done.returncode == 2


def test_nodes_that_cannot_meet_say_so_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where another program answers at the rendezvous, which takes torch a minute to see."""

    def fail(_words: list[str]) -> None:
        raise RendezvousConnectionError("The connection to the C10d store has failed.") from OSError("Broken pipe")

    monkeypatch.setattr("torch.distributed.run.main", fail)
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "120")
    with pytest.raises(SystemExit) as ended:
        torchrun.main(["x.py"])
    said = capsys.readouterr().err
    assert ended.value.code == 1 and said.startswith("torchrun: the nodes could not meet") and said.count("\n") == 1
    assert said.endswith("(Broken pipe)\n")


def test_tasks_of_srun_end_with_the_code_of_the_signal(corpus: Path, tmp_path: Path) -> None:
    """As the script of the page asks of srun, which ends with the highest code of its tasks."""
    step = {"SLURM_JOB_ID": "9", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
    step |= {"SLURM_STEP_NODELIST": "127.0.0.1", "MASTER_PORT": str(free_port())}
    out_dir = tmp_path / "run"
    words = ("train", *small_run(corpus), *OFTEN.split(), *LONG, "--out_dir", str(out_dir))
    environments = [step | {"SLURM_PROCID": number, "SLURM_LOCALID": number} for number in ("0", "1")]
    with launch_all(be_command, words, environments, tmp_path) as launched:
        wait_until(lambda: steps_done(out_dir) >= 3)
        for process in launched.processes:
            process.terminate()
        assert launched.codes() == [143, 143], launched.said()
    assert checkpoints(out_dir) == [steps_done(out_dir)]


def stop_within_step(config: TrainConfig) -> tuple[object, str]:
    """Train until rank 1 has a signal before the third micro-batch of step 2; return the exit code and the output."""
    usual = Trainer._stop_within_step
    calls: list[int] = []

    def signalled(trainer: Trainer) -> None:
        calls.append(trainer.steps_done)
        if dist.get_rank() == 1 and calls.count(1) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        usual(trainer)

    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed), pytest.raises(SystemExit) as ended:
        patch.setattr(Trainer, "_stop_within_step", signalled)
        train(config)
    assert calls.count(1) == 3
    return ended.value.code, printed.getvalue()


@pytest.mark.parametrize("zero", [1, 3])
def test_a_stop_within_a_step_saves_the_step_before(
    config: TrainConfig, tmp_path: Path, run_ranks: Callable[..., list[Any]], zero: Literal[1, 3]
) -> None:
    """It leaves a step of many micro-batches at once; resumed, the losses are those of a run that was never stopped."""
    config = replace(config, precision="fp64", data=replace(config.data, batch_size=16))
    config = replace(config, optim=replace(config.optim, steps=3), metrics=replace(config.metrics, log_every=1))
    config = replace(config, checkpoint=CheckpointConfig(every=1000))
    alone = replace(config, parallel=ParallelConfig(micro_batches=8))
    stopped = replace(config, parallel=ParallelConfig(micro_batches=8, zero=zero))
    (code, said), (other_code, _) = run_ranks(2, stop_within_step, stopped)
    assert code == other_code == 143 and checkpoints(config.out_dir) == [1]
    assert "stopped after step 1, with step 2 left unfinished; run the same command to resume" in said
    run_ranks(1, train, alone)
    run_ranks(1, train, replace(alone, out_dir=tmp_path / "whole"))
    losses = [dict(metric_values(folder, "step", "loss")) for folder in (tmp_path / "whole", config.out_dir)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9) and len(losses[0]) == 3


def test_ranks_of_a_killed_launcher_stop_with_a_checkpoint(corpus: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    with running(command, corpus, out_dir := tmp_path / "run", *LONG) as launcher:
        wait_with(lambda: steps_done(out_dir) >= 3, launcher)
        ranks = psutil.Process(launcher.pid).children()
        launcher.kill()
        gone, alive = psutil.wait_procs(ranks, patience(60))
        for process in alive:
            process.kill()
    assert len(gone) == 2 and not alive
    assert checkpoints(out_dir) == [steps_done(out_dir)]


@pytest.mark.thorough
def test_a_node_joins_and_is_lost(
    corpus: Path, tmp_path: Path, train_in_ranks: Callable[[int, Path, list[str]], None]
) -> None:
    """Each time all ranks stop with a checkpoint and go on with the nodes that are there, to the losses of one run."""
    options = [*LONG, "--precision", "fp64", "--optim.schedule", "constant"]
    out_dir = tmp_path / "run"
    log = tmp_path / "run.log"
    rendezvous = [f"--rdzv_endpoint=localhost:{free_port()}", "--rdzv_id=run1", "--rdzv_conf=last_call_timeout=2"]
    command = [*OURS, "--nnodes=1:2", "--nproc_per_node=1", "--max-restarts=3", "--rdzv_backend=c10d", *rendezvous]
    with running(command, corpus, out_dir, *options) as first:
        wait_with(lambda: steps_done(out_dir) >= 3, first)
        with running(command, corpus, out_dir, *options) as second:
            wait_with(lambda: log.read_text().count("resuming from") == 1, first)
            at = steps_done(out_dir)
            wait_with(lambda: steps_done(out_dir) > at + 3, first)
            second.kill()
            second.wait()
        wait_with(lambda: log.read_text().count("resuming from") == 2, first)
        at = steps_done(out_dir)
        wait_with(lambda: steps_done(out_dir) > at + 3, first)
        first.terminate()
        assert first.wait(patience(120)) == 143
    said = log.read_text()
    assert (said.count("1 process ("), said.count("2 processes (")) == (2, 1)
    steps = str(steps_done(out_dir))
    whole = [*small_run(corpus), *OFTEN.split(), *options, "--optim.steps", steps]
    train_in_ranks(1, tmp_path / "whole", whole)
    losses = [dict(metric_values(folder, "step", "loss")) for folder in (tmp_path / "whole", out_dir)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9) and len(losses[0]) == int(steps)


def test_at_a_stop_the_checkpoint_comes_before_the_evaluation(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation may take longer than a launcher waits."""
    config = replace(config, eval=replace(config.eval, every=4, sample_tokens=0), checkpoint=CheckpointConfig(every=50))
    evaluated: dict[int, list[int]] = {}
    evaluate = Trainer.evaluate

    def look(trainer: Trainer, step: int) -> Any:
        evaluated[step] = checkpoints(config.out_dir)
        return evaluate(trainer, step)

    monkeypatch.setattr(Trainer, "evaluate", look)
    begun: list[int] = []

    def on_step() -> None:
        begun.append(0)
        if len(begun) == 8:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        train_as_planned(RunPlan.of(config), on_step)
    assert ended.value.code == 143 and evaluated == {4: [], 8: [8]}


@pytest.mark.parametrize("moment", ["within", "between"])
def test_a_signal_costs_at_most_the_step_that_it_comes_in(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """It comes in the third of steps that cannot be left, or right after it, where steps are long."""
    config = replace(config, metrics=replace(config.metrics, log_every=1), checkpoint=CheckpointConfig(every=50))
    owner: Any = train_step if moment == "within" else Trainer
    name = "squared_grad_norm" if moment == "within" else "report"
    usual = getattr(owner, name)
    calls: list[int] = []

    def signalled(*arguments: Any) -> Any:
        calls.append(0)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return usual(*arguments)

    monkeypatch.setattr(owner, name, signalled)
    monkeypatch.setattr("training.trainer._LONG_STEP_SECONDS", 0.0)
    with pytest.raises(SystemExit) as ended:
        train_as_planned(RunPlan.of(config))
    assert ended.value.code == 143 and checkpoints(config.out_dir) == [3]


def test_a_step_that_torchrun_would_not_wait_for_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the command line of the parent, which is torchrun's."""
    assert launchers.describe_short_stop("a step", 100.0, {}) == ""  # no torchrun
    under = {"TORCHELASTIC_RUN_ID": "1"}
    said = "a step takes 20 s, and torchrun kills its processes 30 s after a signal, perhaps before they have saved a "
    assert (
        launchers.describe_short_stop("a step", 20.0, under) == said + "checkpoint; try torchrun --shutdown-timeout 120"
    )
    assert launchers.describe_short_stop("a step", 14.0, under) == ""
    assert launchers.describe_short_stop("a step", 20.0, under | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "60"}) == ""
    command = ["python", "-m", "torch.distributed.run", "--shutdown_timeout=40", "train.py"]
    monkeypatch.setattr("psutil.Process.cmdline", lambda _: command)
    assert launchers.describe_short_stop("a step", 20.0, under) == ""
    assert "--shutdown-timeout 480" in launchers.describe_short_stop("a step", 110.0, under)
