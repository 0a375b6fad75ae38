"""What each process of a case of the parity certificate does: three steps, and what it saw of them."""

import contextlib
import re
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from training.distributed.mesh import World, build_world
from training.kernels.cross_entropy import IGNORE_INDEX
from training.memory.memory_config import MemoryConfig
from training.model.batch import Batch
from training.parallel.parallel_model import ParallelModel
from training.parallel.parallelize import parallelize
from training.parallel.pipeline_parallel import Pipeline
from training.parity.cases import SEQ_LEN, VOCABULARY, Case
from training.parity.traffic import Traffic, TrafficCount
from training.parity.traffic_theory import Step, expected_traffic
from training.sharding.shard_spec import ShardSpec

STEPS = 3
_RATE = 0.1  # of plain SGD: its steps hide no wrong scale, as Adam's do
_COUNTED = 1  # the step that is counted: in the first, torch's pipelines also tell each other shapes
_SEED = 1

Held = list[tuple[str, ShardSpec, Tensor | None]]
"""Parts of parameters, or of their gradients, by name."""


@dataclass(frozen=True)
class Seen:
    """What one process has to show; its parts of the loss are to be added up, in nats a target."""

    losses: list[float]
    """Of each step, and at last of a forward pass alone."""
    gradients: Held
    """Of the first step."""
    weights: Held
    """After the last step."""
    counted: Traffic
    expected: Traffic
    seconds: float


def measure(case: Case) -> Seen:
    """Run a case; each of its processes calls it, in a process group of them all."""
    world = build_world(case.layout, torch.device("cpu"))
    model = parallelize(case.model, case.layout, world, _SEED, case.precision, MemoryConfig(case.recompute))
    losses, gradients = [], Held()
    traffic = TrafficCount(world)
    started = time.perf_counter()
    for step in range(STEPS):
        batch, count = data(case, step)
        with traffic if step == _COUNTED else contextlib.nullcontext():
            losses.append(float(model.forward_backward(replica_share(batch, world), 1 / count)) / count)
            if step == 0:
                gradients = [(w.name, w.spec, _copy(w.local.grad)) for w in model.params]
            _descend(model)
    seconds = time.perf_counter() - started
    batch, count = data(case, STEPS)
    share = replica_share(batch, world)
    rounds = [t.chunk(case.layout.micro_batches) for t in (share.ids, share.targets)]
    losses.append(float(model.loss(*rounds)) / count)
    weights = [(w.name, w.spec, _copy(w.local)) for w in model.params]
    return Seen(losses, gradients, weights, traffic.traffic, expected_traffic(_step(case, model)), seconds)


def data(case: Case, step: int) -> tuple[Batch, int]:
    """A step's global batch, and how many targets count: some are ignored, and all but one of every fourth sequence."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(VOCABULARY, (case.sequences, SEQ_LEN + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < 0.2] = IGNORE_INDEX
    targets[::4, 1:] = IGNORE_INDEX
    targets[0] = IGNORE_INDEX
    return Batch(tokens[:, :-1], targets, torch.arange(len(tokens)) + step * len(tokens)), int(
        (targets != IGNORE_INDEX).sum()
    )


def replica_share(batch: Batch, world: World) -> Batch:
    """Every n-th sequence, so that the replicas' first are neighbours."""
    mine = slice(world.dp_rank, None, world.dp_size)
    return Batch(batch.ids[mine], batch.targets[mine], batch.sample_ids[mine])


def _descend(model: ParallelModel) -> None:
    with torch.no_grad():
        for w in model.params:
            if w.local.grad is not None:
                w.local.sub_(_RATE * w.local.grad)
            w.local.grad = w.module_param.grad = None
    model.all_gather_params()


def _copy(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().clone()


def _step(case: Case, model: ParallelModel) -> Step:
    return Step(
        config=model.config,
        layout=case.layout,
        world=model.world,
        sequences=case.sequences // case.layout.dp,
        seq_len=SEQ_LEN,
        itemsize=8 if case.precision == "fp64" else 4,
        recompute=case.recompute,
        orders=pass_orders(model.pipeline) if model.pipeline else {},
    )


def pass_orders(pipeline: Pipeline) -> dict[int, str]:
    """Each of this process's stages' passes in their order, as letters: F, B, or I and W."""
    count, schedule = pipeline.layout.micro_batches, pipeline.schedule
    if pipeline.layout.virtual_stages > 1:
        actions = str(schedule.pipeline_order[pipeline.axis.rank])
        return {stage: "".join(re.findall(rf"\b{stage}([FBIW])\d", actions)) for stage in pipeline.stages}
    if pipeline.layout.schedule == "gpipe":
        return dict.fromkeys(pipeline.stages, "F" * count + "B" * count)
    ahead = {stage: min(count, pipeline.layout.stages - stage) for stage in pipeline.stages}
    return {stage: "F" * n + "BF" * (count - n) + "B" * n for stage, n in ahead.items()}
