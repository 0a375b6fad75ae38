"""The page on several nodes: its commands on two "nodes" of this machine; variables of srun and mpirun."""

import contextlib
import os
import random
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gristmill.errors import UsageError
from tests.gristmill_cli.documentation import commands
from tests.patience import patience
from tests.training.conftest import small_run
from tests.training.launch import launch_all, rank_variables
from training.config import TrainConfig
from training.distributed import process_group
from training.distributed.launchers import adopt_launcher
from training.distributed.process_group import init_distributed
from training.reporting.metrics_file import METRICS, read_metrics
from training.run_plan import RunPlan
from training.train import train

BY_TORCHRUN, BY_SRUN = commands("guides/cluster.md")
SRUN = """#!{python}
# Starts a step of as many tasks as --ntasks says, on as many nodes of this machine, with srun's variables.
import os, subprocess, sys
options = [word for word in sys.argv[1:] if word.startswith("--ntasks")]
tasks = int(options[0].partition("=")[2])
command = sys.argv[1 + len(options):]
base = {{"SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_STEP_TASKS_PER_NODE": f"1(x{{tasks}})", "SLURM_LOCALID": "0",
         "SLURM_STEP_NODELIST": "127.0.0.[1-2]", "SLURM_JOB_ID": os.environ["SLURM_JOB_ID"]}}
started = [subprocess.Popen(command, env=os.environ | base | {{"SLURM_PROCID": str(task), "SLURM_NODEID": str(task)}})
           for task in range(tasks)]
sys.exit(max(process.wait() for process in started))
"""


def free_port() -> int:
    """A port that nothing listens at, below those that Linux gives to connections and to servers at port 0.

    One of these may be another process's before the launcher that is told it listens there.
    """
    random_of_system = random.SystemRandom()  # not one that tests in several processes may have seeded alike
    while True:
        port = random_of_system.randrange(20_000, 32_768)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port


@pytest.fixture
def variables(corpus: Path, tmp_path: Path) -> dict[str, str]:
    words = small_run(corpus)
    options = dict(zip(words[::2], words[1::2], strict=True)) | {"--optim.steps": "3", "--eval.sample_tokens": "0"}
    sections: dict[str, list[str]] = {}
    for option, value in options.items():
        section, _, key = option.removeprefix("--").rpartition(".")
        sections.setdefault(section, []).append(f"{key} = {value if value.isdigit() else repr(value)}")
    toml = "\n".join([*sections.pop(""), *(line for name, lines in sections.items() for line in [f"[{name}]", *lines])])
    (tmp_path / "run.toml").write_text(toml)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {
        **os.environ,
        "CONFIG": str(tmp_path / "run.toml"),
        "OUT": str(tmp_path),
        "PATH": path,
        "OMP_NUM_THREADS": "1",
    }


def losses(out_dir: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(out_dir / METRICS) if record["kind"] == "step"]


def start(script: str, env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", "-euc", script], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )  # fmt: skip


def finish(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        said = process.communicate(timeout=patience(120))[0]
        assert process.returncode == 0, said


@pytest.mark.thorough
def test_two_nodes_train_as_the_page_says(
    variables: dict[str, str], tmp_path: Path, corpus: Path, train_in_ranks: Callable[[int, Path, list[str]], None]
) -> None:
    options = [*small_run(corpus), "--optim.steps", "3", "--eval.sample_tokens", "0", "--parallel.zero", "1"]
    train_in_ranks(2, tmp_path / "wanted", options)
    script = BY_TORCHRUN.replace("29400", str(free_port()))
    assert script != BY_TORCHRUN
    finish(*(start(script, variables | {"HEAD": "127.0.0.1"}) for _ in range(2)))
    (tmp_path / "srun").write_text(SRUN.format(python=sys.executable))
    (tmp_path / "srun").chmod(stat.S_IRWXU)
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "MASTER_PORT": str(free_port())}
    finish(start(BY_SRUN, variables | job))
    assert losses(tmp_path / "model") == losses(tmp_path / "slurm") == losses(tmp_path / "wanted") != []


def test_the_variables_of_srun() -> None:
    step = {
        "SLURM_JOB_ID": "1234567", "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
        "SLURM_PROCID": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "3", "SLURM_STEP_NODELIST": "gpu[03-05],cpu1",
    }  # fmt: skip
    adopt_launcher(environ := dict(step))
    assert {name: environ[name] for name in environ.keys() - step.keys()} == {
        "RANK": "6", "WORLD_SIZE": "7", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "gpu03",
        "MASTER_PORT": "29967",
    }  # fmt: skip
    for other in (
        step | {"RANK": "0"},  # torchrun's, which srun started once on each node
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "1"},  # a batch script, or a shell of salloc
        step
        | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_PROCID": "0", "SLURM_NODEID": "0"},
    ):
        adopt_launcher(environ := dict(other))
        assert environ == other
    adopt_launcher(environ := step | {"MASTER_ADDR": "mine", "MASTER_PORT": "1"})
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"], environ["RANK"]) == ("mine", "1", "6")


def test_a_call_of_train_reads_them_too(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that they are as before after the test
        monkeypatch.delenv(name)
    for name, value in {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    monkeypatch.setattr("training.loop.train_as_planned", lambda plan: plan)
    plan: Any = train(config)
    assert isinstance(plan, RunPlan) and plan.layout.dp == 2


def test_a_task_that_sees_one_gpu_of_its_node_is_told_srun_s_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(UsageError, match=r"4 processes and 1 GPU .*srun with --gpus-per-node"), init_distributed():
        pass


def test_the_variables_of_mpirun() -> None:
    ranks = {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    given = {f"OMPI_COMM_WORLD_{name}": value for name, value in ranks.items()}
    adopt_launcher(environ := dict(given))
    assert [environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")] == [
        "1", "2", "1", "2", "127.0.0.1",
    ]  # fmt: skip
    ports = set()
    for job in ("prterun-a-1@1", "prterun-a-2@1"):
        adopt_launcher(environ := given | {"PMIX_NAMESPACE": job})
        ports.add(environ["MASTER_PORT"])
    assert len(ports) == 2  # two jobs on one machine
    with pytest.raises(UsageError, match=r"mpirun -x MASTER_ADDR=HOST .* or start them with torchrun"):
        adopt_launcher(given | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"})


def test_the_variables_of_mpich() -> None:
    adopt_launcher(environ := {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"})
    assert [environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")] == [
        "1", "2", "1", "2", "127.0.0.1",
    ]  # fmt: skip
    adopt_launcher(alone := {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"})
    assert "RANK" not in alone


def meet(other: bool) -> None:
    """Meet the other ranks, as rank 1 with another version if there is an `other`; print how it ended."""
    with pytest.MonkeyPatch.context() as patch:
        if other and os.environ["RANK"] == "1":
            patch.setattr(process_group, "_describe_versions", lambda: "gristmill 0.0.9, torch 2.1")
        try:
            with init_distributed("cpu"):
                print("met")
        except UsageError as error:
            print(error)


@pytest.mark.parametrize("other", [False, True])
def test_a_node_with_another_version_is_refused_by_all(tmp_path: Path, other: bool) -> None:
    port = free_port()
    with launch_all(meet, (other,), [rank_variables(rank, 2, port) for rank in range(2)], tmp_path) as launched:
        assert launched.codes() == [0, 0], launched.said()
        said = [printed.strip() for printed in launched.printed()]
    if not other:
        assert said == ["met", "met"]
    else:
        assert said[0] == said[1] and said[0].startswith("rank 1 has gristmill 0.0.9, torch 2.1 on ")
        assert "and rank 0 has gristmill " in said[0] and "\n" not in said[0]
