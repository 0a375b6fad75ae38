"""Worker: one rank of a parity case: three training steps, recorded for the comparison."""

import contextlib
import re
from dataclasses import dataclass

import torch
from torch import Tensor

from training.distributed.mesh import World, build_world
from training.kernels.cross_entropy import IGNORE_INDEX
from training.memory.memory_config import MemoryConfig
from training.model.batch import Batch
from training.model.decoder import meta_decoder
from training.parallel.parallel_model import ParallelModel
from training.parallel.parallelize import parallelize
from training.parallel.pipeline_parallel import Pipeline
from training.parity.cases import SEQ_LEN, VOCAB_SIZE, Case
from training.parity.traffic import Traffic, TrafficCounter
from training.parity.traffic_theory import TrafficInputs, expected_traffic
from training.sharding.shard_spec import ShardSpec

STEPS = 3
_LR = 0.1  # plain SGD: Adam's updates would hide a wrong gradient scale
_COUNTED_STEP = 1  # not the first, in which torch's pipelines also send each other shapes
_SEED = 1

ShardValues = list[tuple[str, ShardSpec, Tensor | None]]
"""(parameter name, shard, values) of each parameter or gradient shard that a rank holds."""


@dataclass(frozen=True)
class RankResult:
    """One rank's results of a case: losses, gradients, weights and traffic."""

    losses: list[float]
    """This rank's term of each step's loss, then of a final evaluation's; the sum over ranks is in nats/token."""
    gradients: ShardValues
    """Gradients after the first step's backward pass."""
    weights: ShardValues
    """Parameters after the last step's update."""
    counted: Traffic
    expected: Traffic


def run_case(case: Case) -> RankResult:
    """Run a case as one of its ranks; every rank of the default process group calls it."""
    world = build_world(case.layout, torch.device("cpu"))
    decoder = meta_decoder(case.model)
    model = parallelize(decoder, case.layout, world, _SEED, case.precision, MemoryConfig(case.recompute))
    losses, gradients = [], ShardValues()
    traffic = TrafficCounter(world)
    for step in range(STEPS):
        batch, targets = global_batch(case, step)
        with traffic if step == _COUNTED_STEP else contextlib.nullcontext():
            losses.append(float(model.forward_backward(local_batch(batch, world), 1 / targets)) / targets)
            if step == 0:
                gradients = [(p.name, p.spec, _copy(p.local.grad)) for p in model.params]
            _sgd_step(model)
    batch, targets = global_batch(case, STEPS)
    local = local_batch(batch, world)
    micro_batches = [t.chunk(case.layout.micro_batches) for t in (local.ids, local.targets)]
    losses.append(float(model.loss(*micro_batches)) / targets)
    weights = [(p.name, p.spec, _copy(p.local)) for p in model.params]
    return RankResult(losses, gradients, weights, traffic.traffic, expected_traffic(_traffic_inputs(case, model)))


def global_batch(case: Case, step: int) -> tuple[Batch, int]:
    """Draw a step's global batch; returns it and its number of targets that are not ignored.

    Ignored targets: a random fifth, all but the first of every fourth sequence, and the whole first sequence. So a
    loss averaged over anything but the global count of targets differs from the reference.
    """
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(VOCAB_SIZE, (case.sequences, SEQ_LEN + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < 0.2] = IGNORE_INDEX
    targets[::4, 1:] = IGNORE_INDEX
    targets[0] = IGNORE_INDEX
    samples = torch.arange(len(tokens)) + step * len(tokens)
    return Batch(tokens[:, :-1], targets, samples), int((targets != IGNORE_INDEX).sum())


def local_batch(batch: Batch, world: World) -> Batch:
    """This replica's sequences: every dp_size-th, from dp_rank, as in training."""
    mine = slice(world.dp_rank, None, world.dp_size)
    return Batch(batch.ids[mine], batch.targets[mine], batch.sample_ids[mine])


def _sgd_step(model: ParallelModel) -> None:
    with torch.no_grad():
        for p in model.params:
            if p.local.grad is not None:
                p.local.sub_(_LR * p.local.grad)
            p.local.grad = p.module_param.grad = None
    model.publish_params()


def _copy(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().clone()


def _traffic_inputs(case: Case, model: ParallelModel) -> TrafficInputs:
    return TrafficInputs(
        config=model.config,
        layout=case.layout,
        world=model.world,
        sequences=case.sequences // case.layout.dp,
        seq_len=SEQ_LEN,
        itemsize=8 if case.precision == "fp64" else 4,
        recompute=case.recompute,
        passes=pipeline_passes(model.pipeline) if model.pipeline else {},
    )


def pipeline_passes(pipeline: Pipeline) -> dict[int, str]:
    """The passes of each of this rank's stages, in order: F forward, B backward, or I and W if backward is split."""
    count, schedule = pipeline.layout.micro_batches, pipeline.schedule
    if pipeline.layout.virtual_stages > 1:
        actions = str(schedule.pipeline_order[pipeline.axis.rank])
        return {stage: "".join(re.findall(rf"\b{stage}([FBIW])\d", actions)) for stage in pipeline.stages}
    if pipeline.layout.schedule == "gpipe":
        return dict.fromkeys(pipeline.stages, "F" * count + "B" * count)
    warmup = {stage: min(count, pipeline.layout.stages - stage) for stage in pipeline.stages}
    return {stage: "F" * n + "BF" * (count - n) + "B" * n for stage, n in warmup.items()}
