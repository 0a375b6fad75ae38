"""Training processes of their own, as a launcher starts them: to be killed, stopped and signalled."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gristmill.engine.execution.local import start_fork_server
from gristmill.processes import exit_with_parent
from tests.patience import patience
from training.config import TrainConfig
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
    """Processes by rank; what each writes to its stderr is in `folder`."""

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
        return [(self.folder / f"{rank}.err").read_text() for rank in range(len(self.processes))]


@contextmanager
def launch(size: int, config: TrainConfig, folder: Path, *faults: Fault, stalling: bool = False) -> Iterator[Launched]:
    """`size` processes that train; they are killed at the end if they still run.

    `stalling`: the device of rank 0 counts as busy, so that its watch reports a stall after a second.
    """
    start_fork_server(["pytest", "training.loop"])
    context = multiprocessing.get_context("forkserver")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's agent has it
    folder.mkdir(parents=True, exist_ok=True)
    arguments = [(rank, size, store.port, config, folder, faults, stalling) for rank in range(size)]
    processes: list[BaseProcess] = [context.Process(target=be_rank, args=each) for each in arguments]
    for process in processes:
        process.start()
    try:
        yield Launched(processes, folder)
    finally:
        for process in processes:
            process.kill()
            process.join()


def be_rank(
    rank: int, size: int, port: int, config: TrainConfig, folder: Path, faults: tuple[Fault, ...], stalling: bool
) -> None:
    exit_with_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # the fork server has it blocked
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ.update({key: str(value) for key, value in place.items()})
    os.dup2(os.open(folder / f"{rank}.err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    sys.stderr = os.fdopen(2, "w")
    torch.set_num_threads(1)
    watch = StallWatch(1.0, lambda: stalling and rank == 0)
    with faults_of(rank, faults), init_distributed("cpu", config.seconds_to_wait), report_failures(watch):
        train(config)


@contextmanager
def faults_of(rank: int, faults: Sequence[Fault]) -> Iterator[None]:
    """Let them befall this rank."""
    step = Trainer.step

    def faulty(self: Trainer, number: int) -> bool:
        for fault in faults:
            if (fault.rank, fault.step) == (rank, number):
                befall(fault.kind)
        return step(self, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", faulty)
        yield


def befall(kind: str) -> None:
    if kind == "raise":
        raise ValueError("an error of our own")
    if kind == "exit":
        os._exit(3)
    if kind == "sleep":
        time.sleep(1000)
    os.kill(os.getpid(), getattr(signal, kind))
