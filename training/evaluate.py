"""Evaluate a checkpoint on token shards and on text files: `gristmill evaluate CHECKPOINT TOKENS`, or with torchrun.

The command; evaluation.py does the work. Nothing here imports torch, which takes seconds, before the options are known
to be right.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

from training.distributed.command_line import exit_on_user_error, read_options
from training.evaluate_config import EvaluateConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, evaluate and print. On a user error every process exits with its code."""
    with exit_on_user_error():
        config = read_options(EvaluateConfig, argv, prog="gristmill evaluate")
        config.check()

        if config.tasks and not sys.stderr.isatty():
            os.environ.setdefault("TQDM_DISABLE", "1")  # read as tqdm is imported
        from training.evaluation import evaluate_and_report_failures

        evaluate_and_report_failures(config)


if __name__ == "__main__":
    main()
