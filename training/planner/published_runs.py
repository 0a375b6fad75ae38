"""Published runs: what papers and logs print of large training runs, to compare the planner with."""

from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table

from training.distributed.layout import ParallelConfig
from training.model.model_config import ModelConfig
from training.planner.cost.fitted_constants import Constants
from training.planner.cost.hardware import Cluster, find_device
from training.planner.cost.layer_work import model_flops
from training.planner.cost.megatron_memory import megatron_memory
from training.planner.cost.planned_run import FAIRSCALE, MEGATRON, MEGATRON_DEEPSPEED, PlannedRun, Software
from training.planner.cost.step_time import step_time


@dataclass(frozen=True)
class PublishedRun:
    """A run with all layers computed again, and its printed speed: TFLOP/s a GPU, or seconds a step."""

    name: str
    run: PlannedRun
    tflops: float | None = None
    seconds: float | None = None
    source: str = ""
    note: str = ""
    bf16: bool = False

    @property
    def measured(self) -> float:
        """Seconds of a step; TFLOP/s count what is computed again (Narayanan et al. 2021, equation 3)."""
        if self.seconds is not None:
            return self.seconds
        assert self.tflops is not None
        flops = model_flops(self.run.model, self.run.batch, self.run.seq_len, self.run.recompute)
        return flops / (self.run.cluster.devices * self.tflops * 1e12)


def published_runs() -> list[PublishedRun]:
    """All of them; docs/planner.md tells where each is from."""
    return [*_narayanan_table_1(), *_others()]


def comparison_table(constants: Constants) -> Table:
    """Predicted and published seconds a step and TFLOP/s, and predicted memory, of every published run."""
    table = Table(
        "run",
        "layout",
        "GPUs",
        "published s",
        "predicted s",
        "TFLOP/s",
        "error",
        "GiB",
        "source",
        box=None,
        pad_edge=False,
    )
    for each in published_runs():
        run, predicted = each.run, step_time(each.run, constants).total
        rate = model_flops(run.model, run.batch, run.seq_len, run.recompute) / run.cluster.devices / predicted / 1e12
        memory = megatron_memory(run, each.bf16).total / (1 << 30)
        table.add_row(
            each.name,
            run.layout.describe(),
            str(run.cluster.devices),
            f"{each.measured:.2f}",
            f"{predicted:.2f}",
            f"{rate:.0f}",
            f"{100 * (predicted / each.measured - 1):+.1f} %",
            f"{memory:.0f} of {run.cluster.device.memory / (1 << 30):.0f}",
            each.source + (f"; {each.note}" if each.note else ""),
        )
    return table


def _narayanan_table_1() -> list[PublishedRun]:
    """Narayanan et al. 2021, table 1: Selene, A100-80GB, eight cards of 200 Gb/s a node; virtual stages as in 5.1."""
    rows = [  # billions, width, layers, heads, tp, pp, GPUs, batch, micro-batch, stages a rank, TFLOP/s
        (1.7, 2304, 24, 24, 1, 1, 32, 512, 16, 1, 137),
        (3.6, 3072, 30, 32, 2, 1, 64, 512, 16, 1, 138),
        (7.5, 4096, 36, 32, 4, 1, 128, 512, 16, 1, 142),
        (18.4, 6144, 40, 48, 8, 1, 256, 1024, 8, 1, 135),
        (39.1, 8192, 48, 64, 8, 2, 512, 1536, 4, 1, 138),
        (76.1, 10240, 60, 80, 8, 4, 1024, 1792, 2, 3, 140),
        (145.6, 12288, 80, 96, 8, 8, 1536, 2304, 2, 2, 148),
        (310.1, 16384, 96, 128, 8, 16, 1920, 2160, 1, 2, 155),
        (529.6, 20480, 105, 128, 8, 35, 2520, 2520, 1, 3, 163),
        (1008.0, 25600, 128, 160, 8, 64, 3072, 3072, 1, 1, 163),
    ]
    found = []
    for size, width, layers, heads, tp, pp, gpus, batch, micro, virtual, tflops in rows:
        model = _gpt(width, layers, heads, 51_200)
        cluster = Cluster(find_device("a100-80gb"), gpus)
        run = _run(model, cluster, (tp, pp, virtual), batch, micro, MEGATRON)
        found.append(PublishedRun(f"Megatron {size:g}B", run, tflops, source="Narayanan et al. 2021, table 1"))
    return found


def _others() -> list[PublishedRun]:
    large, small = find_device("a100-80gb"), find_device("a100-40gb")
    bloom = _gpt(14_336, 70, 112, 250_880)
    glm = _gpt(12_288, 70, 96, 150_528, ffn_width=32_768, mlp="swiglu", positions="rope")
    nlg = _gpt(20_480, 105, 128, 51_200)
    neox = _gpt(6144, 44, 64, 50_432, positions="rope", tied=False)
    found = [
        PublishedRun(
            "BLOOM-176B",
            _run(bloom, Cluster(large, 384).with_network(50e9), (4, 12, 1), 2048, 2, MEGATRON_DEEPSPEED, ends=1),
            seconds=104.7,
            source="BigScience, log of the run",
            bf16=True,
        ),
        PublishedRun(
            "GLM-130B",
            _run(glm, Cluster(small, 768), (4, 8, 1), 4224, 1, MEGATRON_DEEPSPEED, ends=1),
            seconds=88.5,
            source="Zeng et al. 2022, section 2.3",
            note="micro-batch not published, taken as 1",
        ),
        PublishedRun(
            "GPT-NeoX-20B",
            _run(neox, Cluster(small, 96).with_network(100e9), (2, 4, 1), 1536, 4, MEGATRON_DEEPSPEED),
            tflops=117,
            source="Black et al. 2022, section 3",
        ),
    ]
    opt = _run(_gpt(12_288, 96, 96, 50_272), Cluster(large, 992), (8, 1, 1), 992, 8, FAIRSCALE)
    opt = replace(opt, layout=replace(opt.layout, zero=3, zero_group=124))
    found.append(PublishedRun("OPT-175B", opt, 147, source="Zhang et al. 2022, section 2.4", note="up to"))
    for dp, seconds in ((8, 60.1), (10, 50.2), (12, 44.4)):
        run = _run(nlg, Cluster(large, 280 * dp), (8, 35, 1), 1920, 1, MEGATRON_DEEPSPEED)

        source = "Smith et al. 2022, section 2.3"
        found.append(PublishedRun(f"MT-NLG-530B, dp {dp}", run, seconds=seconds, source=source))
    return found


def _gpt(width: int, layers: int, heads: int, vocabulary: int, **parts: Any) -> ModelConfig:
    model = ModelConfig(preset="gpt2", layers=layers, width=width, heads=heads, context=2048, **parts)
    return model.resolve(vocabulary, 2048)


def _run(
    model: ModelConfig,
    cluster: Cluster,
    shape: tuple[int, int, int],
    batch: int,
    micro: int,
    software: Software,
    ends: int = 0,
) -> PlannedRun:
    """`shape`: tensor- and pipeline-parallel ranks, and stages of each. `ends`: layers that each end counts as."""
    tp, pp, virtual = shape
    dp = cluster.devices // (tp * pp)
    count = batch // (dp * micro)
    schedule: Any = "interleaved-1f1b" if virtual > 1 else "1f1b"
    layout = ParallelConfig(
        dp=dp, tp=tp, pp=pp, schedule=schedule, virtual_stages=virtual, micro_batches=count,
        zero=1 if software.deepspeed else 0, zero_group=dp if software.deepspeed else 1,
    )  # fmt: skip
    layers = divided_layers(model.layers, pp * virtual, ends)
    return PlannedRun(model, layout, count * dp * micro, 2048, cluster, "full", software, layers)


def divided_layers(layers: int, stages: int, ends: int = 0) -> tuple[int, ...]:
    """Layers of each stage, as even as they get; an end of the model counts as `ends` layers."""
    each, left = divmod(layers + 2 * ends, stages)
    counts = [each + (stage < left) for stage in range(stages)]
    counts[0] -= ends
    counts[-1] -= ends
    return tuple(counts)
