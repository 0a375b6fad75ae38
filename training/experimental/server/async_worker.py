"""Worker: computes gradients of the parts that the server gives it, with the weights that come along."""

from collections.abc import Callable
from dataclasses import replace

import torch

from gristmill.errors import GristmillError, UsageError
from gristmill.wording import count_of
from training.data.batch_schedule import BatchSplit
from training.data.batches import Batches
from training.experimental.server.async_config import AsyncConfig
from training.experimental.server.messages import Link, connect
from training.experimental.server.part_queue import Part
from training.experimental.server.server import comparable, flat_weights
from training.model.decoder import meta_decoder
from training.parallel.mesh import build_world
from training.parallel.parallelize import parallelize
from training.run_plan import RunPlan


class ServerLostError(GristmillError):
    """The server is gone, or has stopped, before all is done."""


def work(plan: RunPlan, device: torch.device, on_part: Callable[[Part], None] = lambda _: None) -> int:
    """Work until the server says that all is done; returns the number of parts. `on_part` is called before each.

    Raises UsageError if there is no server or it has other options, ServerLostError if it goes or stops.
    """
    config = plan.config
    assert isinstance(config, AsyncConfig)
    worker = _GradientWorker(plan, device)
    try:
        link = connect(config.host, config.port, config.seconds_to_wait)
    except OSError as error:
        raise UsageError(
            f"no server at host {config.host}, port {config.port} ({error}); start it with --role server and the same "
            "options, or give its --host and --port"
        ) from error
    with link:
        try:
            return worker.run(link, on_part)
        except (EOFError, OSError) as error:
            raise ServerLostError(
                f"the server at host {config.host}, port {config.port} has stopped, or did not hear from this worker "
                "within its --timeout; start what has stopped again: both resume"
            ) from error


class _GradientWorker:
    """A model of one process, and the sequences of any part of any batch."""

    def __init__(self, plan: RunPlan, device: torch.device) -> None:
        config = plan.config
        layout = plan.layout
        assert isinstance(config, AsyncConfig)
        world = build_world(layout, device, config.seconds_to_wait)
        self.plan = plan
        self.device = device
        self.model = parallelize(
            meta_decoder(plan.model), layout, world, config.seed, config.precision, plan.memory, config.compile,
            config.data.seq_len,
        )  # fmt: skip
        sequences, mix = plan.train.sequences(config.seed, config.out_dir if config.data.is_packed else None)
        split = BatchSplit.of(config.data, replace(layout, dp=config.parts))
        options = config.seed, config.data.order, mix, config.data.mask_documents
        self.parts = [Batches(sequences, split, number, *options) for number in range(config.parts)]
        self.weights = flat_weights(self.model.params)

    def run(self, link: Link, on_part: Callable[[Part], None]) -> int:
        """Compute what the server gives until it says that all is done; returns the number of parts."""
        link.send({"identity": comparable(self.plan.identity)})
        done = 0
        while "part" in (header := link.receive(self.weights)):
            step, number = header["part"]
            on_part((step, number))
            if header["has_values"]:
                self._load()
            with link.alive():
                loss = self._backward(step, number)
            link.send({"loss": loss}, torch.cat([self._gradient(p.local) for p in self.model.params]))
            done += 1
        if "refused" in header:
            raise UsageError(
                f"the server has another run, which differs in {header['refused']}; give this worker the "
                "server's options"
            )
        if not header["done"]:
            raise ServerLostError(
                f"the server stopped before the run was complete, after {count_of(done, 'part')} by this "
                "worker; to resume, "
                "restart the server, then this worker"
            )
        return done

    @torch.no_grad()
    def _load(self) -> None:
        """Take over the weights that were received."""
        params = self.model.params
        for p, values in zip(params, self.weights.split([p.local.numel() for p in params]), strict=True):
            p.local.copy_(values.view_as(p.local))
        self.model.after_load()
        self.model.all_gather_params()

    def _backward(self, step: int, number: int) -> float:
        """Leave the gradient of a part of a batch on the parameters; returns its term of the mean loss."""
        batches = self.parts[number]
        targets = batches.target_count(step)
        for p in self.model.params:
            p.local.grad = p.module_param.grad = None
        return float(self.model.forward_backward(batches.batch(step).to(self.device), 1 / targets)) / targets

    def _gradient(self, local: torch.nn.Parameter) -> torch.Tensor:
        assert local.grad is not None
        return local.grad.flatten().cpu()
