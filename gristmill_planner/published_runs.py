"""Published runs: what papers print of large training runs, and what is predicted, and shrunk to 8 processes."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from rich.table import Table

from gristmill.arguments import one_of
from gristmill.config import toml_lines
from gristmill.errors import UsageError
from gristmill_planner.compute_time import model_flops
from gristmill_planner.fitted_constants import Constants
from gristmill_planner.hardware import Cluster, find_device
from gristmill_planner.planned_run import (
    DEEPSPEED_ZERO_3,
    FAIRSCALE,
    MEGATRON,
    MEGATRON_DEEPSPEED,
    MINDSPORE,
    PlannedRun,
    Software,
)
from gristmill_planner.run_memory import run_memory
from gristmill_planner.step_time import step_time
from training.config import Precision
from training.experimental.parallel_config import ParallelConfig
from training.memory.memory_config import MemoryConfig, Recompute
from training.model.model_config import ModelConfig
from training.presets.presets import PRESETS

SEQ_LEN = 2048
"""Tokens of a sequence, in the runs of `published_runs`."""


@dataclass(frozen=True)
class PublishedRun:
    """A run with all layers computed again, and its printed speed, if any: TFLOP/s a GPU, or seconds a step."""

    name: str
    preset: str
    """The model's (training/presets); several runs may have one."""
    run: PlannedRun
    tflops: float | None = None
    seconds: float | None = None
    source: str = ""
    note: str = ""

    @property
    def measured(self) -> float | None:
        """Return the seconds of a step; TFLOP/s count what is computed again (Narayanan et al. 2021, equation 3)."""
        if self.tflops is None:
            return self.seconds
        flops = model_flops(self.run.model, self.run.batch, self.run.seq_len, self.run.recompute)
        return flops / (self.run.cluster.devices * self.tflops * 1e12)


def published_runs() -> list[PublishedRun]:
    """Return the runs that have names; docs/reference/planner-accuracy.md says where each is from."""
    return [*_narayanan_table_1(), *_others()]


def is_published(name: str) -> bool:
    """Return whether it is the name of a published run."""
    return any(published.preset == name.lower() for published in published_runs())


def find_published_run(name: str, devices: int | None = None) -> PublishedRun:
    """Return the published run of a preset: of several the one on `devices` devices, or the first.

    Raises UsageError for an unknown name.
    """
    runs = [published for published in published_runs() if published.preset == name.lower()]
    if not runs:
        names = [name for name, preset in PRESETS.items() if preset.parameters]  # each run is of one of them
        raise UsageError(f"{name} is neither a file nor a published model; {one_of(name, names)}")
    for published in runs:
        if published.run.cluster.devices == devices:
            return published
    return runs[0]


def _narayanan_table_1() -> list[PublishedRun]:
    """Return those of Narayanan et al. 2021, table 1, with virtual stages as in section 5.1.

    On Selene: A100-80GB, and eight cards of 200 Gb/s a node.
    """
    rows = [  # billions, tp, pp and stages a rank, GPUs, batch, micro-batch, TFLOP/s
        ("1.7", (1, 1, 1), 32, 512, 16, 137),
        ("3.6", (2, 1, 1), 64, 512, 16, 138),
        ("7.5", (4, 1, 1), 128, 512, 16, 142),
        ("18.4", (8, 1, 1), 256, 1024, 8, 135),
        ("39.1", (8, 2, 1), 512, 1536, 4, 138),
        ("76.1", (8, 4, 3), 1024, 1792, 2, 140),
        ("145.6", (8, 8, 2), 1536, 2304, 2, 148),
        ("310.1", (8, 16, 2), 1920, 2160, 1, 155),
        ("529.6", (8, 35, 3), 2520, 2520, 1, 163),
        ("1008", (8, 64, 1), 3072, 3072, 1, 163),
    ]
    source = "Narayanan et al. 2021, table 1"
    runs = []
    for size, shape, gpus, batch, micro, tflops in rows:
        preset = f"megatron-{size}b"
        cluster = f"{gpus} a100-80gb"
        run = _published(f"Megatron {size}B", preset, cluster, shape, batch, micro, MEGATRON, source, tflops=tflops)
        runs.append(run)
    return runs


def _others() -> list[PublishedRun]:
    deepspeed = MEGATRON_DEEPSPEED
    turing = []
    for dp, seconds in ((8, 60.1), (10, 50.2), (12, 44.4)):
        turing.append(
            _published(f"MT-NLG-530B, dp {dp}", "mt-nlg-530b", f"{280 * dp} a100-80gb", (8, 35, 1), 1920, 1, deepspeed,
                       "Smith et al. 2022, section 2.3", seconds=seconds)
        )  # fmt: skip
    return [
        _published("BLOOM-176B", "bloom-176b", "384 a100-80gb", (4, 12, 1), 2048, 2, deepspeed,
                   "BigScience, log of the run", seconds=104.7, network=50e9, ends=1, precision="bf16"),
        _published("GLM-130B", "glm-130b", "768 a100-40gb", (4, 8, 1), 4224, 1, deepspeed,
                   "Zeng et al. 2022, section 2.3", "micro-batch not published, taken as 1", seconds=88.5, ends=1),
        _published("GPT-NeoX-20B", "gpt-neox-20b", "96 a100-40gb", (2, 4, 1), 1536, 4, deepspeed,
                   "Black et al. 2022, section 3", tflops=117, network=100e9),
        _published("OPT-175B", "opt-175b", "992 a100-80gb", (8, 1, 1), 992, 8, FAIRSCALE,
                   "Zhang et al. 2022, section 2.4", "up to", tflops=147),
        *turing,
        _published("CodeGeeX-13B", "codegeex-13b", "1536 ascend-910", (8, 1, 1), 3072, 16, MINDSPORE,
                   "Zheng et al. 2023, section 2.3", "no speed published; recomputation taken from its memory"),
    ]  # fmt: skip


def sparse_runs() -> list[PublishedRun]:
    """Return Megatron-Core's Qwen3-235B-A22B on 256 H100s, as this trainer would lay it out.

    There experts' ranks are of data and tensor parallelism together, and tokens are sent once to each node; here ep is
    of data parallelism alone, tensor parallelism divides each expert, and each of its ranks sends all tokens.
    """
    # tp, pp, stages a rank, their ep and ours, micro-batch, ZeRO, recomputation, seconds
    rows: list[tuple[int, int, int, int, int, int, Literal[1, 3], Recompute, float]] = [
        (2, 32, 3, 8, 4, 1, 1, "selective", 24.2), (2, 8, 4, 32, 16, 1, 1, "selective", 19.7),
        (4, 8, 4, 8, 8, 1, 1, "none", 29.0), (2, 1, 1, 8, 8, 4, 3, "full", 17.6),
    ]  # fmt: skip
    seq_len = 4096
    batch = 2048
    gpus = 256
    runs = []
    model = ModelConfig(
        preset="qwen3-30b-a3b", layers=94, width=4096, heads=64, ffn_width=12_288, expert_width=1536
    ).resolve(1, seq_len)
    for tp, pp, virtual, theirs, ep, micro, zero, recompute, seconds in rows:
        dp = gpus // (tp * pp)
        layout = ParallelConfig(
            dp=dp, tp=tp, pp=pp, ep=ep, sequence_parallel=True, zero=zero, zero_group=dp, virtual_stages=virtual,
            schedule="interleaved-1f1b" if virtual > 1 else "1f1b", micro_batches=batch // (dp * micro),
        )  # fmt: skip
        run = PlannedRun(model, layout, batch, seq_len, Cluster(find_device("h100"), gpus), recompute)
        name = f"Qwen3-235B, ep {theirs} there"
        runs.append(PublishedRun(name, "", run, None, seconds, "Megatron-MoE-ModelZoo, Qwen3"))
    return runs


def torchtitan_runs() -> list[PublishedRun]:
    """Return Llama 3.1 8B by torchtitan on 8 and 128 H100s, in bf16, by FSDP and with selective recomputation.

    Two sequences a GPU. The cards have 96 GB of HBM2e at 2.4 TB/s and a limit of 500 W; what they compute at most there
    is not published, so that the rate at 700 W is taken. The trainer planned is this one.
    """
    seq_len = 8192
    batch = 2  # a GPU
    device = replace(find_device("h100"), name="h100-96gb", memory=96e9, bandwidth=2.4e12, watts=500)
    model = ModelConfig(preset="llama-3.1-8b").resolve(1, seq_len)
    runs = []
    for gpus, eager, compiled in ((8, 5762, 6667), (128, 5605, 6514)):
        layout = ParallelConfig(dp=gpus, zero=3, zero_group=gpus, virtual_stages=1, micro_batches=1)
        cluster = Cluster(device, gpus)
        for is_compiled, tokens_a_second in ((False, eager), (True, compiled)):
            run = PlannedRun(model, layout, batch * gpus, seq_len, cluster, "selective", compiled=is_compiled)
            name = f"torchtitan, Llama 3.1 8B, {gpus} GPUs"
            if is_compiled:
                name += ", compiled"
            source = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
            seconds = batch * seq_len / tokens_a_second
            runs.append(PublishedRun(name, "", run, None, seconds, source, "cards limited to 500 W"))
    return runs


def narayanan_table_2() -> list[PublishedRun]:
    """Return those of Narayanan et al. 2021, table 2: ZeRO-3 alone against tensor, pipeline and data parallelism.

    Whether its pipelines are interleaved is not printed; they are taken not to be. 174.6B is GPT-3: 96 layers of
    12,288, of 96 heads.
    """
    rows = [  # billions, tensor- and pipeline-parallel ranks, GPUs, batch, micro-batch, TFLOP/s
        (174.6, (1, 1), 384, 1536, 4, 144),
        (174.6, (1, 1), 768, 1536, 2, 88),
        (174.6, (1, 1), 1536, 1536, 1, 44),
        (529.6, (1, 1), 640, 2560, 4, 138),
        (529.6, (1, 1), 1120, 2240, 2, 98),
        (529.6, (1, 1), 2240, 2240, 1, 48),
        (174.6, (8, 12), 384, 1536, 1, 153),
        (174.6, (8, 12), 768, 1536, 1, 149),
        (174.6, (8, 12), 1536, 1536, 1, 141),
        (529.6, (8, 35), 560, 2240, 1, 171),
        (529.6, (8, 35), 1120, 2240, 1, 167),
        (529.6, (8, 35), 2240, 2240, 1, 159),
    ]
    runs = []
    for size, (tp, pp), gpus, batch, micro, tflops in rows:
        name = "ZeRO-3"
        software = DEEPSPEED_ZERO_3
        if pp > 1:
            name = "3D"
            software = MEGATRON
        preset = "megatron-529.6b"
        layers = 0
        if size < 500:
            preset = "megatron-145.6b"
            layers = 96
        runs.append(_published(f"{size}B, {name}, {gpus} GPUs", preset, f"{gpus} a100-80gb", (tp, pp, 1), batch, micro,
                               software, "Narayanan et al. 2021, table 2", tflops=tflops, layers=layers))  # fmt: skip
    return runs


def _published(
    name: str, preset: str, cluster: str, shape: tuple[int, int, int], batch: int, micro: int, software: Software,
    source: str, note: str = "", *, tflops: float | None = None, seconds: float | None = None, network: float = 0.0,
    ends: int = 0, precision: Precision = "fp16", layers: int = 0,
) -> PublishedRun:  # fmt: skip
    """Return a run of a preset; `cluster`: such as "384 a100-80gb".

    `shape`: tensor- and pipeline-parallel ranks, and stages of each. `network`: bytes/s of a node, 0: the usual ones.
    `ends`: layers that each end counts as. `layers`: of the model, 0: the preset's.
    """
    count, device = cluster.split()
    tp, pp, virtual = shape
    model = ModelConfig(preset=preset, layers=layers).resolve(1, SEQ_LEN)
    dp = int(count) // (tp * pp)
    zero = max(software.zero)
    layout = ParallelConfig(
        dp=dp, tp=tp, pp=pp, schedule="interleaved-1f1b" if virtual > 1 else "1f1b", virtual_stages=virtual,
        micro_batches=batch // (dp * micro), zero=zero, zero_group=dp if zero else 1,
    )  # fmt: skip
    gpus = Cluster(find_device(device), int(count))
    if network:
        gpus = gpus.with_network(network)
    stages = divided_layers(model.layers, pp * virtual, ends)
    run = PlannedRun(model, layout, batch, SEQ_LEN, gpus, "full", software, stages, precision=precision)
    return PublishedRun(name, preset, run, tflops, seconds, source, note)


def divided_layers(layers: int, stages: int, ends: int = 0) -> tuple[int, ...]:
    """Return the layers of each stage, as even as they get; an end of the model counts as `ends` layers."""
    each, left = divmod(layers + 2 * ends, stages)
    counts = [each + (stage < left) for stage in range(stages)]
    counts[0] -= ends
    counts[-1] -= ends
    return tuple(counts)


def comparison_table(constants: Constants) -> Table:
    """Return predicted and published seconds a step and TFLOP/s, and predicted memory, of every published run."""
    columns = "run", "layout", "GPUs", "published s", "predicted s", "TFLOP/s", "error", "GiB", "source"
    table = Table(*columns, box=None, pad_edge=False)
    for published in [*published_runs(), *narayanan_table_2(), *torchtitan_runs(), *sparse_runs()]:
        table.add_row(*_compared(published, constants))
    return table


def _compared(published: PublishedRun, constants: Constants) -> list[str]:
    """Return a row of `comparison_table`."""
    run = published.run
    measured = published.measured
    predicted = step_time(run, constants).total
    rate = model_flops(run.model, run.batch, run.seq_len, run.recompute) / run.cluster.devices / predicted / 1e12
    memory = run_memory(run).total / (1 << 30)
    seconds = ""
    error = ""
    if measured is not None:
        seconds = f"{measured:.2f}"
        error = f"{100 * (predicted / measured - 1):+.1f} %"
    source = published.source
    if published.note:
        source += f"; {published.note}"
    return [
        published.name,
        run.layout.describe(),
        str(run.cluster.devices),
        seconds,
        f"{predicted:.2f}",
        f"{rate:.0f}",
        error,
        f"{memory:.0f} of {run.cluster.device.memory / (1 << 30):.0f}",
        source,
    ]


PROCESSES = 8
_HEAD_DIM = 8
_VOCABULARY = 1024
_SEQ_LEN = 64
_STEPS = 20


def shrunk_config(published: PublishedRun) -> str:
    """Return a configuration of training in TOML, of 20 steps, without data.train, data.holdout and out_dir."""
    layout = shrunk_layout(published.run.layout)
    filled_in = ParallelConfig(zero_group=layout.zero_group, virtual_stages=1)  # by training
    sequences = min(2, published.run.micro_batch)
    sections: dict[str, dict[str, Any]] = {
        "model": _model(published, layout),
        "data": {"seq_len": _SEQ_LEN, "batch_size": layout.dp * layout.micro_batches * sequences},
        "optim": {"steps": _STEPS, "warmup_steps": 2},
        "parallel": changed(layout, filled_in),
        "memory": changed(MemoryConfig(published.run.recompute), MemoryConfig()),
        "eval": {"sequences": 16, "sample_tokens": 0},
    }
    return "\n".join([
        f"# {published.name}, shrunk: {layout.describe()} instead of {published.run.layout.describe()}",
        f"# torchrun --nproc_per_node={PROCESSES} -m gristmill_cli.train --config THIS_FILE --data.train TOKENS/train "
        "--data.holdout TOKENS/holdout --out_dir RUN",
        'device = "cpu"',
        *toml_lines(sections),
    ])  # fmt: skip


def shrunk_layout(layout: ParallelConfig) -> ParallelConfig:
    """Return the layout's shape with 8 ranks: each degree above 1 becomes 2, and what is left goes to the largest."""
    degrees = {name: getattr(layout, name) for name in ("dp", "tp", "pp")}
    small = {name: min(degree, 2) for name, degree in degrees.items()}
    while small["dp"] * small["tp"] * small["pp"] < PROCESSES:
        small[max(small, key=lambda name: degrees[name] / small[name])] *= 2
    max_micro_batches = 2 * small["pp"] if small["pp"] > 1 else 2
    return ParallelConfig(
        **small,
        zero=layout.zero,
        zero_group=small["dp"] if layout.zero else 1,
        sequence_parallel=layout.sequence_parallel,
        schedule=layout.schedule,
        virtual_stages=layout.virtual_stages,
        micro_batches=min(layout.micro_batches, max_micro_batches),
    )


def _model(published: PublishedRun, layout: ParallelConfig) -> dict[str, Any]:
    """Return sizes next to the preset's parts: heads as odd as the published ones, an MLP as wide in proportion."""
    model = published.run.model
    tp = layout.mesh_shape[-1]
    heads = _shrunk_heads(model, tp)
    width = heads * _HEAD_DIM
    unit = 8 * tp
    layers_a_stage = 1 if layout.virtual_stages > 1 else 2
    return {
        "preset": published.preset,
        "layers": max(4, layout.stages * layers_a_stage),
        "width": width,
        "heads": heads,
        "ffn_width": -(-width * model.ffn_width // (model.width * unit)) * unit,
        "vocab_size": _VOCABULARY,
        "context": _SEQ_LEN,
    }


def _shrunk_heads(model: ModelConfig, tp: int) -> int:
    """Return the heads, halved while 4 or more are left, which tp divides: BLOOM's 112 become 14."""
    heads = model.heads
    while heads % (2 * tp) == 0 and heads >= 8:
        heads //= 2
    return heads


def changed(options: Any, defaults: Any) -> dict[str, Any]:
    """Return the fields that are not at their defaults."""
    return {key: value for key, value in vars(options).items() if value != getattr(defaults, key)}
