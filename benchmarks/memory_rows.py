"""Rows of bench_memory's table of formulas: live bytes of a layout by kind, measured in processes and estimated."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import gristmill_planner.memory
import training.parallel.data.grad_reducer
from benchmarks.live_bytes import LiveBytes
from gristmill_planner.hardware import Cluster, find_device
from gristmill_planner.memory import RankMemory
from gristmill_planner.planned_run import OptimizerStates, PlannedRun
from training.config import Precision
from training.experimental.local_steps.replicas import LocalReplicas
from training.experimental.parallel_config import ParallelConfig
from training.memory.memory_config import MemoryConfig, Recompute
from training.model.batch import TokenBatch
from training.model.decoder import Decoder, meta_decoder
from training.model.embedding import Head
from training.model.model_config import ModelConfig
from training.optim.build_optimizer import build_optimizer
from training.optim.optim_config import OptimConfig
from training.optim.optimizer import Optimizer
from training.parallel.gradients import scale_gradients, squared_grad_norm
from training.parallel.mesh import build_world
from training.parallel.parallel_model import ParallelModel
from training.parallel.parallelize import parallelize
from training.parallel.pipeline.stage_layers import stage_layers

_ONE = ParallelConfig()
_CPU = replace(find_device("a100-40gb"), element_bytes=4)
KINDS = (*RankMemory.KINDS, "peak")
_STEPS = 2  # measured: gloo's threads now and then hold for a moment what they have sent
Run = Callable[..., list[Any]]


@dataclass(frozen=True)
class Row:
    """What is measured: a model, resolved, and a layout that is not."""

    model: ModelConfig
    layout: ParallelConfig = _ONE
    precision: Precision = "fp32"
    recompute: Recompute = "none"
    processes: int = 1
    sequences: int = 8
    """Per step and replica."""
    bucket_bytes: int = 1 << 20
    optimizer: Literal["adamw", "muon"] = "adamw"
    ema: bool = False

    @property
    def resolved(self) -> ParallelConfig:
        return self.layout.resolve(self.processes, self.model, self.model.context)

    def estimate(self, rank: int) -> dict[str, int]:
        """Bytes by the formulas of a pipeline rank, by kind."""
        layout, model = self.resolved, self.model
        run = PlannedRun(
            model, layout, self.sequences * layout.dp, model.context, Cluster(_CPU, self.processes), self.recompute,
            stage_layers=tuple(map(len, stage_layers(model, layout.stages, model.context))),
            states=OptimizerStates(self.optimizer, self.ema), precision=self.precision,
        )  # fmt: skip
        with patch.object(gristmill_planner.memory, "BUCKET_BYTES", self.bucket_bytes):
            memory = RankMemory(run, rank)
            return {kind: getattr(memory, kind) for kind in KINDS}

    def __str__(self) -> str:
        layout = self.resolved
        words = [self.model.preset, self.precision, layout.describe().removeprefix("dp 1 x ")]
        words += [f"{layout.micro_batches} micro-batches"] * (layout.micro_batches > 1)
        words += [self.optimizer] * (self.optimizer != "adamw") + ["average"] * self.ema
        return ", ".join([*words, *[f"recompute {self.recompute}"] * (self.recompute != "none")])


def compare(row: Row, run: Run) -> dict[int, tuple[dict[str, int], dict[str, int]]]:
    """Estimated and measured bytes by kind, of the first and the last pipeline rank; `run` as RankPool's."""
    layout, measured = row.resolved, run(row.processes, live_bytes, row)
    each = row.processes // layout.pp
    return {rank: (row.estimate(rank), measured[rank * each]) for rank in sorted({0, layout.pp - 1})}


def live_bytes(row: Row) -> dict[str, int]:
    """Train some steps as one of the ranks: the peaks of this rank by kind."""
    # the process goes on to other jobs
    with patch.object(training.parallel.data.grad_reducer, "BUCKET_BYTES", row.bucket_bytes):
        world = build_world(row.resolved, torch.device("cpu"))
        memory = MemoryConfig(recompute=row.recompute)
        with LiveBytes({world.mesh.get_group(axis).group_name for axis in ("shard", "replicate")}) as live:
            model = parallelize(meta_decoder(row.model), row.resolved, world, 1, row.precision, memory)
            options = OptimConfig(name=row.optimizer, ema_decay=0.9 if row.ema else 0.0)
            optimizer = build_optimizer(model.params, options, memory, world.rank, holders=model.matrix_holders)
            states = [*optimizer.moments().values()]
            if steps := row.resolved.local_steps:
                outer = LocalReplicas(steps, options, model, optimizer).outer
                states += [outer.shared, outer.momenta]
            _watch(model, states, live)
            _step(row, model, optimizer, live)  # torch's pipelines run each stage once more in the first step
            found = []
            for _ in range(_STEPS):
                live.restart()
                _step(row, model, optimizer, live)
                found.append(live.peaks())
        return {kind: min(peaks.get(kind, 0) for peaks in found) for kind in found[0]}


def _watch(model: ParallelModel, states: Sequence[Mapping[str, Tensor]], live: LiveBytes) -> None:
    """Tell what is known by name, and when activations and logits are complete."""
    for part in model.parts:
        for p in part.parameters():
            if not isinstance(p, DTensor):
                live.tag(p, "weights")
                p.register_hook(lambda gradient: live.tag(gradient, "gradients"))
        _watch_part(part, live)
    for param in model.params:
        live.tag(param.local, "master")
    for moments in states:
        for values in moments.values():
            live.tag(values, "moments")


def _watch_part(part: Decoder, live: LiveBytes) -> None:
    part.register_forward_hook(lambda *_: live.mark())
    for block in part.blocks.values():
        if isinstance(block.forward, partial):  # recomputed
            block.forward = partial(block.forward.func, partial(_then_mark, live, block.forward.args[0]))
    if isinstance(part.head, Head):
        part.head.register_forward_pre_hook(lambda head, _: live.begin_loss(head.weight))
        part.head.register_forward_hook(lambda *_: live.end_loss())


def _then_mark(live: LiveBytes, forward: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return forward(*arguments)
    finally:  # recomputation ends by an exception
        live.mark()


def _step(row: Row, model: ParallelModel, optimizer: Optimizer, live: LiveBytes) -> None:
    """A step without an outer one, whose buffers the formulas do not count."""
    generator = torch.Generator().manual_seed(model.world.rank)  # tokens decide how many rows a rank's experts get
    tokens = torch.randint(row.model.vocab_size, (row.sequences, row.model.context + 1), generator=generator)
    batch = TokenBatch(tokens[:, :-1], tokens[:, 1:], torch.arange(row.sequences))
    model.forward_backward(batch, 1e-3)
    for param in model.params:
        if param.local.grad is not None:
            live.tag(param.local.grad, "gradients")
    model.world.all_reduce(squared_grad_norm(model.params, model.world.device))
    scale_gradients(model.params, 0.5)
    optimizer.step(1e-3)
    model.start_all_gather()
    optimizer.zero_grad()


def table_rows() -> list[Row]:
    """The rows of the documentation's table."""
    llama, gpt2 = small("llama"), small("gpt2")
    layouts = [(ParallelConfig(zero=zero, micro_batches=m), 2) for zero in (0, 1, 2, 3) for m in (1, 4)]
    schedules = ("1f1b", "gpipe", "interleaved-1f1b", "looped-bfs", "zero-bubble", "zbv", "dualpipev")
    layouts += [(ParallelConfig(pp=2, schedule=schedule, micro_batches=4), 2) for schedule in schedules]
    layouts += [(ParallelConfig(tp=2), 2), (ParallelConfig(tp=2, sequence_parallel=True), 2)]
    layouts += [
        (ParallelConfig(dp=2, zero=1, tp=2, pp=2, sequence_parallel=True), 8),
        (ParallelConfig(dp=2, zero=2, tp=2, pp=2, micro_batches=4), 8),
        (ParallelConfig(dp=2, zero=3, tp=2, pp=2, micro_batches=4), 8),
    ]
    layouts += [
        (ParallelConfig(tp=4, tensor="2d"), 4), (ParallelConfig(tp=8, tensor="2.5d", depth=2), 8),
        (ParallelConfig(tp=8, tensor="3d"), 8), (ParallelConfig(cp=2), 2), (ParallelConfig(cp=2, context="ulysses"), 2),
    ]  # fmt: skip
    precisions: tuple[Precision, ...] = ("fp32", "bf16")
    rows = [Row(llama, layout, precision, "none", size) for layout, size in layouts for precision in precisions]
    modes: tuple[Recompute, ...] = ("none", "selective", "full")
    rows += [Row(model, ParallelConfig(), p, mode) for model in (llama, gpt2) for p in precisions for mode in modes]
    more: list[tuple[ParallelConfig, Recompute]] = [
        (ParallelConfig(zero=3), "full"), (ParallelConfig(tp=2, sequence_parallel=True), "selective"),
        (ParallelConfig(pp=2, micro_batches=4), "full"),
        (ParallelConfig(pp=2, schedule="zero-bubble", micro_batches=4), "selective"),
    ]  # fmt: skip
    rows += [Row(model, layout, "bf16", mode, 2) for model in (llama, gpt2) for layout, mode in more]
    return [
        *rows,
        *(Row(llama, ParallelConfig(zero=zero), "bf16", "none", 2, optimizer="muon", ema=True) for zero in (0, 1, 3)),
        *sparse_rows(),
        *sink_rows(),
        Row(llama, ParallelConfig(), "fp16"),
        Row(llama, ParallelConfig(zero=2, micro_batches=4), "fp16", processes=2),
    ]


def sparse_rows() -> list[Row]:
    """Experts, expert parallelism and latent attention."""
    sizes = {"experts": 8, "experts_per_token": 2, "expert_width": 128}
    sparse, mixed = small("llama", **sizes), small("llama", **sizes, dense_layers=1, shared_experts=1)
    latent = ModelConfig(
        layers=4, width=128, heads=4, q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16
    ).resolve(2048, 128)  # fmt: skip
    modes: tuple[Recompute, ...] = ("none", "selective", "full")
    layouts = [(ParallelConfig(zero=zero, ep=2), size) for zero, size in ((0, 2), (1, 2), (3, 2), (1, 4), (3, 4))]
    layouts += [(ParallelConfig(tp=2), 2), (ParallelConfig(pp=2, micro_batches=4), 2)]
    return [
        *(Row(model, _ONE, "bf16", mode) for model in (sparse, mixed, latent) for mode in modes),
        *(Row(sparse, layout, "bf16", "none", size) for layout, size in layouts),
    ]


def sink_rows() -> list[Row]:
    """Attention with sinks, windows in every second layer, and experts with biases."""
    model = small(
        "gpt-oss-20b", vocab_size=2048, context=128, head_dim=32, window=32, ffn_width=96, experts=8,
        experts_per_token=2, expert_width=128,
    )  # fmt: skip
    modes: tuple[tuple[Precision, Recompute], ...] = (
        ("fp32", "none"), ("fp32", "full"), ("bf16", "none"), ("bf16", "full"),
    )  # fmt: skip
    return [
        *(Row(model, _ONE, precision, mode) for precision, mode in modes),
        Row(model, ParallelConfig(ep=2, zero=1), "bf16", processes=2),
        Row(model, ParallelConfig(tp=2), "bf16", processes=2),
    ]


def small(
    preset: str, layers: int = 4, width: int = 128, vocabulary: int = 2048, seq_len: int = 128, **options: Any
) -> ModelConfig:
    """A model of some megabytes; `options` are further fields of its configuration."""
    kv_heads = 2 if preset == "llama" else 4
    return ModelConfig(preset=preset, layers=layers, width=width, heads=4, kv_heads=kv_heads, **options).resolve(
        vocabulary, seq_len
    )


def worst_ratio(estimate: dict[str, int], measured: dict[str, int], leave_out: Sequence[str] = ()) -> float:
    """The largest ratio of a kind's estimate to what was measured, or the other way round."""
    pairs = [(estimate[kind], measured.get(kind, 0)) for kind in KINDS if kind not in leave_out]
    return max((max(a, b) / max(1, min(a, b)) for a, b in pairs if a or b), default=1.0)
