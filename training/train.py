"""Train a decoder on token shards: `torchrun --nproc_per_node=2 training/train.py --data.train … `."""

import contextlib
import io
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

from gristmill.config import load_config
from gristmill.errors import GristmillError
from training.checkpoint.run_folder import lock_run_folder
from training.config import TrainConfig
from training.distributed.hang_detection import report_failures
from training.distributed.mesh import init_distributed
from training.distributed.stall_watch import StallWatch, gpu_busy
from training.distributed.stop_signals import StopSignals
from training.reporting.summary import Summary
from training.run_plan import RunPlan
from training.trainer import Trainer


def train(config: TrainConfig) -> Summary:
    """Train as configured; resume from the latest checkpoint in `config.out_dir` if there is one.

    Every process of torchrun calls it, or a single process. Raises UsageError for a configuration that cannot run.
    On SIGINT or SIGTERM it saves a checkpoint and raises SystemExit(128 + signal).
    """
    return train_as_planned(RunPlan.of(config))


def train_as_planned(plan: RunPlan, on_step: Callable[[], None] = lambda: None) -> Summary:
    """Train as `train` does, from options that are complete and checked; `on_step` is called before every step."""
    config = plan.config
    with (
        init_distributed(config.device, config.seconds_to_wait) as device,
        StopSignals() as stop,
        lock_run_folder(config.out_dir, plan.identity, config.optim) as folder,
        Trainer(plan, device) as trainer,
    ):
        trainer.load()
        changed = folder.describe_changed_decay(trainer.steps_done)
        folder.claim()
        trainer.start()
        if changed:
            trainer.reporter.say(changed)
        due = False
        for step in range(trainer.steps_done + 1, config.optim.steps + 1):
            on_step()
            stopping = trainer.step(step, stop.received)
            last = step == config.optim.steps
            evaluating = last or _is_due(step, config.eval.every)
            due = due or _is_due(step, config.checkpoint.every)
            saving = stopping or last or (due and not trainer.skipped)  # or a diverged model would replace good ones
            if evaluating or saving or _is_due(step, config.metrics.log_every):
                trainer.report()  # before a checkpoint: after a resume, steps before it are never recorded
            if evaluating:
                trainer.evaluate(step)
            if saving:
                trainer.save(step)
                due = False
            if stopping and not last:
                trainer.finish_early(step)
                sys.exit(128 + trainer.world.all_reduce_max(stop.received))
        return trainer.finish()


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and train. On a user error every process exits with its code, and one prints it."""
    rank = int(os.environ.get("RANK", 0))
    # torch.distributed.launch passes --local-rank=N as well as setting LOCAL_RANK, which is what we read
    arguments = [
        a for a in (sys.argv[1:] if argv is None else argv) if not a.startswith(("--local-rank=", "--local_rank="))
    ]
    try:
        with contextlib.ExitStack() as stack:
            if rank != 0:  # rank 0 alone prints the help and notes on renamed options
                stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
                stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
            config = load_config(TrainConfig, arguments, prog="train.py")
        plan = RunPlan.of(config)
        with init_distributed(config.device, config.seconds_to_wait) as device:
            watch = StallWatch(config.seconds_to_wait, lambda: gpu_busy(device))
            with report_failures(watch):
                train_as_planned(plan, watch.beat)
    except GristmillError as error:
        if rank != 0:
            time.sleep(15)  # rank 0 met the same error and prints it; the launcher kills all once the first one exits
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
