"""ParallelModel: this rank's part of a model, with the forward and backward passes that all ranks run together."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from training.distributed.collectives import all_gather
from training.kernels.cross_entropy import ZLoss
from training.memory.offload_parameters import ParametersOnDisk
from training.model.batch import Batch
from training.model.decoder import Decoder
from training.model.embedding import Head
from training.model.model_config import ModelConfig
from training.optim.optimizer import AfterUpdate
from training.parallel.compression.bucket import CompressedBucket
from training.parallel.context.tokens import TokenOrder
from training.parallel.data.fsdp import reshard
from training.parallel.data.grad_reducer import GradReducer
from training.parallel.gradients import RemainingSums
from training.parallel.grid.sequences import all_sequences, own_batch, own_sequences
from training.parallel.layout import ParallelConfig
from training.parallel.mesh import World
from training.sharding.axis import Axes, JointAxis
from training.sharding.shard_spec import shard_range
from training.sharding.sharded_parameter import ShardedParameter

if TYPE_CHECKING:
    from training.parallel.pipeline.pipeline_parallel import Pipeline


class ParallelModel:
    """This rank's part of a model, with the methods that the training loop calls. Built by `parallelize`.

    `parts` are the rank's pipeline stages, run by `pipeline` (or one, without a pipeline), each with its reducer.
    `params` are the shards that the rank updates, placed along `axes`, `sums` the sums of their gradients that follow
    data parallelism's. `files` hold the parameters if they are offloaded to disk.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: ParallelConfig,
        world: World,
        parts: list[Decoder],
        params: list[ShardedParameter],
        reducers: list[GradReducer],
        axes: Axes,
        sums: RemainingSums,
        pipeline: "Pipeline | None",
        files: ParametersOnDisk | None,
    ) -> None:
        self.config, self.layout, self.world = config, layout, world
        self.parts, self.params, self.reducers = parts, params, reducers
        self.axes, self.sums, self.pipeline, self.files = axes, sums, pipeline, files
        self.z_loss = ZLoss(0.0)
        # of a grid: the layers and rows that divide the sequences, and the axis that divides the vocabulary
        self.rows = world.joint_axis("depth", "row") if "row" in world.axes else JointAxis()
        self.order = TokenOrder.of(layout, world)
        self.vocabulary = world.axis({"1d": "tp", "3d": "row"}.get(layout.tensor, "column"))

    def forward_backward(self, batch: Batch, scale: float) -> Tensor:
        """Forward and backward: leaves gradients of `scale` × the global loss sum on the shards that this rank updates.

        `batch` is this replica's, (B, T). Returns this rank's term of the loss sum in nats, 0-d: the sum over all ranks
        is the global one.
        """
        batch = self.order.own_batch(own_batch(batch, self.rows))
        loss = self._run_schedule(batch, scale) if self.pipeline else self._accumulate_gradients(batch, scale)
        for param in self.params:
            if isinstance(param.module_param, DTensor):
                grad = param.module_param.grad
                param.local.grad = grad.to_local() if isinstance(grad, DTensor) else None
        self.sums.run()
        return self._count_once(loss)

    def add_z_loss(self, coefficient: float) -> None:
        """Train with a z-loss of this coefficient from now on; 0: with none."""
        self.z_loss = ZLoss(coefficient)
        for part in self.parts:
            if isinstance(part.head, Head):
                part.head.z_loss = self.z_loss if coefficient else None

    def take_z_loss(self) -> Tensor | None:
        """This rank's term of the z-loss, 0-d: summed over the targets of all training passes since the last call.

        None without a z-loss.
        """
        if not self.z_loss.coefficient:
            return None
        total = self.z_loss.take()
        return torch.zeros((), device=self.world.device) if total is None else self._count_once(total)

    @torch.no_grad()
    def loss(
        self, ids: Sequence[Tensor], targets: Sequence[Tensor], positions: Sequence[Tensor] | None = None
    ) -> Tensor:
        """Evaluate micro-batches (B, T), without dropout: this rank's term of the loss sum in nats, 0-d float64."""
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for losses in self.target_losses(ids, targets, positions):
            total += losses.double().sum()
        return total

    @torch.no_grad()
    def target_losses(
        self, ids: Sequence[Tensor], targets: Sequence[Tensor], positions: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """Evaluate micro-batches (B, T), without dropout: the loss of each target in nats, (B, T) a micro-batch.

        `positions` as of `Batch`. One rank of each replica has the losses, and the others an empty list: a sum over
        all ranks counts each target once.
        """
        own = [
            [self.order.own(own_sequences(x, self.rows)) for x in parts] for parts in (ids, targets, positions or ())
        ]
        losses = self._forward(own[0], own[1], own[2] or None)
        losses = [
            all_sequences(self.order.gather(x), self.rows)[: len(whole)] for x, whole in zip(losses, ids, strict=False)
        ]
        return losses if self.world.axis("tp").rank == self.order.axis.rank == 0 else []

    @torch.no_grad()
    def next_logits(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits (V,) of the token after `ids` (1, T); every rank passes the same ids and gets the same logits.

        `positions` (1, T) as of `Batch`.
        """
        parts = self.layout.sequence_parts
        longest = self.config.context // parts * parts  # so that no padding is beyond the learned positions
        length = min(ids.shape[1], longest)

        def padded(x: Tensor) -> list[Tensor]:
            whole = torch.nn.functional.pad(x[:, -longest:], (0, -length % parts))
            return [self.order.own(whole).to(self.world.device)]

        # causal: padding has no effect
        outputs = self._forward(padded(ids), None, None if positions is None else padded(positions))
        holder, last = self.order.holder(length - 1, length + -length % parts)
        logits = self._all_gather_vocab(outputs[0][0, last]) if outputs else None
        if logits is not None and self.order.axis.size > 1:
            dist.broadcast(logits, group=self.order.axis.group, group_src=holder)
        return self._broadcast_from_last_stage(logits)

    @torch.no_grad()
    def publish_params(self) -> None:
        """After an update: cast the master weights to the compute dtype, and with ZeRO-1 and 2 all-gather them."""
        self.start_publishing()
        self.finish_publishing()

    @torch.no_grad()
    def start_publishing(self) -> None:
        """Start what `publish_params` does: before its forward pass every module waits for its parameters."""
        for reducer in self.reducers:
            reducer.start_publish()

    def finish_publishing(self) -> None:
        """Wait until all parameters are complete: before they are used otherwise, or changed."""
        for reducer in self.reducers:
            reducer.finish_publish()

    @property
    def compressed(self) -> list[CompressedBucket]:
        """The buckets whose gradients are compressed, with the memories of what was left out."""
        return [b for reducer in self.reducers for b in reducer.buckets if isinstance(b, CompressedBucket)]

    def keep_errors(self) -> None:
        """Remember what compression left out of the gradients that an update uses; of no other ones."""
        for bucket in self.compressed:
            bucket.keep()

    def after_load(self) -> None:
        """Accept parameters that were written other than by an update: by initialization or a checkpoint."""
        if self.files is not None:
            self.files.after_load()

    @property
    def after_update(self) -> AfterUpdate | None:
        """What the optimizer is to call for each updated part of a parameter; None without parameters on disk."""
        return None if self.files is None else self.files.after_update

    def matrix_holders(self) -> JointAxis:
        """The axes along which matrices are sharded: the ranks that hold whole ones together; collective."""
        names = {name for param in self.params for name in param.placement.shard}
        return self.world.joint_axis(*(name for name in self.world.finest_axes if name in names))

    def verify_params(self) -> None:
        """Raise InputError if parameters on disk changed since their last update; call it before saving."""
        if self.files is not None:
            self.files.verify()

    def close(self) -> None:
        """Remove the files of parameters on disk."""
        if self.files is not None:
            self.files.close()

    def _accumulate_gradients(self, batch: Batch, scale: float) -> Tensor:
        """Run all micro-batches; gradients are reduced in the last one, or with ZeRO-2 and 3 in each."""
        (part,), (reducer,) = self.parts, self.reducers
        count = self.layout.micro_batches
        total = torch.zeros((), device=self.world.device)
        for micro_batch in batch.chunk(count):
            loss = part(micro_batch.ids, micro_batch.targets, micro_batch.sample_ids, micro_batch.positions)
            with reducer.backward_pass():
                (loss.sum() * scale).backward()
            reducer.finish()  # frees what was sent before the next micro-batch
            total = total + loss.detach().sum()
        return total

    def _run_schedule(self, batch: Batch, scale: float) -> Tensor:
        assert self.pipeline is not None
        loss = self.pipeline.forward_backward(batch, scale)
        for reducer in self.reducers:
            reducer.finish()
        return loss

    def _forward(
        self, ids: Sequence[Tensor], targets: Sequence[Tensor] | None, positions: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """The decoder's outputs per micro-batch in evaluation mode; empty on ranks without the last stage."""
        for part in self.parts:
            part.eval()
        if self.pipeline:
            outputs = self.pipeline.forward(ids, targets, positions)
        else:
            outputs = [
                self.parts[0](x, targets[i] if targets else None, None, positions[i] if positions else None)
                for i, x in enumerate(ids)
            ]
        for part in self.parts:
            part.train()
            reshard(part)
        return outputs

    def _count_once(self, loss: Tensor) -> Tensor:
        """The loss where the vocabulary begins, elsewhere zero: a sum over all ranks counts each target once."""
        return loss if self.vocabulary.rank == 0 else torch.zeros_like(loss)

    def _all_gather_vocab(self, logits: Tensor) -> Tensor:
        """All-gather this rank's logits (V / n,) to (V,)."""
        axis, size = self.vocabulary, self.config.vocab_size
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
