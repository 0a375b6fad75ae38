"""ParallelModel: this rank's part of a model, with the forward and backward passes that all ranks run together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from training.distributed.collectives import all_gather, gather_rows
from training.kernels.cross_entropy import SequenceLosses, ZLoss
from training.memory.offload_parameters import ParametersOnDisk
from training.model.batch import TokenBatch
from training.model.decoder import Decoder
from training.model.embedding import Head
from training.model.model_config import ModelConfig
from training.optim.optimizer import AfterUpdate
from training.parallel.context.tokens import TokenOrder
from training.parallel.data.fsdp import reshard
from training.parallel.data.grad_reducer import GradReducer
from training.parallel.experiment import experiment_of
from training.parallel.expert.routing import Routing
from training.parallel.gradients import RemainingSums
from training.parallel.layout import Layout
from training.parallel.mesh import World
from training.sharding.axis import Axes, JointAxis
from training.sharding.shard_spec import shard_range
from training.sharding.sharded_parameter import ShardedParameter

if TYPE_CHECKING:
    from training.parallel.pipeline.pipeline_parallel import Pipeline


@dataclass(eq=False, repr=False)
class ParallelModel:
    """This rank's part of a model, with the methods that the training loop calls. Built by `parallelize`.

    `parts` are the rank's pipeline stages, run by `pipeline` (or one, without a pipeline), each with its reducer.
    `params` are the shards that the rank updates, placed along `axes`, `sums` the sums of their gradients that follow
    data parallelism's. `files` hold the parameters if they are offloaded to disk.
    `routing` has the routers of sparse layers.
    """

    config: ModelConfig
    layout: Layout
    world: World
    parts: list[Decoder]
    params: list[ShardedParameter]
    reducers: list[GradReducer]
    axes: Axes
    sums: RemainingSums
    pipeline: "Pipeline | None"
    files: ParametersOnDisk | None
    routing: Routing | None

    def __post_init__(self) -> None:
        self.before_micro_batch: Callable[[], None] = lambda: None
        """Called before each of several micro-batches that are in no pipeline; may raise, on all ranks alike."""
        self.z_loss = ZLoss(0.0)
        self.sequence_losses = SequenceLosses()
        self._sources: Tensor | None = None
        experiment = experiment_of(self.layout)
        self.rows = self.world.joint_axis(*experiment.batch_axes)  # they divide a replica's sequences
        self.order = TokenOrder.of(self.layout, self.world)
        self.vocabulary = self.world.axis(experiment.vocabulary_axis)

    def forward_backward(self, batch: TokenBatch, scale: float) -> Tensor:
        """Forward and backward: leaves gradients of `scale` × the global loss sum on the shards that this rank updates.

        `batch` is this replica's, (B, T). Returns this rank's term of the loss sum in nats, 0-d: the sum over all ranks
        is the global one.
        """
        assert len(batch.ids) % self.rows.size == 0, f"{len(batch.ids)} sequences on {self.rows.size} rows"
        batch = self.order.own_batch(batch.chunk(self.rows.size)[self.rows.rank])
        self._sources = batch.sources
        if self.routing is not None:
            self.routing.begin_step(scale)
        if self.pipeline is None:
            loss = self._accumulate_gradients(batch, scale)
        else:
            loss = self.pipeline.forward_backward(batch, scale)
            for reducer in self.reducers:
                reducer.finish()
        for param in self.params:
            if isinstance(param.module_param, DTensor):
                grad = param.module_param.grad
                param.local.grad = grad.to_local() if isinstance(grad, DTensor) else None
        self.sums.run()
        return self._count_once(loss)

    def discard_pass(self) -> None:
        """Forget what a forward and backward pass left besides gradients: losses, and the loads of experts."""
        self.z_loss.take()
        self.sequence_losses.take()
        if self.routing is not None:
            for router in self.routing.routers.values():
                router.forget()

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Return tensors that checkpoints have besides parameters, by name; the same on all ranks that have them."""
        return {} if self.routing is None else self.routing.buffers

    def add_z_loss(self, coefficient: float) -> None:
        """Train with a z-loss of this coefficient from now on; 0: with none."""
        self.z_loss = ZLoss(coefficient)
        for part in self.parts:
            if isinstance(part.head, Head):
                part.head.z_loss = self.z_loss if coefficient else None

    def take_z_loss(self) -> Tensor | None:
        """Return this rank's term of the z-loss, 0-d: summed over the targets of all passes since the last call.

        None without a z-loss.
        """
        if not self.z_loss.coefficient:
            return None
        total = self.z_loss.take()
        if total is None:
            return torch.zeros((), device=self.world.device)
        return self._count_once(total)

    def keep_sequence_losses(self) -> None:
        """Keep the losses of sequences in each step from now on, for `take_source_losses`."""
        for part in self.parts:
            if isinstance(part.head, Head):
                part.head.sequence_losses = self.sequence_losses

    def take_source_losses(self, count: int) -> Tensor:
        """Return this rank's terms of the last step's summed loss of each of `count` sources, and of its targets.

        (2, count) float64; the sum over all ranks is of the global batch.
        """
        losses_and_targets = self.sequence_losses.take()
        if losses_and_targets is None or self._sources is None or self.vocabulary.rank:
            return torch.zeros(2, count, dtype=torch.float64, device=self.world.device)
        return losses_and_targets.double() @ F.one_hot(self._sources, count).double()

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

        `positions` as of `TokenBatch`. One rank of each replica has the losses, and the others an empty list: a sum
        over all ranks counts each target once.
        """
        own_positions = self._own_parts(positions) if positions else None
        own_losses = self._forward(self._own_parts(ids), self._own_parts(targets), own_positions)
        losses = []
        for own, full in zip(own_losses, ids, strict=False):
            losses.append(_all_sequences(self.order.gather(own), self.rows)[: len(full)])
        return losses if self.world.axis("tp").rank == self.order.axis.rank == 0 else []

    def _own_parts(self, micro_batches: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's sequences, and tokens of them, of each micro-batch."""
        return [self.order.own(_own_sequences(tokens, self.rows)) for tokens in micro_batches]

    @torch.no_grad()
    def next_logits(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return the logits (V,) of the token after `ids` (1, T); every rank passes the same ids and gets the same.

        `positions` (1, T) as of `TokenBatch`.
        """
        parts = self.layout.sequence_parts
        longest = self.config.context // parts * parts  # so that no padding is beyond the learned positions
        length = min(ids.shape[1], longest)

        def padded(x: Tensor) -> list[Tensor]:
            padded_ids = F.pad(x[:, -longest:], (0, -length % parts))
            return [self.order.own(padded_ids).to(self.world.device)]

        # causal: padding has no effect
        outputs = self._forward(padded(ids), None, None if positions is None else padded(positions))
        holder, last = self.order.holder(length - 1, length + -length % parts)
        logits = self._all_gather_vocab(outputs[0][0, last]) if outputs else None
        if logits is not None and self.order.axis.size > 1:
            dist.broadcast(logits, group=self.order.axis.group, group_src=holder)
        return self._broadcast_from_last_stage(logits)

    @torch.no_grad()
    def all_gather_params(self) -> None:
        """After an update: cast the master weights to the compute dtype, and with ZeRO-1 and 2 all-gather them."""
        self.start_all_gather()
        self.finish_all_gather()

    @torch.no_grad()
    def start_all_gather(self) -> None:
        """Start what `all_gather_params` does: before its forward pass every module waits for its parameters."""
        for reducer in self.reducers:
            reducer.start_all_gather()

    def finish_all_gather(self) -> None:
        """Wait until all parameters are complete: before they are used otherwise, or changed."""
        for reducer in self.reducers:
            reducer.finish_all_gather()

    def after_load(self) -> None:
        """Accept parameters that were written other than by an update: by initialization or a checkpoint."""
        if self.files is not None:
            self.files.drop_pages()

    @property
    def after_update(self) -> AfterUpdate | None:
        """Return what the optimizer calls for each updated part of a parameter; None without parameters on disk."""
        return None if self.files is None else self.files.after_update

    def matrix_holders(self, matrices: Sequence[ShardedParameter]) -> JointAxis:
        """Return the axes along which matrices are sharded: the ranks that have all pieces of them; collective."""
        names = set[str]()
        for param in matrices:
            names.update(param.matrix_placement.shard)
        return self.world.joint_axis(*[name for name in self.world.finest_axes if name in names])

    def close(self) -> None:
        """Remove the files of parameters on disk."""
        if self.files is not None:
            self.files.close()

    def _accumulate_gradients(self, batch: TokenBatch, scale: float) -> Tensor:
        """Run all micro-batches; gradients are reduced in the last one, or with ZeRO-2 and 3 in each."""
        (part,), (reducer,) = self.parts, self.reducers
        count = self.layout.micro_batches
        total = torch.zeros((), device=self.world.device)
        for micro_batch in batch.chunk(count):
            if count > 1:
                self.before_micro_batch()
            loss = part(
                micro_batch.ids, micro_batch.targets, micro_batch.sample_ids, micro_batch.positions, micro_batch.padding
            )
            with reducer.backward_pass():
                (loss.sum() * scale).backward()
            reducer.finish()  # frees what was sent before the next micro-batch
            total = total + loss.detach().sum()
        return total

    def _forward(
        self, ids: Sequence[Tensor], targets: Sequence[Tensor] | None, positions: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """Return the decoder's outputs per micro-batch in evaluation mode; empty on ranks without the last stage."""
        for part in self.parts:
            part.eval()
        if self.pipeline:
            outputs = self.pipeline.forward(ids, targets, positions)
        else:
            outputs = []
            for number, micro_batch in enumerate(ids):
                own_targets = targets[number] if targets else None
                own_positions = positions[number] if positions else None
                outputs.append(self.parts[0](micro_batch, own_targets, None, own_positions))
        for part in self.parts:
            part.train()
            reshard(part)
        return outputs

    def _count_once(self, loss: Tensor) -> Tensor:
        """Return the loss where the vocabulary begins, elsewhere zero: a sum over all ranks counts each target once."""
        return loss if self.vocabulary.rank == 0 else torch.zeros_like(loss)

    def _all_gather_vocab(self, logits: Tensor) -> Tensor:
        """All-gather this rank's logits (V / n,) to (V,)."""
        axis = self.vocabulary
        size = self.config.vocab_size
        if axis.size == 1:
            return logits
        step = shard_range(size, axis.size, 0)[1]
        gathered = logits.new_empty(axis.size * step)
        all_gather(gathered, F.pad(logits, (0, step - len(logits))), group=axis.group)
        return gathered[:size]

    def _broadcast_from_last_stage(self, logits: Tensor | None) -> Tensor:
        """Broadcast the logits (V,), which only the last stage's ranks have, over "pp"; in float32 with a pipeline."""
        axis = self.world.axis("pp")
        if axis.size == 1:
            assert logits is not None
            return logits
        if logits is None:
            logits = torch.empty(self.config.vocab_size, device=self.world.device)
        logits = logits.float()
        dist.broadcast(logits, group=axis.group, group_src=self.layout.stage_ranks[-1])
        return logits


def _own_sequences(x: Tensor, rows: JointAxis) -> Tensor:
    """Return the sequences, of (B, T), of this one of the rows, after zeros are added that let them divide evenly."""
    return F.pad(x, (0, 0, 0, -len(x) % rows.size)).chunk(rows.size)[rows.rank]


def _all_sequences(parts: Tensor, rows: JointAxis) -> Tensor:
    """Return the parts of all rows: (B / n, T) to (B, T)."""
    return parts if rows.size == 1 else gather_rows(parts, rows)
