"""ParallelModel: this rank's part of a model, with the forward and backward passes that all ranks run together."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from training.distributed.collectives import all_gather
from training.distributed.layout import ParallelConfig
from training.distributed.mesh import World
from training.kernels.precision import autocast
from training.memory.offload_parameters import ParametersOnDisk
from training.model.batch import Batch
from training.model.decoder import Decoder
from training.model.model_config import ModelConfig
from training.parallel.data_parallel import GradReducer
from training.parallel.fsdp import set_fsdp_grad_sync
from training.parallel.gradients import Reduction
from training.sharding.shard_spec import shard_range
from training.sharding.sharded_parameter import ShardedParameter


class ParallelModel:
    """This rank's part of a model, with the methods that the training loop calls. Built by `parallelize`.

    `parts` are the rank's pipeline stages (one without a pipeline), `params` the shards that it updates, `reductions`
    the gradient reductions that follow data parallelism's. `files` hold the parameters if they are offloaded to disk.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: ParallelConfig,
        world: World,
        precision: str,
        parts: list[Decoder],
        params: list[ShardedParameter],
        grad_reducer: GradReducer,
        reductions: list[Reduction],
        files: ParametersOnDisk | None,
    ) -> None:
        self.config, self.layout, self.world, self.precision = config, layout, world, precision
        self.parts, self.params, self.grad_reducer, self.files = parts, params, grad_reducer, files
        self._reductions = reductions
        self.pipeline = None
        if layout.pp > 1:
            # takes a second to import, needed for pipelines only
            from training.parallel.pipeline_parallel import Pipeline

            self.pipeline = Pipeline(parts, layout, world.axis("pp"), world.device)

    def forward_backward(self, batch: Batch, scale: float) -> Tensor:
        """Forward and backward: leaves gradients of `scale` × the global loss sum on the shards that this rank updates.

        `batch` is this replica's, (B, T). Returns this rank's term of the loss sum in nats, 0-d: the sum over all ranks
        is the global one.
        """
        loss = self._run_schedule(batch, scale) if self.pipeline else self._accumulate_gradients(batch, scale)
        for param in self.params:
            if isinstance(param.module_param, DTensor):
                grad = param.module_param.grad
                param.local.grad = grad.to_local() if isinstance(grad, DTensor) else None
        for reduction in self._reductions:
            reduction(self.params)
        return self._count_once(loss)

    @torch.no_grad()
    def loss(self, ids: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
        """Evaluate micro-batches (B, T), without dropout: this rank's term of the loss sum in nats, 0-d float64."""
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for output in self._forward(ids, targets):
            total += output.double().sum()
        return self._count_once(total)

    @torch.no_grad()
    def next_logits(self, ids: Tensor) -> Tensor:
        """Logits (V,) of the token after `ids` (1, T); every rank passes the same ids and gets the same logits."""
        length, parts = ids.shape[1], self.parts[0].sequence_shards
        ids = torch.nn.functional.pad(ids, (0, -length % parts))  # causal: padding has no effect
        outputs = self._forward([ids.to(self.world.device)], None)
        logits = self._all_gather_vocab(outputs[0][0, length - 1]) if outputs else None
        return self._broadcast_from_last_stage(logits)

    def all_gather_params(self) -> None:
        """ZeRO-1 and 2, after an update: all-gather the updated shards into the full parameters; else nothing."""
        self.grad_reducer.all_gather_params()

    def after_load(self) -> None:
        """Accept parameters that were written other than by an update: by initialization or a checkpoint."""
        if self.files is not None:
            self.files.after_load()

    def verify_params(self) -> None:
        """Raise InputError if parameters on disk changed since their last update; call it before saving."""
        if self.files is not None:
            self.files.verify()

    def close(self) -> None:
        """Remove the files of parameters on disk."""
        if self.files is not None:
            self.files.close()

    def _accumulate_gradients(self, batch: Batch, scale: float) -> Tensor:
        """Run all micro-batches; reduce gradients in the last one, or with ZeRO-2 in each, to free full gradients."""
        count = self.layout.micro_batches
        micro_batches = zip(*(t.chunk(count) for t in (batch.ids, batch.targets, batch.sample_ids)), strict=True)
        total = torch.zeros((), device=self.world.device)
        for number, (ids, targets, sample_ids) in enumerate(micro_batches, start=1):
            sync = number == count or self.layout.zero == 2
            set_fsdp_grad_sync(self.parts[0], sync)
            if sync:
                self.grad_reducer.enable_grad_sync()
            with autocast(self.world.device, self.precision):
                loss = self.parts[0](ids, targets, sample_ids)
            (loss.sum() * scale).backward()
            if sync:
                self.grad_reducer.finish_grad_sync()
            total = total + loss.detach().sum()
        return total

    def _run_schedule(self, batch: Batch, scale: float) -> Tensor:
        assert self.pipeline is not None
        with autocast(self.world.device, self.precision):
            loss = self.pipeline.forward_backward(batch.ids, batch.targets, batch.sample_ids, scale)
        self.grad_reducer.finish_grad_sync()  # not overlapped: only the schedule knows the last backward pass
        return loss

    def _forward(self, ids: Sequence[Tensor], targets: Sequence[Tensor] | None) -> list[Tensor]:
        """The decoder's outputs per micro-batch in evaluation mode; empty on ranks without the last stage."""
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

    def _count_once(self, loss: Tensor) -> Tensor:
        """The loss on tensor-parallel rank 0, zero on the others: a sum over all ranks counts each loss once."""
        return loss if self.world.axis("tp").rank == 0 else torch.zeros_like(loss)

    def _all_gather_vocab(self, logits: Tensor) -> Tensor:
        """All-gather this rank's logits (V / tp,) to (V,)."""
        axis, size = self.world.axis("tp"), self.config.vocab_size
        if axis.size == 1:
            return logits
        step = shard_range(size, axis.size, 0)[1]
        gathered = logits.new_empty(axis.size * step)
        all_gather(gathered, torch.nn.functional.pad(logits, (0, step - len(logits))), group=axis.group)
        return gathered[:size]

    def _broadcast_from_last_stage(self, logits: Tensor | None) -> Tensor:
        """Broadcast the logits (V,), which only the last stage's ranks have, over "pp"; in float32 with a pipeline."""
        axis = self.world.axis("pp")
        if axis.size == 1:
            assert logits is not None
            return logits
        logits = torch.empty(self.config.vocab_size, device=self.world.device) if logits is None else logits.float()
        dist.broadcast(logits, group=axis.group, group_src=self.layout.stage_ranks[-1])
        return logits
