"""AsyncTrainer: the trainer of the server, whose gradients come from workers; its updates, logs and checkpoints."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gristmill.errors import require
from training.checkpoint.record import CheckpointRecord
from training.checkpoint.shard_plans import State
from training.checkpoint.shard_storage import read_shards
from training.distributed.stop_signals import StopSignals
from training.experimental.server.async_config import AsyncConfig
from training.experimental.server.part_queue import PartQueue
from training.experimental.server.server import GradientServer, NoWorkersError, StoppedError
from training.model.batch import TokenBatch
from training.plugin import Plugin
from training.reporting.throughput import peak_flops
from training.run_plan import RunPlan
from training.sharding.shard_spec import ShardSpec
from training.trainer import Trainer


def plan_async(config: AsyncConfig) -> RunPlan:
    """Return the plan of a server's run; parts and staleness change what it computes, too."""
    plan = RunPlan.of(config)
    require(
        not plan.model.experts,
        f"model.experts {plan.model.experts} with a server and workers: nobody counts the tokens of experts there; try "
        "gristmill train",
    )
    return replace(
        plan, identity=plan.identity | {"parallel.parts": config.parts, "parallel.staleness": config.staleness}
    )


class AsyncTrainer(Trainer):
    """A `Trainer` of one process, but for the backward pass: an update is of as many gradients as a batch has parts,
    whichever come first. With a staleness of 0 they are those of one batch.

    Checkpoints also hold which parts of later batches are done: resumed, each part is used once.
    """

    def __init__(self, plan: RunPlan, device: torch.device) -> None:
        super().__init__(plan, device)
        config = plan.config
        assert isinstance(config, AsyncConfig)
        self.address = config.host, config.port
        self.queue = PartQueue(config.optim.steps, config.parts, config.staleness)
        self.server = GradientServer(
            self.model.params, self.queue, plan.identity, self.reporter.say, config.seconds_to_wait, config.workers
        )
        self.plugins.plugins.append(_DoneAhead(self))
        self.model.forward_backward = self._gradients_of_workers  # type: ignore[method-assign, assignment]

    def start(self) -> None:
        super().start()
        self.server.open(*self.address)
        self.reporter.say(f"serving {self.queue.parts} parts per step at {self.address[0]}, port {self.address[1]}")

    def step(self, step: int) -> bool:
        """Take a step as the trainer does. If no gradients come, or a signal is received meanwhile, what is done is
        saved before the error, or exit."""
        try:
            return super().step(step)
        except NoWorkersError:
            self.save_unsaved()
            raise
        except StoppedError:
            self.save_unsaved()
            self.finish_early(self.steps_done)
            sys.exit(128 + self.stop_signals.received)

    def report(self) -> None:
        """Report as the trainer does; the FLOPs are of the workers' devices, taken to be like the server's."""
        metrics = self.config.metrics
        workers = self.server.most_workers()
        self.meter.peak_flops = peak_flops(self.world.device, self.config.precision, metrics.peak_tflops, workers)
        super().report()

    def _gradients_of_workers(self, _batch: TokenBatch, scale: float) -> Tensor:
        """Return the sum of the losses of the parts whose gradients an update has, in place of the model's own."""
        loss = self.server.collect(lambda: self.stop_signals.received != 0)
        return torch.tensor(loss / scale, dtype=torch.float64, device=self.world.device)

    def __exit__(self, *error: Any) -> None:
        self.server.close()
        super().__exit__(*error)


class _DoneAhead(Plugin):
    """Saves and loads which parts of later batches are done."""

    def __init__(self, trainer: AsyncTrainer) -> None:
        self.trainer = trainer

    def state(self, state: State, stored: CheckpointRecord | None = None) -> State:
        return state if stored else state | self._ahead()

    def read(self, checkpoint: Path, group: dist.ProcessGroup) -> None:
        read_shards(self._ahead(), checkpoint, group)

    def after_load(self, step: int, stored: CheckpointRecord | None, stop: StopSignals) -> int:  # noqa: ARG002
        if stored:
            self.trainer.queue.resume(step, self.trainer.server.ahead)
            self.trainer.server.updates = self.trainer.saved = step
        return step

    def _ahead(self) -> State:
        ahead = self.trainer.server.ahead
        return {"async.done_ahead": [(ahead, ShardSpec.whole(tuple(ahead.shape)))]}
