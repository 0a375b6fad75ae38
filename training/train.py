"""Train a decoder on token shards: `torchrun --nproc_per_node=2 training/train.py --data.train … `."""

import contextlib
import io
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

from gristmill.config import load_config
from gristmill.errors import GristmillError
from training.checkpoint.run_folder import claim
from training.config import TrainConfig
from training.distributed.hang_detection import watched
from training.distributed.mesh import init_distributed
from training.distributed.stop_signals import StopSignals
from training.trainer import Summary, Trainer


def train(config: TrainConfig) -> Summary:
    """Train as configured, going on from the checkpoint in `config.out_dir` if there is one.

    Called by every process of a torchrun, or by one alone. Raises UsageError for a configuration that
    cannot run; on SIGINT or SIGTERM it saves a checkpoint and raises SystemExit(128 + signal).
    """
    config.check()
    with init_distributed(config.device, config.timeout) as device, StopSignals() as stop:
        trainer = Trainer(config, device)
        with claim(config.out_dir, trainer.identity, config.optim.steps, trainer.world), trainer:
            trainer.resume()
            for step in range(trainer.done + 1, config.optim.steps + 1):
                asked = trainer.step(step, stop.received)
                last = step == config.optim.steps
                evaluates = last or _due(step, config.eval.every)
                saves = asked or last or _due(step, config.checkpoint.every)
                if evaluates or saves or _due(step, config.metrics.log_every):
                    trainer.report()  # before a checkpoint: what is not recorded by then never will be
                if evaluates:
                    trainer.evaluate(step)
                if saves:
                    trainer.save(step)
                if asked and not last:
                    trainer.say_stopped(step)
                    sys.exit(128 + trainer.world.all_reduce_max(stop.received))
            return trainer.finish()


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def main(argv: Sequence[str] | None = None) -> None:
    """The command line. A user's mistake is told once, whatever the number of processes; all exit with its code."""
    rank = int(os.environ.get("RANK", 0))
    # torch.distributed.launch passes --local-rank=N as well as setting LOCAL_RANK, which is what we read
    arguments = [
        a for a in (sys.argv[1:] if argv is None else argv) if not a.startswith(("--local-rank=", "--local_rank="))
    ]
    try:
        with contextlib.ExitStack() as stack:
            if rank != 0:  # the help and notes on renamed options are printed once
                stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
                stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
            config = load_config(TrainConfig, arguments, prog="train.py")
        config.check()
        with init_distributed(config.device, config.timeout), watched():
            train(config)
    except GristmillError as error:
        if rank != 0:
            # the main process met it too and is about to tell; the launcher ends all when the first one ends
            time.sleep(5)
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
