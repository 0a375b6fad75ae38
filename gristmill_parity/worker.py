"""Worker: one rank of a parity case: three training steps, recorded for the comparison."""

import contextlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from gristmill_parity.cases import SEQ_LEN, VOCAB_SIZE, Case
from training.distributed.stop_signals import StopSignals
from training.experimental.compression.bucket import buckets_of
from training.experimental.local_steps.replicas import LocalReplicas
from training.kernels.cross_entropy import IGNORE_INDEX
from training.memory.memory_config import MemoryConfig, OffloadTarget
from training.model.batch import TokenBatch
from training.model.decoder import meta_decoder
from training.optim.build_optimizer import build_optimizer
from training.optim.optim_config import OptimConfig
from training.optim.optimizer import Optimizer
from training.parallel.gradients import scale_gradients, squared_grad_norm
from training.parallel.mesh import World, build_world
from training.parallel.parallel_model import ParallelModel
from training.parallel.parallelize import parallelize
from training.parallel.traffic import expected_traffic
from training.parallel.traffic_counter import TrafficCounter, traffic_inputs
from training.parallel.traffic_inputs import Traffic, TrafficInputs
from training.sharding.shard_spec import ShardSpec
from training.step_sums import StepSums

SEED = 1
LOGIT_POSITIONS = (0, 1, 7, 16, 23)
LR = 0.1  # plain SGD: Adam's updates would hide a wrong gradient scale
ADAMW = OptimConfig(name="adamw", lr=0.01, max_grad_norm=1.0)
_COUNTED_STEP = 1  # not the first, in which torch's pipelines also send each other shapes
_FP16_SCALE = 1024.0  # of the loss: fp16's gradients would underflow
_BUCKET_NUMEL = 5000  # of an offloaded optimizer: several buckets, which cut through parameters

ShardValues = list[tuple[str, ShardSpec, Tensor | None]]
"""(parameter name, shard, values) of each parameter or gradient shard that a rank holds."""


@dataclass(frozen=True)
class HeldPiece:
    """A piece of a parameter that a rank holds, by the placement table."""

    name: str
    spec: ShardSpec
    copies: int
    """Ranks that hold the piece."""
    is_primary: bool
    """True on the one of them that counts it in the gradient norm."""


@dataclass(frozen=True)
class RankResult:
    """One rank's results of a case: losses, gradients, weights and traffic."""

    losses: list[float]
    """This rank's term of each step's loss, then of a final evaluation's; the sum over ranks is in nats/token."""
    gradients: ShardValues
    """Gradients after the first step's backward pass; with local steps the outer ones of the first round."""
    weights: ShardValues
    """Parameters after the last step's update."""
    counted: Traffic
    expected: Traffic
    logits: Tensor | None = None
    """At LOGIT_POSITIONS of the evaluation's first sequence, (N, V); None if they are not compared."""
    held: Sequence[HeldPiece] = ()
    inputs: TrafficInputs | None = None
    """Of `expected`; None if the traffic is not compared."""


def run_case(case: Case) -> RankResult:
    """Run a case as one of its ranks; every rank of the default process group calls it."""
    if case.compiled:
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # its pool of compilers would start slowly
    with tempfile.TemporaryDirectory() as folder:
        run = _CaseRun(case, Path(folder))
        try:
            return run.result()
        finally:
            run.close()


class _CaseRun:
    """A rank's model and optimizer in a case."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case = case
        self.world = build_world(case.layout, _device(case))
        parameters: OffloadTarget = case.offload if case.layout.zero == 3 else "device"
        memory = MemoryConfig(case.recompute, case.offload, parameters, folder)
        self.model = model = parallelize(
            meta_decoder(case.model), case.layout, self.world, SEED, case.precision, memory, case.compiled
        )
        if case.z_loss:
            model.add_z_loss(case.z_loss)
        self.optimizer: Optimizer | None = None
        self.replicas: LocalReplicas | None = None
        if case.optimizer != "sgd":
            options = replace(ADAMW, name=case.optimizer)
            self.optimizer = build_optimizer(
                model.params, options, memory, self.world.rank, _BUCKET_NUMEL, model.after_update, model.matrix_holders
            )
            if case.layout.local_steps:
                self.replicas = LocalReplicas(case.layout.local_steps, options, model, self.optimizer)
                self.replicas.after_load(0, None, StopSignals())

    def result(self) -> RankResult:
        """Train, evaluate, and copy the results to the CPU."""
        case = self.case
        model = self.model
        world = self.world
        losses = []
        gradients = ShardValues()
        traffic = TrafficCounter(world)
        for step in range(case.steps):
            counted = step == _COUNTED_STEP and case.counts_traffic
            with traffic if counted else contextlib.nullcontext():
                losses.append(self.forward_backward(step))
                if step == 0:
                    gradients = [(p.name, p.spec, _copy(p.local.grad)) for p in model.params]
                self.update(step)
                if step + 1 == case.layout.local_steps:
                    gradients = self.outer_gradients()
        batch, targets = global_batch(case, case.steps)
        local = local_batch(batch, world).to(world.device)
        parts = local.chunk(case.layout.micro_batches)
        positions = [part.positions for part in parts if part.positions is not None] or None
        losses.append(float(model.loss([p.ids for p in parts], [p.targets for p in parts], positions)) / targets)
        weights = [(p.name, p.spec, _copy(p.local)) for p in model.params]
        weights += [(name, ShardSpec.whole(tuple(x.shape)), _copy(x)) for name, x in model.buffers.items()]
        if case.model.capacity_factor and model.routing is not None:
            shares = model.routing.take().dropped_shares
            weights.append(("dropped shares", ShardSpec.whole(tuple(shares.shape)), shares))
        inputs = None
        if case.counts_traffic:
            inputs = traffic_inputs(model, case.sequences // case.layout.dp, SEQ_LEN, case.precision, case.recompute)
        expected = expected_traffic(inputs) if inputs else {}
        held = [HeldPiece(p.name, p.spec, p.placement.copies(model.axes), p.is_primary) for p in model.params]
        logits = self.logits(batch)
        return RankResult(losses, gradients, weights, traffic.traffic, expected, logits, held, inputs)

    def forward_backward(self, step: int) -> float:
        """Leave the gradients of the step's mean loss on the shards; returns this rank's term of it."""
        batch, targets = global_batch(self.case, step)
        local = local_batch(batch, self.world).to(self.world.device)
        scale = _FP16_SCALE if self.case.precision == "fp16" else 1.0
        own = batch.targets[self.world.outer.rank :: self.world.outer.size]
        count = int((own != IGNORE_INDEX).sum())
        loss = float(self.model.forward_backward(local, scale / count)) / targets
        scale_gradients(self.model.params, 1 / scale)
        return loss

    def update(self, step: int) -> None:
        """Update the shards as the trainer does after step `step` (from 0), and drop the gradients."""
        for bucket in buckets_of(self.model.reducers):
            bucket.keep()
        if self.model.routing is not None:
            self.model.routing.update_bias()
        if self.optimizer is None:
            _sgd_step(self.model)
            return
        square = squared_grad_norm(self.model.params, self.world.device)
        sums = StepSums.of(self.world, 1, 1.0, torch.zeros_like(square), square)
        scale_gradients(self.model.params, min(1.0, ADAMW.max_grad_norm / (sums.own_norm + 1e-6)))
        self.optimizer.step(ADAMW.lr)
        self.model.start_all_gather()
        self.optimizer.zero_grad()
        if self.replicas is not None:
            self.replicas.after_step(step + 1)

    def outer_gradients(self) -> ShardValues:
        """The replicas' mean outer gradient of the first round, which the momentum is then."""
        assert self.replicas is not None
        momenta = self.replicas.outer.momenta
        return [(p.name, p.spec, _copy(momenta.get(p.name))) for p in self.model.params]

    def logits(self, batch: TokenBatch) -> Tensor | None:
        """The logits that sampling sees at some positions of the first sequence, (N, V).

        None if the case compares none; with a pipeline they are float32's, and each length is compiled anew.
        """
        if self.case.reference == "one process" or self.case.layout.pp > 1 or self.case.compiled:
            return None
        ids = batch.ids[:1]
        positions = batch.positions
        seen = [(ids[:, : n + 1], None if positions is None else positions[:1, : n + 1]) for n in LOGIT_POSITIONS]
        return torch.stack([self.model.next_logits(*tokens).detach().cpu() for tokens in seen])

    def close(self) -> None:
        """Remove the files of what was offloaded."""
        if self.optimizer is not None:
            self.optimizer.close()
        self.model.close()


def _device(case: Case) -> torch.device:
    """This rank's device; ranks share the GPUs if there are more of them."""
    if case.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def global_batch(case: Case, step: int) -> tuple[TokenBatch, int]:
    """Draw a step's global batch; returns it and its number of targets that are not ignored.

    Ignored targets: a random fifth, all but the first of every fourth sequence, and the whole first sequence. So a
    loss averaged over anything but the global count of targets differs from the reference. With `case.documents`
    about every sixth token starts one, the last one of a sequence too. With `case.padding` what follows a random
    number of tokens of each sequence, two or more, is padding. With `case.chats` only every other run of one to four
    tokens has targets.
    """
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(VOCAB_SIZE, (case.sequences, SEQ_LEN + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < 0.2] = IGNORE_INDEX
    targets[::4, 1:] = IGNORE_INDEX
    targets[0] = IGNORE_INDEX
    samples = torch.arange(len(tokens)) + step * len(tokens)
    positions = draw_positions(len(tokens), generator) if case.documents else None
    padding = None
    if case.padding:
        lengths = torch.randint(2, SEQ_LEN + 1, (case.sequences, 1), generator=generator)
        padding = torch.arange(SEQ_LEN) >= lengths
        targets[torch.arange(1, SEQ_LEN + 1) >= lengths] = IGNORE_INDEX
    if case.chats:
        turns = (torch.rand(targets.shape, generator=generator) < 0.4).cumsum(1)
        targets[turns % 2 == 0] = IGNORE_INDEX
    batch = TokenBatch(tokens[:, :-1], targets, samples, positions, padding=padding)
    return batch, int((targets != IGNORE_INDEX).sum())


def draw_positions(sequences: int, generator: torch.Generator) -> Tensor:
    """Positions of tokens in documents of random lengths, one of them of one token: (sequences, SEQ_LEN) int64."""
    starts = torch.rand(sequences, SEQ_LEN, generator=generator) < 1 / 6
    starts[:, 0] = starts[:, -1] = True
    at = torch.arange(SEQ_LEN).expand_as(starts)
    return at - torch.where(starts, at, 0).cummax(1).values


def local_batch(batch: TokenBatch, world: World) -> TokenBatch:
    """This replica's sequences: every dp_size-th, from dp_rank, as in training."""
    return batch.rows(slice(world.dp_rank, None, world.dp_size))


def _sgd_step(model: ParallelModel) -> None:
    with torch.no_grad():
        for p in model.params:
            if p.local.grad is not None:
                p.local.sub_(LR * p.local.grad)
            p.local.grad = p.module_param.grad = None
    model.start_all_gather()


def _copy(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().to("cpu", copy=True)
