"""Pipeline: the stages of one rank, run by torch's schedules in training, and by a plain forward pass in evaluation."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import profiler
from torch.distributed.pipelining import PipelineStage, schedules
from torch.utils.checkpoint import GraphExecGroup

from training.distributed.collectives import wait
from training.kernels.precision import accumulation_dtype
from training.model.batch import TokenBatch
from training.model.decoder import Decoder
from training.parallel.data.grad_reducer import GradReducer
from training.parallel.layout import Layout
from training.parallel.pipeline.schedules import SCHEDULES
from training.sharding.axis import Axis


class _Stage(PipelineStage):
    """A stage whose gradients are moved to their buckets, and reduced, after each backward pass of a micro-batch.

    A split backward pass recomputes each checkpointed block once: torch computes the weight gradients in groups, and
    without GraphExecGroup each group would recompute the blocks.
    """

    reducer: GradReducer
    schedule: str

    def _named(self, kind: str, micro_batch: int) -> AbstractContextManager[Any]:
        """Context of a pass: its name in traces, from which the planner draws a measured timeline."""
        if not profiler._is_profiler_enabled:
            return nullcontext()
        where = f"stage {self.stage_index}, micro-batch {micro_batch}, rank {self.group_rank} of {self.group_size}"
        return profiler.record_function(f"{self.schedule} pass {kind} of {where}")

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._named("F", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        named = self._named("B" if full_backward else "I", bwd_chunk_id)
        with named, self.reducer.backward_pass() if full_backward else nullcontext():
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with self._named("W", bwd_chunk_id), self.reducer.backward_pass(), GraphExecGroup():
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)


class Pipeline:
    """The stages of this rank, each with its reducer, run by one of torch's schedules; `axis` is "pp".

    Between stages on different ranks each micro-batch sends its activations (B, T, D) forward and their gradient
    backward, in `dtype`; with sequence parallelism (B, T / tp, D), on a grid of q columns (B, T, D / q).
    """

    def __init__(
        self,
        parts: Sequence[Decoder],
        reducers: Sequence[GradReducer],
        layout: Layout,
        axis: Axis,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.layout = layout
        self.axis = axis
        self.device = device
        self.dtype = dtype
        self.ranks = layout.stage_ranks
        self.stages = layout.stages_of_rank(axis.rank)
        self.parts = dict(zip(self.stages, parts, strict=True))
        self.reducers = reducers
        self.scale: Tensor | float = 1.0
        self._schedule: Any = None
        self._shape = torch.Size()  # of a micro-batch's tokens, as the schedule has it

    def _features(self, ids: Tensor, **options: Any) -> Tensor:
        """Uninitialized activations between two stages, of a micro-batch's tokens (B, T)."""
        width = self.parts[self.stages[0]].config.width // self.layout.feature_shards
        return torch.empty(len(ids), ids.shape[1] // self.layout.sequence_shards, width, dtype=self.dtype, **options)

    def _schedule_of(self, ids: Tensor) -> Any:
        """torch's schedule of this rank's stages, with the shapes of micro-batches like `ids`.

        Without them torch would compute the first micro-batch twice, to learn them from the ranks before.
        """
        features = self._features(ids, device="meta", requires_grad=True)
        loss = torch.empty(1, dtype=accumulation_dtype(self.dtype), device="meta", requires_grad=True)
        stages = []
        for number, reducer in zip(self.stages, self.reducers, strict=True):
            stage = _Stage(
                self.parts[number], number, self.layout.stages, self.device,
                input_args=features if number else ids.to("meta"),
                output_args=features if number + 1 < self.layout.stages else loss,
                group=self.axis.group,
            )  # fmt: skip
            stage.reducer = reducer
            stage.schedule = self.layout.schedule
            stages.append(stage)
        return getattr(schedules, SCHEDULES[self.layout.schedule].torch_class)(
            stages[0] if self.layout.virtual_stages == 1 else stages,
            n_microbatches=self.layout.micro_batches,
            loss_fn=lambda loss, _: loss.sum() * self.scale,
            scale_grads=False,  # the loss is a sum, already divided by the global count of targets
        )

    def forward_backward(self, batch: TokenBatch, scale: float) -> Tensor:
        """Run the schedule on this replica's batch: accumulate the gradients of `scale` × the summed loss.

        Returns the summed loss in nats, 0-d, on the rank of the last stage, and zero on the others.
        """
        self.scale = scale
        micro_batch = batch.ids[: len(batch.ids) // self.layout.micro_batches]
        if micro_batch.shape != self._shape:
            self._schedule = self._schedule_of(micro_batch)
            self._shape = micro_batch.shape
        losses: list[Tensor] = []
        first = (batch.ids,) if 0 in self.stages else ()
        last = {"target": batch.sample_ids, "losses": losses} if self.layout.stages - 1 in self.stages else {}
        every = {"targets": batch.targets, "sample_ids": batch.sample_ids}  # every stage gets its micro-batch of these
        if batch.positions is not None:
            every["positions"] = batch.positions
        if batch.padding is not None:
            every["padding"] = batch.padding
        self._schedule.step(*first, **every, return_outputs=False, **last)
        return torch.stack(losses).detach().sum() / scale if losses else torch.zeros((), device=self.device)

    def forward(
        self, ids: Sequence[Tensor], targets: Sequence[Tensor] | None, positions: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """Run a forward pass only: the last stage's outputs per micro-batch, an empty list on the other ranks.

        An output is the loss of each target, (B, T), or without targets the logits, (B, T, V). Micro-batches may differ
        in size, which torch's schedules do not support.
        """
        outputs: dict[int, list[Tensor]] = {}
        sent: list[dist.Work] = []
        for stage in self.stages:  # in ascending order, so the activations a stage receives have been sent
            outputs[stage] = []
            for i, tokens in enumerate(ids):
                x = tokens if stage == 0 else self._receive(stage, outputs, i, tokens)
                y = self.parts[stage](
                    x,
                    targets[i] if targets is not None else None,
                    None,
                    positions[i] if positions is not None else None,
                )
                outputs[stage].append(y)
                if stage + 1 < self.layout.stages and self.ranks[stage + 1] != self.axis.rank:
                    work = dist.isend(y.contiguous(), group=self.axis.group, group_dst=self.ranks[stage + 1])
                    assert work is not None
                    sent.append(work)
        for work in sent:
            wait(work, self.axis.group)
        return outputs.get(self.layout.stages - 1, [])

    def _receive(self, stage: int, outputs: dict[int, list[Tensor]], i: int, tokens: Tensor) -> Tensor:
        """Return the activations of micro-batch `i` from the previous stage, which may be on this rank."""
        if stage - 1 in outputs:
            return outputs[stage - 1][i]
        x = self._features(tokens, device=self.device)
        dist.recv(x, group=self.axis.group, group_src=self.ranks[stage - 1])
        return x
