"""Training processes of their own, as a launcher starts them: to be killed, stopped and signalled."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gristmill.engine.execution.local import start_fork_server
from gristmill.processes import exit_with_parent
from gristmill_cli.__main__ import main
from tests.patience import patience, wait_until
from training.config import TrainConfig
from training.distributed import hang_detection
from training.distributed.hang_detection import report_failures
from training.distributed.process_group import init_distributed
from training.distributed.stall_watch import StallWatch
from training.train import train
from training.trainer import Trainer


@dataclass(frozen=True)
class Fault:
    """What befalls a rank when it begins a step: raise, exit, sleep, or a signal's name."""

    kind: str
    rank: int
    step: int


@dataclass(frozen=True)
class Launched:
    """Processes by rank; what each writes to its stdout and its stderr is in `folder`."""

    processes: list[BaseProcess]
    folder: Path

    def codes(self, but: Sequence[int] = (), seconds: float = 90.0) -> list[int | None]:
        """The exit codes, when all `but` some ranks have ended or so much time has passed; None where none is."""
        deadline = time.monotonic() + patience(seconds)
        for rank, process in enumerate(self.processes):
            if rank not in but:
                process.join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in self.processes]

    def said(self) -> list[str]:
        """What each has written to its stderr."""
        return [(self.folder / f"{rank}.err").read_text() for rank in range(len(self.processes))]

    def printed(self) -> list[str]:
        """What each has written to its stdout."""
        return [(self.folder / f"{rank}.out").read_text() for rank in range(len(self.processes))]


@contextmanager
def launch(size: int, config: TrainConfig, folder: Path, *faults: Fault, stalling: bool = False) -> Iterator[Launched]:
    """`size` processes that train; they are killed at the end if they still run.

    `stalling`: from the fault on, the device of rank 0 counts as busy: its watch reports a stall after a second.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's agent has it
    own = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    environments = [own | rank_variables(rank, size, store.port) for rank in range(size)]
    with launch_all(be_rank, (config, faults, stalling), environments, folder) as launched:
        yield launched


def rank_variables(rank: int, size: int, port: int) -> dict[str, str]:
    """The variables of a rank among `size` on this machine that meet at a port."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    return {name: str(value) for name, value in variables.items()} | {"MASTER_ADDR": "127.0.0.1"}


@contextmanager
def launch_all(
    function: Callable[..., object], arguments: tuple[Any, ...], environments: Sequence[Mapping[str, str]], folder: Path
) -> Iterator[Launched]:
    """For each environment, which adds to this one, a process that calls the function; they end with the block.

    They are as those that a launcher starts, but forked with all modules imported, which takes a cold one seconds.
    """
    start_fork_server(["pytest", "training.loop"])
    context = multiprocessing.get_context("forkserver")
    folder.mkdir(parents=True, exist_ok=True)
    processes: list[BaseProcess] = [
        context.Process(target=be_process, args=(rank, folder, {**os.environ, **environment}, function, arguments))
        for rank, environment in enumerate(environments)
    ]
    for rank, process in enumerate(processes):
        for name in ("out", "err"):
            (folder / f"{rank}.{name}").touch()
        process.start()
    try:
        yield Launched(processes, folder)
    finally:
        for process in processes:
            process.kill()
            process.join()


def be_process(
    rank: int, folder: Path, environment: Mapping[str, str], function: Callable[..., object], arguments: tuple[Any, ...]
) -> None:
    exit_with_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # the fork server has it blocked
    os.environ.update(environment)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout = os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w")
    torch.set_num_threads(1)
    function(*arguments)


def be_rank(config: TrainConfig, faults: tuple[Fault, ...], stalling: bool) -> None:
    rank = int(os.environ["RANK"])
    befallen = config.out_dir / "befallen"
    watch = StallWatch(1.0, lambda: stalling and rank == 0 and befallen.exists())
    with faults_of(rank, faults, befallen), init_distributed("cpu", config.seconds_to_wait), report_failures(watch):
        train(config)


def be_command(*words: str) -> None:
    """Run a command of `gristmill`."""
    sys.argv = ["gristmill", *words]
    main()


@contextmanager
def faults_of(rank: int, faults: Sequence[Fault], befallen: Path) -> Iterator[None]:
    """Let them befall this rank, which says so by a file; others begin the step after that, however slow all are."""
    step = Trainer.step

    def faulty(self: Trainer, number: int) -> bool:
        for fault in faults:
            if fault.step == number and fault.rank == rank:
                befallen.touch()
                befall(fault.kind)
            elif fault.step == number:
                wait_until(befallen.exists)
        return step(self, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", faulty)
        if any(fault.kind == "sleep" for fault in faults):  # which all ranks answer, a busy machine late
            patch.setattr(hang_detection, "_ANSWER_SECONDS", patience(30.0))
        yield


def befall(kind: str) -> None:
    if kind == "raise":
        raise ValueError("an error of our own")
    if kind == "exit":
        os._exit(3)
    if kind == "sleep":
        time.sleep(1000)
    os.kill(os.getpid(), getattr(signal, kind))
