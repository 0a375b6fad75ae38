"""AsyncConfig: options of an asynchronous run, which a server and its workers are given alike."""

import os
from dataclasses import dataclass
from typing import ClassVar, Literal

from gristmill.config import Range
from gristmill.errors import require
from training.config import TrainConfig


@dataclass(frozen=True)
class AsyncConfig(TrainConfig):
    """Pre-train with a server that holds the weights and workers that send it gradients."""

    RANGES: ClassVar[dict[str, Range]] = {
        **TrainConfig.RANGES,
        "staleness": Range(0, 1000),
        **dict.fromkeys(("parts", "workers"), Range(1, 100_000)),
        "port": Range(1, 65535),
    }

    staleness: int = 2
    """Steps that a worker may be ahead: no worker begins a part of step t until t - staleness updates have been made.
    0: synchronous training."""
    parts: int = 2
    """Parts of the global batch; workers compute the gradient of one part at a time, and all parts together make an
    update. At least as many as workers."""
    workers: int = 1
    """Number of workers that the server waits for before the first part; with torchrun, all that it starts."""
    host: str = "127.0.0.1"
    """Address that the server listens on and workers connect to."""
    port: int = 29600
    """Port of the server. Anyone who can reach it can send gradients, so open it to the workers only."""
    role: Literal["auto", "server", "worker"] = "auto"
    """auto: with torchrun, rank 0 is the server and the others are workers; otherwise this process is the server.
    torchrun ends all processes when one dies; start workers separately if the run should survive the loss of one."""

    @property
    def serves(self) -> bool:
        """Return whether this process is the server."""
        return self.role == "server" or (self.role == "auto" and os.environ.get("RANK", "0") == "0")

    def check(self) -> None:
        """Raise UsageError for a value out of range, or what a server of single processes cannot do."""
        super().check()
        layout = self.parallel
        require(
            layout.dp in (0, 1) and layout.tp == layout.pp == layout.cp == 1 and layout.zero == 0,
            f"parallel.dp {layout.dp}, tp {layout.tp}, pp {layout.pp}, cp {layout.cp} and zero {layout.zero}: a worker "
            "of asynchronous training is one process; try --parallel.tp 1 --parallel.pp 1 --parallel.zero 0, and more "
            "--parts",
        )
        require(
            self.replicas.folder is None and not layout.local_steps,
            f"replicas.folder {self.replicas.folder} and parallel.local_steps {layout.local_steps} with a server: its "
            "workers take no steps of their own; try --parallel.local_steps 0, and no --replicas.folder",
        )
        require(
            layout.compression == "none",
            f"parallel.compression {layout.compression}: workers send gradients to a server, in full; try "
            "--parallel.compression none",
        )
        require(
            self.precision != "fp16",
            "precision fp16: the scale of the loss is the server's, and workers do not know it; try --precision bf16",
        )
        require(
            not self.optim.z_loss,
            f"optim.z_loss {self.optim.z_loss}: workers do not report it yet; try --optim.z_loss 0",
        )
        require(
            self.branch_from is None,
            "branch_from with asynchronous training: other runs' checkpoints do not say which parts are done; try "
            "--init_from",
        )
        require(
            not self.data.batch_ramp,
            f"data.batch_ramp {' '.join(self.data.batch_ramp)}: workers do not know how much was read; leave it out",
        )
        size = self.data.batch_size
        times = self.parts * max(1, layout.micro_batches)
        require(
            size % times == 0,
            f"data.batch_size {size} is not divisible by parts {self.parts} x parallel.micro_batches "
            f"{max(1, layout.micro_batches)}; try --data.batch_size {-(-size // times) * times}",
        )
