"""Train asynchronously: a server and its workers, `torchrun --nproc_per_node=3 training/train_async.py …`."""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

from training.distributed.command_line import exit_on_user_error, read_options
from training.experimental.server.async_config import AsyncConfig


def train_async(config: AsyncConfig) -> None:
    """Serve or work, as `config` says; the server resumes from the latest checkpoint in `config.out_dir`.

    Raises UsageError for a configuration that cannot run, ServerLostError on a worker whose server is gone.
    """
    from training.distributed.process_group import init_distributed
    from training.experimental.server.async_trainer import AsyncTrainer, plan_async
    from training.experimental.server.async_worker import work
    from training.loop import train_as_planned

    serves = config.serves
    if config.role == "auto" and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        config = replace(config, workers=int(os.environ["WORLD_SIZE"]) - 1)
    for name in ("RANK", "WORLD_SIZE"):  # a launcher's: each process here is a group of its own
        os.environ.pop(name, None)
    config.check()
    plan = plan_async(config)
    if serves:
        train_as_planned(plan, make=AsyncTrainer)
        return
    with init_distributed(config.device, config.seconds_to_wait) as device:
        print(f"all parts are done, {work(plan, device)} of them by this worker", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and serve or work."""
    with exit_on_user_error():
        config = read_options(AsyncConfig, argv, prog="gristmill train-async")
        config.check()
        train_async(config)


if __name__ == "__main__":
    main()
