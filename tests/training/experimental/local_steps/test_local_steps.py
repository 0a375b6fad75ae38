"""Replicas that take local steps equal a loop that averages them, resume bit for bit, and may become more or fewer."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gristmill.errors import UsageError
from gristmill_parity.plain.decoder import PlainDecoder, PlainSizes
from training.checkpoint.checkpoint import load_model
from training.checkpoint.checkpoint_config import CheckpointConfig
from training.checkpoint.checkpoint_group import single_process_group
from training.checkpoint.shard_storage import parameter_key
from training.config import TrainConfig
from training.data.batches import Batches
from training.distributed.rank_pool import RankError
from training.experimental.local_steps import replicas
from training.experimental.parallel_config import ParallelConfig
from training.memory.memory_config import MemoryConfig
from training.model.batch import TokenBatch
from training.model.decoder import meta_decoder
from training.optim.optim_config import OptimConfig
from training.parallel.initialize import init_shard
from training.parallel.traffic_counter import TrafficCounter
from training.parallel.traffic_inputs import Volume
from training.profiling.profile_config import ProfileConfig
from training.reporting.metrics_file import METRICS, read_metrics
from training.run_plan import RunPlan
from training.sharding.shard_spec import ShardSpec
from training.train import train
from training.trainer import Trainer

RunRanks = Callable[..., list[Any]]
Named = dict[str, Tensor]
H = 3
APART = ParallelConfig(local_steps=H, zero=3, zero_group=1)


@pytest.fixture
def exact(config: TrainConfig) -> TrainConfig:
    """Six steps in float64, of which replicas take three of their own; every step is saved."""
    optim = OptimConfig(steps=2 * H, lr=1e-2, min_lr=1e-2, warmup_steps=2)
    saves = CheckpointConfig(every=1, keep=99, async_save=False)
    data, measured = replace(config.data, batch_size=12), replace(config.eval, every=2, sample_tokens=0)
    config = replace(config, precision="fp64", checkpoint=saves, optim=optim, data=data, eval=measured)
    return replace(config, parallel=ParallelConfig(local_steps=H), model=replace(config.model, kv_heads=4))


def plan_alone(config: TrainConfig) -> RunPlan:
    """The plan of the same run on one process without local steps."""
    optim = replace(config.optim, outer_lr=OptimConfig.outer_lr, outer_momentum=OptimConfig.outer_momentum)
    return RunPlan.of(replace(config, parallel=ParallelConfig(), optim=optim))


def shared_weights(out_dir: Path, config: TrainConfig) -> Named:
    """The shared weights of the last checkpoint, by name."""
    model = plan_alone(config).model
    found = {name: torch.empty(p.shape, dtype=torch.float64) for name, p in meta_decoder(model).named_parameters()}
    state = {parameter_key(name): [(values, ShardSpec.whole(tuple(values.shape)))] for name, values in found.items()}
    with single_process_group() as group:
        load_model(out_dir, state, group, lambda _: None)
    return found


class PlainReplica:
    """One replica in plain torch: the independent decoder, torch's AdamW, its clipping."""

    def __init__(self, config: TrainConfig, initial: Named) -> None:
        self.weights = {name: w.clone().requires_grad_() for name, w in initial.items()}
        model, optim = plan_alone(config).model, config.optim
        sizes = PlainSizes(model.layers, model.heads, model.kv_heads, model.norm_eps, model.rope_base, 0.0)
        self.decoder = PlainDecoder(self.weights, sizes)
        groups = [
            {"params": [w for w in self.weights.values() if (w.ndim > 1) is decays], "weight_decay": decay}
            for decays, decay in ((True, optim.weight_decay), (False, 0.0))
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=optim.betas, eps=optim.eps)

    def step(self, batch: TokenBatch, lr: float) -> None:
        self.optimizer.zero_grad()
        (self.decoder.loss(batch.ids, batch.targets) / batch.targets.numel()).backward()
        torch.nn.utils.clip_grad_norm_(list(self.weights.values()), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()


def reference(config: TrainConfig, count: int) -> Named:
    """Local steps as the paper's algorithm 1 has them, with torch's SGD as outer optimizer: the shared weights."""
    plan = plan_alone(config)
    shared = {}
    for name, p in meta_decoder(plan.model).named_parameters():
        values = torch.empty(p.shape, dtype=torch.float64)
        init_shard(values, name, ShardSpec.whole(tuple(p.shape)), plan.model, config.seed)
        shared[name] = values.requires_grad_()
    lr, momentum = config.optim.outer_lr, config.optim.outer_momentum
    outer = torch.optim.SGD(list(shared.values()), lr=lr, momentum=momentum, nesterov=momentum > 0)
    each = [PlainReplica(config, {name: w.detach() for name, w in shared.items()}) for _ in range(count)]
    sequences, mix = plan.train.sequences(config.seed, None)
    batches = Batches(sequences, plan.split, 0, config.seed, config.data.order, mix)
    for step, batch in enumerate(batches.read(0, config.optim.steps), 1):
        lr = config.optim.lr * min(1.0, step / config.optim.warmup_steps)
        for number, one in enumerate(each):
            own = slice(number, None, count)
            one.step(TokenBatch(batch.ids[own], batch.targets[own], batch.sample_ids[own]), lr)
        if step % config.parallel.local_steps == 0:
            for name, w in shared.items():
                w.grad = torch.stack([w.detach() - one.weights[name].detach() for one in each]).mean(0)
            outer.step()
            for one in each:
                for name, w in one.weights.items():
                    w.data.copy_(shared[name].detach())
    return {name: w.detach() for name, w in shared.items()}


@pytest.mark.parametrize(("lr", "momentum"), [(1.0, 0.0), (0.7, 0.9)])
def test_replicas_equal_a_plain_loop(
    exact: TrainConfig, run_ranks: RunRanks, tmp_path: Path, lr: float, momentum: float
) -> None:
    """With an outer rate of 1 and no momentum that is the mean of the weights after every three steps."""
    config = replace(exact, optim=replace(exact.optim, outer_lr=lr, outer_momentum=momentum))
    run_ranks(3, train, config)
    assert_equal(shared_weights(config.out_dir, config), reference(config, 3), 1e-12)


def assert_equal(found: Named, expected: Named, limit: float) -> None:
    assert found.keys() == expected.keys()
    worst = max(float((found[name] - expected[name]).abs().max()) for name in expected)
    assert worst <= limit, worst


@pytest.mark.every(3)
@pytest.mark.parametrize("fault", ["not averaged", "not divided", "momentum lost"])
def test_a_planted_fault_turns_red(exact: TrainConfig, run_ranks: RunRanks, fault: str) -> None:
    run_ranks(2, train_with_fault, exact, fault)
    with pytest.raises(AssertionError, match=r"^\d"):
        assert_equal(shared_weights(exact.out_dir, exact), reference(exact, 2), 1e-6)


def train_with_fault(config: TrainConfig, fault: str) -> None:
    """Train with a wrong outer step; the momentum is lost by a resume after the first of two rounds."""
    with pytest.MonkeyPatch.context() as patch:
        if fault == "not averaged":
            patch.setattr(replicas, "mean_over", lambda axis: lambda tensors: None)
        if fault == "not divided":
            mean_over = replicas.mean_over
            patch.setattr(replicas, "mean_over", lambda axis: _times(axis.size, mean_over(axis)))
        if fault == "momentum lost":
            train(replace(config, optim=replace(config.optim, steps=H)))
            after_load = replicas.LocalReplicas.after_load
            patch.setattr(
                replicas.LocalReplicas, "after_load", lambda self, step, _, stop: after_load(self, step, None, stop)
            )
        train(config)


def _times(factor: int, mean: Callable[[list[Tensor]], None]) -> Callable[[list[Tensor]], None]:
    def scaled(tensors: list[Tensor]) -> None:
        mean(tensors)
        torch._foreach_mul_(tensors, factor)

    return scaled


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("processes", "layout"),
    [
        (4, ParallelConfig(tp=2, sequence_parallel=True)),
        (4, ParallelConfig(pp=2)),
        (4, ParallelConfig(zero=1, zero_group=2)),
        (4, ParallelConfig(zero=3, zero_group=2)),
        (8, ParallelConfig(zero=2, zero_group=2, tp=2, micro_batches=3)),
        (4, ParallelConfig(cp=2, zero=1, zero_group=1)),
    ],
    ids=lambda x: x.describe() if isinstance(x, ParallelConfig) else str(x),
)
def test_a_replica_may_be_several_ranks(
    exact: TrainConfig, run_ranks: RunRanks, tmp_path: Path, processes: int, layout: ParallelConfig
) -> None:
    """Tied matrices and biases too: those on several ranks stay equal."""
    exact = replace(exact, model=replace(exact.model, preset="gpt2", dropout=0.0), checkpoint=CheckpointConfig())
    run_ranks(2, train, exact)
    several = replace(exact, out_dir=tmp_path / "several", parallel=replace(layout, local_steps=H))
    run_ranks(processes, train, several)
    assert_equal(shared_weights(several.out_dir, exact), shared_weights(exact.out_dir, exact), 1e-10)
    for kind, name in (("step", "loss"), ("step", "grad_norm"), ("eval", "loss")):
        assert values(several.out_dir, kind, name) == pytest.approx(values(exact.out_dir, kind, name), rel=1e-9)


def values(out_dir: Path, kind: str, name: str) -> list[float]:
    return [record[name] for record in read_metrics(out_dir / METRICS) if record["kind"] == kind]


def begin_at(step: int, source: Path, target: Path) -> Path:
    """A copy of a run as it was after `step` steps."""
    shutil.copytree(source, target)
    (target / "checkpoints/latest").write_text(f"step-{step:08d}")
    return target


def digests(out_dir: Path, step: int) -> dict[str, str]:
    found: dict[str, str] = json.loads((out_dir / f"checkpoints/step-{step:08d}/record.json").read_text())["files"]
    return {name: digest for name, digest in found.items() if name != ".metadata"}


def test_a_run_resumes_bit_for_bit_at_any_step(exact: TrainConfig, run_ranks: RunRanks, tmp_path: Path) -> None:
    """Every file of the last checkpoint has the same bytes: of each replica, of shared weights and momentum."""
    run_ranks(2, train, exact)
    for step in (H - 1, H, H + 1):
        out_dir = begin_at(step, exact.out_dir, tmp_path / f"from-{step}")
        run_ranks(2, train, replace(exact, out_dir=out_dir))
        assert digests(out_dir, 2 * H) == digests(exact.out_dir, 2 * H)
        assert values(out_dir, "step", "loss") == values(exact.out_dir, "step", "loss")
        assert values(out_dir, "eval", "loss") == values(exact.out_dir, "eval", "loss")


def test_replicas_may_be_more_or_fewer_where_they_have_the_same_weights(
    exact: TrainConfig, run_ranks: RunRanks, tmp_path: Path
) -> None:
    run_ranks(2, train, exact)
    for count in (1, 3):
        out_dir = begin_at(H, exact.out_dir, tmp_path / f"{count}")
        run_ranks(count, train, replace(exact, out_dir=out_dir))
        assert values(out_dir, "step", "loss")[H] == pytest.approx(values(exact.out_dir, "step", "loss")[H], rel=1e-12)
        assert values(out_dir, "eval", "loss")[-1] != values(exact.out_dir, "eval", "loss")[-1]
    out_dir = begin_at(H + 1, exact.out_dir, tmp_path / "between")
    with pytest.raises((UsageError, RankError), match=r"has 2 replicas after 1 of 3 local steps, .* step 6"):
        run_ranks(3, train, replace(exact, out_dir=out_dir))


def test_replicas_send_a_gradient_once_in_their_local_steps(exact: TrainConfig, run_ranks: RunRanks) -> None:
    """Calls and bytes between replicas; each step all ranks also sum five numbers of eight bytes, and one a replica."""
    (local, numbers), (each, _) = (
        run_ranks(2, traffic_of, replace(exact, parallel=replace(exact.parallel, local_steps=steps)))[0]
        for steps in (H, 0)
    )
    assert local["outer", "all-reduce"].bytes == 2 * 8 * numbers
    assert local["outer", "all-reduce"].bytes * H == each["replicate", "all-reduce"].bytes
    assert local["all", "all-reduce"] == Volume(2 * H, 2 * H * 8 * (2 + 3))
    assert local.keys() == {("outer", "all-reduce"), ("all", "all-reduce")}


def traffic_of(config: TrainConfig) -> tuple[dict[tuple[str, str], Volume], int]:
    """What a run's steps send, and the numbers that its parameters have."""
    with Trainer(RunPlan.of(config), torch.device("cpu")) as trainer:
        trainer.load()
        trainer.start()
        counter = TrafficCounter(trainer.world)
        with counter:
            for step in range(1, config.optim.steps + 1):
                trainer.step(step)
        found = {("all" if axis == "default_pg" else axis, kind): n for (axis, kind), n in counter.traffic.items()}
        return found, trainer.parameters


@pytest.mark.parametrize(
    ("processes", "options", "said"),
    [
        (2, {"parallel": ParallelConfig(local_steps=4)}, "not divisible by parallel.local_steps 4: .* --optim.steps 8"),
        (2, {"parallel": ParallelConfig(local_steps=-1)}, "parallel.local_steps is -1"),
        (2, {"parallel": ParallelConfig(local_steps=H, zero=1)}, "zero 1 shards over all 2 .* --parallel.zero_group 1"),
        (4, {"parallel": ParallelConfig(local_steps=H, cp=2)}, "cp 2 without ZeRO .* --parallel.zero 1"),
        (2, {"parallel": ParallelConfig(local_steps=H, compression="int8")}, "compression int8 and parallel.local"),
        (2, {"optim": OptimConfig(steps=6, ema_decay=0.9)}, "ema_decay 0.9 and parallel.local_steps 3"),
        (2, {"memory": MemoryConfig("none", "cpu", "cpu"), "parallel": APART}, "memory.parameters cpu and"),
        (2, {"profile": ProfileConfig(norms=1)}, "profile.norms 1 and parallel.local_steps 3"),
        (2, {"parallel": ParallelConfig(), "optim": OptimConfig(steps=6, outer_lr=1.0)}, "outer_lr is 1.0, and"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(
    exact: TrainConfig, monkeypatch: pytest.MonkeyPatch, processes: int, options: dict[str, Any], said: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    with pytest.raises(UsageError, match=said):
        RunPlan.of(replace(exact, **options))


def test_a_run_of_local_steps_stays_one(exact: TrainConfig, run_ranks: RunRanks, tmp_path: Path) -> None:
    """Another number of local steps is another run; a synchronous run may branch into one, but not out of one."""
    run_ranks(2, train, exact)
    with pytest.raises((UsageError, RankError), match=r"parallel.local_steps .3 there, None now"):
        run_ranks(2, train, replace(exact, parallel=ParallelConfig()))
    longer = replace(exact.optim, steps=3 * H)
    branch = replace(exact, branch_from=exact.out_dir, out_dir=tmp_path / "branch", optim=longer)
    with pytest.raises((UsageError, RankError), match=r"replicas that take 3 local steps, .* --init_from"):
        run_ranks(2, train, replace(branch, parallel=ParallelConfig()))
    alone = replace(exact, out_dir=tmp_path / "alone", parallel=ParallelConfig())
    run_ranks(2, train, alone)
    run_ranks(2, train, replace(branch, branch_from=alone.out_dir))
    assert len(values(branch.out_dir, "step", "loss")) == H
