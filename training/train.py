"""Train a decoder on token shards: `torchrun --nproc_per_node=2 -m gristmill_cli.train --data.train …`.

The command and its options; the loop is in loop.py. Nothing here imports torch, which takes seconds, before the options
are known to be right.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

from gristmill.processes import ends_at_ctrl_c
from training.config import TrainConfig
from training.distributed.command_line import exit_on_user_error, read_options
from training.distributed.launchers import adopt_launcher

if TYPE_CHECKING:
    from training.reporting.metrics_file import Summary
    from training.trainer import Trainer


def train(config: TrainConfig) -> "Summary":
    """Train as configured; resume from the latest checkpoint in `config.out_dir` if there is one.

    Every process of torchrun calls it, or a single process. Raises UsageError for a configuration that cannot run.
    On SIGINT or SIGTERM it saves a checkpoint and raises SystemExit(128 + signal).
    """
    adopt_launcher()
    from training.loop import train_as_planned
    from training.run_plan import RunPlan

    return train_as_planned(RunPlan.of(config))


def main(argv: Sequence[str] | None = None, make: "Callable[..., Trainer] | None" = None) -> None:
    """Parse the command line and train. On a user error every process exits with its code, and one prints it.

    `make` makes the trainer in place of `Trainer`, as in `train_as_planned`.
    """
    with exit_on_user_error():
        with ends_at_ctrl_c():  # until torch is imported
            config = read_options(TrainConfig, argv, prog="gristmill train")
            config.check()
            from training.loop import train_and_report_failures
        if make is None:
            train_and_report_failures(config)
        else:
            train_and_report_failures(config, make)


if __name__ == "__main__":
    main()
