"""A pipeline of stages: torch's schedules for training, and a forward pass alone for all else."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, schedules
from torch.utils.checkpoint import GraphExecGroup

from training.distributed.hang_detection import wait
from training.distributed.layout import ParallelConfig
from training.distributed.mesh import Axis
from training.model.decoder import Decoder
from training.parallel.pipeline_stages import stage_numbers, stage_owner

SCHEDULES: dict[str, Callable[..., Any]] = {
    "gpipe": schedules.ScheduleGPipe,  # Huang et al. 2019
    "1f1b": schedules.Schedule1F1B,  # Narayanan et al. 2019, PipeDream; 2021, section 2.2.1
    "interleaved-1f1b": schedules.ScheduleInterleaved1F1B,  # Narayanan et al. 2021, section 2.2.2
    "looped-bfs": schedules.ScheduleLoopedBFS,  # Lamy-Poirier 2023, breadth-first
    "zero-bubble": schedules.ScheduleInterleavedZeroBubble,  # Qi et al. 2023
    "zbv": schedules.ScheduleZBVZeroBubble,  # Qi et al. 2024
    "dualpipev": schedules.ScheduleDualPipeV,  # DeepSeek-AI 2024, and its V shape
}


class _Stage(PipelineStage):
    """torch asks for a stage's gradients of weights group by group: recomputed blocks are to be so once for all."""

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        with GraphExecGroup():
            super().backward_weight_one_chunk(*args, **kwargs)


class Pipeline:
    """This process's stages in their schedule; `axis` is "pp"."""

    def __init__(self, parts: Sequence[Decoder], layout: ParallelConfig, axis: Axis, device: torch.device) -> None:
        self.layout, self.axis, self.device = layout, axis, device
        self.numbers = stage_numbers(layout, axis.rank)
        self.parts = dict(zip(self.numbers, parts, strict=True))
        self.owners = [stage_owner(layout, stage) for stage in range(layout.stages)]
        stages = [_Stage(self.parts[n], n, layout.stages, device, group=axis.group) for n in self.numbers]
        self.scale: Tensor | float = 1.0
        self.schedule = SCHEDULES[layout.schedule](
            stages[0] if layout.virtual_stages == 1 else stages,
            n_microbatches=layout.micro_batches,
            loss_fn=lambda loss, _: loss.sum() * self.scale,
            scale_grads=False,  # the loss is a sum, divided by the global count of targets already
        )

    def forward_backward(self, ids: Tensor, targets: Tensor, samples: Tensor, scale: float) -> Tensor:
        """Add the gradients of the scaled loss of a replica's batch (B, T); return the loss in nats, summed, 0-d.

        The loss is that of the process with the last stage, and zero on the others.
        """
        self.scale = scale
        losses: list[Tensor] = []
        first = (ids,) if 0 in self.numbers else ()
        last = {"target": samples, "losses": losses} if self.layout.stages - 1 in self.numbers else {}
        self.schedule.step(*first, targets=targets, samples=samples, return_outputs=False, **last)
        return torch.stack(losses).detach().sum() / scale if losses else torch.zeros((), device=self.device)

    def forward(self, ids: Sequence[Tensor], targets: Sequence[Tensor] | None) -> list[Tensor]:
        """The last stage's outputs for each micro-batch, on its process alone: losses, or logits without targets."""
        outputs: dict[int, list[Tensor]] = {}
        sent: list[dist.Work] = []
        for stage in self.numbers:  # ascending: what the stages before need has been sent
            outputs[stage] = []
            for i, tokens in enumerate(ids):
                x = tokens if stage == 0 else self._receive(stage, outputs, i, tokens)
                y = self.parts[stage](x, targets[i] if targets is not None else None)
                outputs[stage].append(y)
                if stage + 1 < self.layout.stages and self.owners[stage + 1] != self.axis.rank:
                    work = dist.isend(y.contiguous(), group=self.axis.group, group_dst=self.owners[stage + 1])
                    assert work is not None
                    sent.append(work)
        for work in sent:
            wait(work, self.axis.group)
        return outputs.get(self.layout.stages - 1, [])

    def _receive(self, stage: int, outputs: dict[int, list[Tensor]], i: int, tokens: Tensor) -> Tensor:
        if stage - 1 in outputs:
            return outputs[stage - 1][i]
        part = self.parts[stage]
        like = next(part.blocks.parameters())
        size = tokens.shape[1] // part.sequence_parts
        x = torch.empty(len(tokens), size, part.config.width, dtype=like.dtype, device=self.device)
        dist.recv(x, group=self.axis.group, group_src=self.owners[stage - 1])
        return x
