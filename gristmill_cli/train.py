"""Command: pre-train a decoder, also with `torchrun --nproc_per_node=2 -m gristmill_cli.train …` from any folder."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":  # with -m the current folder comes first, where `training` may be a folder of the user
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import training.train

if TYPE_CHECKING:
    import torch

    from training.run_plan import RunPlan
    from training.trainer import Trainer

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and train; with `--record.steps`, record these steps for `gristmill check`."""
    training.train.main(argv, _trainer)


def _trainer(plan: "RunPlan", device: "torch.device") -> "Trainer":
    """Return the trainer of a run, with a recorder if it is to record steps."""
    from training.trainer import Trainer

    if not plan.config.record.steps:
        return Trainer(plan, device)
    from gristmill_parity.recorded_training import recorded_trainer

    return recorded_trainer(plan, device)


if __name__ == "__main__":
    main()
