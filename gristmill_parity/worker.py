"""Worker: one rank of a parity case: some training steps by the trainer's own code, recorded for the comparison."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from gristmill_parity.cases import SEQ_LEN, VOCAB_SIZE, Case
from training.data.batches import TargetCounts
from training.distributed.stop_signals import StopSignals
from training.experimental.local_steps.replicas import LocalReplicas
from training.features import plugins_of_layout
from training.kernels.cross_entropy import IGNORE_INDEX
from training.memory.memory_config import MemoryConfig, OffloadTarget
from training.model.batch import TokenBatch
from training.model.decoder import meta_decoder
from training.optim.build_optimizer import build_optimizer
from training.optim.optim_config import OptimConfig
from training.optim.stability import Stability, StabilityConfig
from training.parallel.mesh import World, build_world
from training.parallel.parallel_model import ParallelModel
from training.parallel.parallelize import parallelize
from training.parallel.traffic import expected_traffic
from training.parallel.traffic_counter import TrafficCounter, traffic_inputs
from training.parallel.traffic_inputs import Traffic, TrafficInputs, Volume
from training.plugin import Plugin, Plugins
from training.sharding.shard_spec import ShardSpec
from training.train_step import TrainStep

SEED = 1
LOGIT_POSITIONS = (0, 1, 7, 16, 23)
LR = 0.1  # plain SGD: Adam's updates would hide a wrong gradient scale
ADAMW = OptimConfig(name="adamw", lr=0.01, max_grad_norm=1.0, warmup_steps=0, schedule="constant")
SGD = OptimConfig(name="sgd", lr=LR, max_grad_norm=0.0, warmup_steps=0, schedule="constant")
_COUNTED_STEP = 1  # not the first, in which torch's pipelines also send each other shapes
_STABILITY = StabilityConfig(initial_loss_scale=1024.0)  # of fp16, whose gradients would underflow
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
    """Each step's loss, then a final evaluation's, in nats/token; of all ranks together."""
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
        run = CaseRun(case, Path(folder))
        try:
            return run.result()
        finally:
            run.close()


class _FirstGradients(Plugin):
    """Keeps a copy of the gradients of the first update, as they are before clipping."""

    def __init__(self, model: ParallelModel) -> None:
        self.model = model
        self.gradients = ShardValues()

    @contextmanager
    def update(self, loss_scale: float) -> Iterator[None]:
        if not self.gradients:
            for parameter in self.model.params:
                gradient = _copy(parameter.local.grad, 1 / loss_scale)
                self.gradients.append((parameter.name, parameter.spec, gradient))
        yield


class CaseRun:
    """A rank's model and optimizer in a case, with the trainer's step."""

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
        options = SGD if case.optimizer == "sgd" else replace(ADAMW, name=case.optimizer)
        self.optimizer = build_optimizer(
            model.params, options, memory, self.world.rank, _BUCKET_NUMEL, model.after_update, model.matrix_holders
        )
        self.first = _FirstGradients(model)
        self.plugins = Plugins()
        self.plugins.plugins += plugins_of_layout(case.layout, model, self.optimizer, options, lambda _: None)
        self.plugins.plugins.append(self.first)
        self.plugins.after_load(0, None, StopSignals())
        stability = Stability(_STABILITY, case.precision)
        self.train_step = TrainStep(model, self.optimizer, options, stability, self.plugins)

    def result(self) -> RankResult:
        """Train, evaluate, and copy the results to the CPU."""
        case = self.case
        model = self.model
        losses = []
        outer_gradients = ShardValues()
        traffic = TrafficCounter(self.world)
        for step in range(1, case.steps + 1):
            counted = step - 1 == _COUNTED_STEP and case.counts_traffic
            with traffic if counted else nullcontext():
                losses.append(self.step(step))
            if step == case.layout.local_steps:
                outer_gradients = self.outer_gradients()
        batch, targets = global_batch(case, case.steps)
        losses.append(self.evaluate(batch) / targets)
        inputs = None
        expected = Traffic()
        if case.counts_traffic:
            inputs = traffic_inputs(model, case.sequences // case.layout.dp, SEQ_LEN, case.precision, case.recompute)
            expected = expected_traffic(inputs) | traffic_of_sums(self.world, case)
        return RankResult(
            losses=losses,
            gradients=outer_gradients or self.first.gradients,
            weights=self.weights(),
            counted=traffic.traffic,
            expected=expected,
            logits=self.logits(batch),
            held=self.held_pieces(),
            inputs=inputs,
        )

    def weights(self) -> ShardValues:
        """Return copies of the parameters and of what a checkpoint has besides, such as the router's biases."""
        model = self.model
        weights = [(p.name, p.spec, _copy(p.local)) for p in model.params]
        weights += [(name, _whole(values), _copy(values)) for name, values in model.buffers.items()]
        if self.case.model.capacity_factor and model.routing is not None:
            shares = model.routing.take().dropped_shares
            weights.append(("dropped shares", _whole(shares), shares))
        return weights

    def held_pieces(self) -> list[HeldPiece]:
        """Return what the placement table says of this rank's parameters."""
        pieces = []
        for parameter in self.model.params:
            copies = parameter.placement.copies(self.model.axes)
            pieces.append(HeldPiece(parameter.name, parameter.spec, copies, parameter.is_primary))
        return pieces

    def step(self, step: int) -> float:
        """Take step `step` (from 1) as the trainer does; returns its loss."""
        batch, count = global_batch(self.case, step - 1)
        local = local_batch(batch, self.world).to(self.world.device)
        own = batch.targets[self.world.outer.rank :: self.world.outer.size]
        averaged = int((own != IGNORE_INDEX).sum())
        with self.plugins.step(step):
            sums = self.train_step.take(step, local, TargetCounts(averaged, count)).sums
            self.plugins.after_step(step)
        assert not self.train_step.stability.fault, f"step {step} was skipped: {self.train_step.stability.fault}"
        return sums.loss

    def evaluate(self, batch: TokenBatch) -> float:
        """Return the sum of the losses of a global batch, in nats."""
        local = local_batch(batch, self.world).to(self.world.device)
        micro_batches = local.chunk(self.case.layout.micro_batches)
        ids = [micro_batch.ids for micro_batch in micro_batches]
        targets = [micro_batch.targets for micro_batch in micro_batches]
        positions = [micro_batch.positions for micro_batch in micro_batches if micro_batch.positions is not None]
        loss = self.model.loss(ids, targets, positions or None)
        return float(self.world.all_reduce(loss))

    def outer_gradients(self) -> ShardValues:
        """Return the replicas' mean outer gradient of the first round, which the momentum is then."""
        (replicas,) = [plugin for plugin in self.plugins.plugins if isinstance(plugin, LocalReplicas)]
        momenta = replicas.outer.momenta
        return [(p.name, p.spec, _copy(momenta.get(p.name))) for p in self.model.params]

    def logits(self, batch: TokenBatch) -> Tensor | None:
        """Return the logits that sampling sees at some positions of the first sequence, (N, V).

        None if the case compares none; with a pipeline they are float32's, and each length is compiled anew.
        """
        if self.case.reference == "one process" or self.case.layout.pp > 1 or self.case.compiled:
            return None
        logits = []
        for position in LOGIT_POSITIONS:
            seen = slice(position + 1)
            positions = None if batch.positions is None else batch.positions[:1, seen]
            logits.append(self.model.next_logits(batch.ids[:1, seen], positions).detach().cpu())
        return torch.stack(logits)

    def close(self) -> None:
        """Remove the files of what was offloaded."""
        self.optimizer.close()
        self.model.close()


ALL_RANKS = ("default_pg", "all-reduce")
"""The key of the traffic of a step's sums."""


def traffic_of_sums(world: World, case: Case) -> Traffic:
    """Return the traffic of a step's sums over all ranks: loss, stop, seconds, squared norm, and perhaps a z-loss."""
    if world.size == 1:
        return {}
    numbers = 5 if case.z_loss else 4
    return {ALL_RANKS: Volume(1, 8 * numbers)}


def _device(case: Case) -> torch.device:
    """Return this rank's device; ranks share the GPUs if there are more of them."""
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
    """Draw positions of tokens in documents of random lengths, one of them of one token: (sequences, SEQ_LEN) int64."""
    starts = torch.rand(sequences, SEQ_LEN, generator=generator) < 1 / 6
    starts[:, 0] = True
    starts[:, -1] = True
    index = torch.arange(SEQ_LEN).expand_as(starts)
    first_of_document = torch.where(starts, index, 0).cummax(1).values
    return index - first_of_document


def local_batch(batch: TokenBatch, world: World) -> TokenBatch:
    """Return this replica's sequences: every dp_size-th, from dp_rank, as in training."""
    return batch.rows(slice(world.dp_rank, None, world.dp_size))


def _copy(values: Tensor | None, factor: float = 1.0) -> Tensor | None:
    """Return a copy on the CPU, times `factor`."""
    if values is None:
        return None
    return values.detach().to("cpu", copy=True).mul_(factor)


def _whole(values: Tensor) -> ShardSpec:
    return ShardSpec.whole(tuple(values.shape))
