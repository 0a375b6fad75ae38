"""training/train.py with faults: for each attempt the environment's FAULTS names a rank, a step and what befalls it."""

import os
import time

from training.train import main
from training.trainer import Trainer


def fail(how: str) -> None:
    if how == "raise":
        raise RuntimeError("as was asked")
    if how == "exit":
        os._exit(3)
    time.sleep(1000)


def install() -> None:
    faults, attempt = os.environ["FAULTS"].split(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt == len(faults):
        return
    rank, step, how = faults[attempt].split(":")
    inner = Trainer._measure

    def measure(self: Trainer, *arguments: object) -> object:
        if self.world.rank == int(rank) and self.done + 1 == int(step):
            fail(how)
        return inner(self, *arguments)  # type: ignore[arg-type]

    Trainer._measure = measure  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    install()
    main()
