"""Stint: what a run does from a start of its processes until they end."""

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from gristmill_parity.runs.run_case import EVALUATE_EVERY, EVALUATED, SAVE_EVERY, STOP_BEFORE_STEP, RunCase
from gristmill_parity.runs.shards import HOLDOUT, train_folders
from gristmill_parity.worker import SEED
from training.checkpoint.checkpoint_config import CheckpointConfig
from training.config import TrainConfig
from training.data.data_config import DataConfig
from training.experimental.parallel_config import ParallelConfig
from training.loop import train_as_planned
from training.memory.memory_config import MemoryConfig, OffloadTarget
from training.optim.stability import StabilityConfig
from training.reporting.reporting_config import EvalConfig, MetricsConfig
from training.run_plan import RunPlan

RUN = "run"  # its folder, next to its token shards


@dataclass(frozen=True)
class Stint:
    """A stint of a case's run, whose files are in `folder`; `ends` is how it ends."""

    case: RunCase
    folder: Path
    layout: ParallelConfig
    ends: Literal["crash", "signal", "done"]

    @property
    def config(self) -> TrainConfig:
        """Return the options of the run."""
        case = self.case
        train = train_folders(self.folder, max(1, len(case.weights)))
        parameters: OffloadTarget = case.offload if self.layout.zero == 3 else "device"
        return TrainConfig(
            out_dir=self.folder / RUN,
            data=DataConfig(
                train=tuple(train),
                holdout=self.folder / HOLDOUT,
                weights=case.weights,
                seq_len=case.seq_len,
                batch_size=case.sequences,
                batch_ramp=case.batch_ramp,
                mask_documents=case.documents,
            ),
            model=case.model,
            optim=replace(case.optim, z_loss=case.z_loss),
            eval=EvalConfig(every=EVALUATE_EVERY, sequences=EVALUATED, sample_tokens=0),
            checkpoint=CheckpointConfig(every=SAVE_EVERY),
            metrics=MetricsConfig(log_every=1, tensorboard=False),
            parallel=self.layout,
            memory=MemoryConfig(case.recompute, case.offload, parameters),
            stability=StabilityConfig(initial_loss_scale=case.fp16_scale, scale_growth_interval=2),
            seed=SEED,
            precision=case.precision,
            compile=case.compiled,
            device=case.device,
        )


class CrashError(Exception):
    """The end of a process in the middle of a run."""


def run_stint(stint: Stint) -> None:
    """Train as one of the ranks of a stint; what it prints goes to a file next to the run."""
    steps = 0

    def before_step() -> None:
        nonlocal steps
        steps += 1
        if steps == STOP_BEFORE_STEP and stint.ends == "crash":
            raise CrashError
        if steps == STOP_BEFORE_STEP and stint.ends == "signal":
            os.kill(os.getpid(), signal.SIGTERM)

    with _output_to(stint.folder / f"rank-{os.environ['RANK']}.log"):
        plan = RunPlan.of(stint.config)
        try:
            train_as_planned(plan, before_step)
        except CrashError:
            assert stint.ends == "crash"
        except SystemExit as ended:
            assert stint.ends == "signal" and ended.code == 128 + signal.SIGTERM, f"the run ended with {ended.code}"
        else:
            assert stint.ends == "done", f"the run took all its steps, though a {stint.ends} came before"


@contextlib.contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Let what this process prints go to a file: signals are answered by file descriptor."""
    kept = os.dup(2)
    with path.open("a") as log, contextlib.redirect_stdout(log):
        os.dup2(log.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
