"""A model spread over processes, as one of them sees it: forward, backward, and the weights it updates."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from training.config import ModelConfig
from training.data_parallel import Replicas
from training.fsdp import synchronize_gradients
from training.gradients import summations
from training.initialize import fill_initial
from training.layout import ParallelConfig
from training.mesh import World
from training.model import Decoder
from training.parallelize import parallelize
from training.piece import Weight
from training.pipeline_parallel import Pipeline
from training.precision import autocast
from training.stages import whole_name
from training.tensor_parallel import divided_dim, divided_piece


@dataclass(frozen=True)
class Batch:
    """A replica's share of a step: ids and targets (B, T) int64, and the sequences' numbers (B,) int64."""

    ids: Tensor
    targets: Tensor
    samples: Tensor

    def to(self, device: torch.device) -> "Batch":
        return Batch(*(t.to(device, non_blocking=True) for t in (self.ids, self.targets, self.samples)))


class ParallelModel:
    """This process's parts, their weights, and what is done with them together with the other processes."""

    def __init__(
        self, config: ModelConfig, layout: ParallelConfig, world: World, seed: int, precision: str = "fp32"
    ) -> None:
        self.config, self.layout, self.world, self.precision = config, layout, world, precision
        dtype = torch.float64 if precision == "fp64" else torch.float32
        self.parts = parallelize(config, layout, world, dtype)
        for part in self.parts:
            part.to_empty(device=world.device)
            part.tie()  # to_empty gave the tied matrices a memory each
        shard, replicate = world.axis("shard"), world.axis("replicate")
        plain = [p for part in self.parts for p in part.parameters() if not isinstance(p, DTensor)]
        self.replicas = Replicas(plain, shard, replicate, layout.zero)
        self.weights = [w for part in self.parts for w in self._weights(part)]
        self._summations = summations(layout, bool(config.tied), world)
        self.pipeline = Pipeline(self.parts, layout, world.axis("pp"), world.device) if layout.pp > 1 else None
        with torch.no_grad():
            for w in self.weights:
                fill_initial(w.own, w.name, w.piece, config, seed)
        self.replicas.publish()

    def forward_backward(self, batch: Batch, scale: float) -> Tensor:
        """Set the gradients of `scale` x the loss summed over all replicas' targets, on what is updated here.

        Returns this process's part of the summed loss in nats, 0-d: it is the same for all that divide a
        matrix, and lies with the last stage.
        """
        loss = self._pipelined(batch, scale) if self.pipeline else self._accumulated(batch, scale)
        for w in self.weights:
            if isinstance(w.full, DTensor):
                grad = w.full.grad
                w.own.grad = grad.to_local() if isinstance(grad, DTensor) else None
        for summation in self._summations:
            summation(self.weights)
        return loss

    def zero_grad(self) -> None:
        for w in self.weights:
            w.own.grad = w.full.grad = None

    def loss(self, ids: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
        """The micro-batches' summed loss in nats without gradients, 0-d float64: zero but with the last stage."""
        with self.evaluating(), autocast(self.world.device, self.precision):
            if self.pipeline:
                outputs = self.pipeline.forward(ids, targets)
            else:
                outputs = [self.parts[0](i, t) for i, t in zip(ids, targets, strict=True)]
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        return total + sum(output.double().sum() for output in outputs)

    def _accumulated(self, batch: Batch, scale: float) -> Tensor:
        """Micro-batch by micro-batch; only the last one's gradients travel, or with ZeRO-2 each one's."""
        rounds = self.layout.micro_batches
        parts = zip(*(t.chunk(rounds) for t in (batch.ids, batch.targets, batch.samples)), strict=True)
        total = torch.zeros((), device=self.world.device)
        for number, (ids, targets, samples) in enumerate(parts, start=1):
            travels = number == rounds or self.layout.zero == 2
            synchronize_gradients(self.parts[0], travels)
            if travels:
                self.replicas.arm()
            with autocast(self.world.device, self.precision):
                loss = self.parts[0](ids, targets, samples)
            (loss.sum() * scale).backward()
            if travels:
                self.replicas.finish()
            total = total + loss.detach().sum()
        return total

    def _pipelined(self, batch: Batch, scale: float) -> Tensor:
        assert self.pipeline is not None
        with autocast(self.world.device, self.precision):
            loss = self.pipeline.forward_backward(batch.ids, batch.targets, batch.samples, scale)
        self.replicas.finish()  # not during the schedule: only it knows which backward pass is the last
        return loss

    def _weights(self, part: Decoder) -> list[Weight]:
        tp, shard, replicate = (self.world.axis(name) for name in ("tp", "shard", "replicate"))
        with torch.device("meta"):
            shapes = {name: tuple(p.shape) for name, p in Decoder(self.config).named_parameters()}
        found = []
        for name, p in part.named_parameters():
            whole = whole_name(part, name)
            own = self.replicas.own.get(id(p))
            if own is None:
                assert isinstance(p, DTensor)
                own = nn.Parameter(p.to_local(), requires_grad=False)
            piece = divided_piece(whole, shapes[whole], tp).part(0, shard.size, shard.rank)
            assert piece.size == tuple(own.shape), (name, piece, own.shape)
            held_alike = replicate.rank > 0 or (divided_dim(whole) is None and tp.rank > 0)
            found.append(Weight(whole, p, own, piece, not held_alike and whole == name))
        return found

    def evaluating(self) -> "_Evaluating":
        return _Evaluating(self.parts)


class _Evaluating:
    """While open: no dropout, no gradients."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self.parts, self.no_grad = parts, torch.no_grad()

    def __enter__(self) -> None:
        self.no_grad.__enter__()
        for part in self.parts:
            part.eval()

    def __exit__(self, *error: object) -> None:
        self.no_grad.__exit__(None, None, None)
        for part in self.parts:
            part.train()
