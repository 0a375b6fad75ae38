"""A model spread over processes, as one of them sees it: forward, backward, and the weights it updates."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from training.distributed.collectives import all_gather
from training.distributed.layout import ParallelConfig
from training.distributed.mesh import World
from training.kernels.precision import autocast
from training.memory.memory_config import MemoryConfig
from training.memory.offload_parameters import ParametersOnDisk
from training.model.batch import Batch
from training.model.decoder import Decoder
from training.model.initialize import fill_initial
from training.model.model_config import ModelConfig
from training.parallel.data_parallel import GradReducer
from training.parallel.fsdp import synchronize_gradients
from training.parallel.gradients import summations
from training.parallel.parallelize import parallelize
from training.parallel.pipeline_stages import stage_owner, whole_name
from training.parallel.tensor_parallel import tp_dim, tp_shard
from training.sharding.shard_spec import shard_range
from training.sharding.sharded_parameter import ShardedParameter

if TYPE_CHECKING:
    from training.parallel.pipeline_parallel import Pipeline


class ParallelModel:
    """This process's parts, their weights, and what is done with them together with the other processes."""

    def __init__(
        self,
        config: ModelConfig,
        layout: ParallelConfig,
        world: World,
        seed: int,
        precision: str = "fp32",
        memory: MemoryConfig = MemoryConfig(),
        compiled: bool = False,
    ) -> None:
        self.config, self.layout, self.world, self.precision = config, layout, world, precision
        dtype = torch.float64 if precision == "fp64" else torch.float32
        self.parts = parallelize(config, layout, world, dtype, memory, compiled)
        self.files = ParametersOnDisk(_folder(memory), world.rank) if memory.parameters == "disk" else None
        for part in self.parts:
            if self.files is not None:
                self.files.materialize(part)
            else:
                part.to_empty(device=world.device if memory.parameters == "device" else "cpu")
            part.tie()  # to_empty gave the tied matrices a memory each
        shard, replicate = world.axis("shard"), world.axis("replicate")
        plain = [p for part in self.parts for p in part.parameters() if not isinstance(p, DTensor)]
        self.grad_reducer = GradReducer(plain, shard, replicate, layout.zero)
        self.params = [w for part in self.parts for w in self._sharded_parameters(part)]
        self._summations = summations(layout, bool(config.tied), world)
        self.pipeline = self._pipeline() if layout.pp > 1 else None
        with torch.no_grad():
            for w in self.params:
                fill_initial(w.local, w.name, w.spec, config, seed)
                self.loaded()
        self.all_gather_params()

    def loaded(self) -> None:
        """To be called when weights were written otherwise than by an update."""
        if self.files is not None:
            self.files.loaded()

    def all_gather_params(self) -> None:
        """With ZeRO-1 and 2: give every rank the rows that the others have updated."""
        self.grad_reducer.all_gather_params()

    def check(self) -> None:
        """Raise InputError for weights that are not what they were updated to: before they are saved."""
        if self.files is not None:
            self.files.check()

    def close(self) -> None:
        """Remove the files that weights are in."""
        if self.files is not None:
            self.files.close()

    def forward_backward(self, batch: Batch, scale: float) -> Tensor:
        """Set the gradients of `scale` x the loss summed over all replicas' targets, on what is updated here.

        Returns this process's part of the summed loss in nats, 0-d.
        """
        loss = self._pipelined(batch, scale) if self.pipeline else self._accumulated(batch, scale)
        for w in self.params:
            if isinstance(w.module_param, DTensor):
                grad = w.module_param.grad
                w.local.grad = grad.to_local() if isinstance(grad, DTensor) else None
        for summation in self._summations:
            summation(self.params)
        return self._counted(loss)

    @torch.no_grad()
    def loss(self, ids: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
        """This process's part of the micro-batches' summed loss in nats, 0-d float64; no dropout, no gradients."""
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for output in self._evaluate(ids, targets):
            total += output.double().sum()
        return self._counted(total)

    @torch.no_grad()
    def next_logits(self, ids: Tensor) -> Tensor:
        """The logits (V,) of what follows `ids` (1, T); every process calls it with the same, and has the same."""
        length, parts = ids.shape[1], self.parts[0].sequence_parts
        padded = torch.nn.functional.pad(ids, (0, -length % parts)).to(self.world.device)  # causal: no harm
        found = self._evaluate([padded], None)
        here = found[0][0, length - 1] if found else None
        return self._from_last_stage(self._whole_vocabulary(here) if here is not None else None)

    def _evaluate(self, ids: Sequence[Tensor], targets: Sequence[Tensor] | None) -> list[Tensor]:
        for part in self.parts:
            part.eval()
        with autocast(self.world.device, self.precision):
            if self.pipeline:
                outputs = self.pipeline.forward(ids, targets)
            else:
                outputs = [self.parts[0](x, targets[i] if targets else None) for i, x in enumerate(ids)]
        for part in self.parts:
            part.train()
        return outputs

    def _counted(self, loss: Tensor) -> Tensor:
        """All that divide a matrix have the same loss: it is the first one's."""
        return loss if self.world.axis("tp").rank == 0 else torch.zeros_like(loss)

    def _whole_vocabulary(self, logits: Tensor) -> Tensor:
        """Of this process's part of the logits."""
        axis, size = self.world.axis("tp"), self.config.vocab_size
        if axis.size == 1:
            return logits
        step = shard_range(size, axis.size, 0)[1]
        everyone = logits.new_empty(axis.size * step)
        all_gather(everyone, torch.nn.functional.pad(logits, (0, step - len(logits))), group=axis.group)
        return everyone[:size]

    def _from_last_stage(self, logits: Tensor | None) -> Tensor:
        axis = self.world.axis("pp")
        if axis.size == 1:
            assert logits is not None
            return logits
        logits = torch.empty(self.config.vocab_size, device=self.world.device) if logits is None else logits.float()
        dist.broadcast(logits, group=axis.group, group_src=stage_owner(self.layout, self.layout.stages - 1))
        return logits

    def _accumulated(self, batch: Batch, scale: float) -> Tensor:
        """Micro-batch by micro-batch; only the last one's gradients travel, or with ZeRO-2 each one's."""
        rounds = self.layout.micro_batches
        parts = zip(*(t.chunk(rounds) for t in (batch.ids, batch.targets, batch.samples)), strict=True)
        total = torch.zeros((), device=self.world.device)
        for number, (ids, targets, samples) in enumerate(parts, start=1):
            travels = number == rounds or self.layout.zero == 2
            synchronize_gradients(self.parts[0], travels)
            if travels:
                self.grad_reducer.enable_grad_sync()
            with autocast(self.world.device, self.precision):
                loss = self.parts[0](ids, targets, samples)
            (loss.sum() * scale).backward()
            if travels:
                self.grad_reducer.finish_grad_sync()
            total = total + loss.detach().sum()
        return total

    def _pipelined(self, batch: Batch, scale: float) -> Tensor:
        assert self.pipeline is not None
        with autocast(self.world.device, self.precision):
            loss = self.pipeline.forward_backward(batch.ids, batch.targets, batch.samples, scale)
        self.grad_reducer.finish_grad_sync()  # not during the schedule: only it knows which backward pass is the last
        return loss

    def _pipeline(self) -> "Pipeline":
        from training.parallel.pipeline_parallel import (
            Pipeline,  # a second of imports, which the others need not wait for
        )

        return Pipeline(self.parts, self.layout, self.world.axis("pp"), self.world.device)

    def _sharded_parameters(self, part: Decoder) -> list[ShardedParameter]:
        tp, shard, replicate = (self.world.axis(name) for name in ("tp", "shard", "replicate"))
        with torch.device("meta"):
            shapes = {name: tuple(p.shape) for name, p in Decoder(self.config).named_parameters()}
        found = []
        for name, p in part.named_parameters():
            whole = whole_name(part, name)
            own = self.grad_reducer.own.get(id(p))
            if own is None:
                assert isinstance(p, DTensor)
                own = nn.Parameter(p.to_local(), requires_grad=False)
            spec = tp_shard(whole, shapes[whole], tp).shard(0, shard.size, shard.rank)
            assert spec.size == tuple(own.shape), (name, spec, own.shape)
            held_alike = replicate.rank > 0 or (tp_dim(whole) is None and tp.rank > 0)
            found.append(ShardedParameter(whole, p, own, spec, not held_alike and whole == name))
        return found


def _folder(memory: MemoryConfig) -> Path:
    assert memory.folder is not None, "the caller decides where files are"
    return memory.folder
