"""Published runs: what papers and logs print of large training runs, to compare the planner with."""

import difflib
from dataclasses import dataclass
from typing import Any

from gristmill.errors import UsageError
from gristmill_planner.cost.hardware import Cluster, find_device
from gristmill_planner.cost.layer_work import model_flops
from gristmill_planner.cost.planned_run import FAIRSCALE, MEGATRON, MEGATRON_DEEPSPEED, MINDSPORE, PlannedRun, Software
from training.experimental.parallel_config import ParallelConfig
from training.model.model_config import ModelConfig

SEQ_LEN = 2048
"""Tokens of a sequence, of all of them."""


@dataclass(frozen=True)
class PublishedRun:
    """A run with all layers computed again, and its printed speed, if any: TFLOP/s a GPU, or seconds a step."""

    name: str
    preset: str
    """Of the model (training/presets); several runs may have one."""
    run: PlannedRun
    tflops: float | None = None
    seconds: float | None = None
    source: str = ""
    note: str = ""
    bf16: bool = False

    @property
    def measured(self) -> float | None:
        """Seconds of a step; TFLOP/s count what is computed again (Narayanan et al. 2021, equation 3)."""
        if self.tflops is None:
            return self.seconds
        flops = model_flops(self.run.model, self.run.batch, self.run.seq_len, self.run.recompute)
        return flops / (self.run.cluster.devices * self.tflops * 1e12)


def published_runs() -> list[PublishedRun]:
    """All of them; docs/planner.md tells where each is from."""
    return [*_narayanan_table_1(), *_others()]


def find_published_run(name: str, devices: int | None = None) -> PublishedRun:
    """The published run of a preset: of several the one on `devices` devices, or the first.

    Raises UsageError for an unknown name.
    """
    runs = [each for each in published_runs() if each.preset == name.lower()]
    if not runs:
        names = dict.fromkeys(each.preset for each in published_runs())
        nearest = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.3)
        advice = f"did you mean {nearest[0]}? There are" if nearest else "there are"
        raise UsageError(f"{name} is neither a file nor a published run; {advice} {', '.join(names)}")
    return next((each for each in runs if each.run.cluster.devices == devices), runs[0])


def _narayanan_table_1() -> list[PublishedRun]:
    """Narayanan et al. 2021, table 1: Selene, A100-80GB, eight cards of 200 Gb/s a node; virtual stages as in 5.1."""
    rows = [  # preset, tp, pp, stages a rank, GPUs, batch, micro-batch, TFLOP/s
        ("1.7B", (1, 1, 1), 32, 512, 16, 137),
        ("3.6B", (2, 1, 1), 64, 512, 16, 138),
        ("7.5B", (4, 1, 1), 128, 512, 16, 142),
        ("18.4B", (8, 1, 1), 256, 1024, 8, 135),
        ("39.1B", (8, 2, 1), 512, 1536, 4, 138),
        ("76.1B", (8, 4, 3), 1024, 1792, 2, 140),
        ("145.6B", (8, 8, 2), 1536, 2304, 2, 148),
        ("310.1B", (8, 16, 2), 1920, 2160, 1, 155),
        ("529.6B", (8, 35, 3), 2520, 2520, 1, 163),
        ("1008B", (8, 64, 1), 3072, 3072, 1, 163),
    ]
    found = []
    for size, shape, gpus, batch, micro, tflops in rows:
        preset, cluster = f"megatron-{size.lower()}", Cluster(find_device("a100-80gb"), gpus)
        run = recomputed_run(preset, cluster, shape, batch, micro, MEGATRON)
        found.append(PublishedRun(f"Megatron {size}", preset, run, tflops, source="Narayanan et al. 2021, table 1"))
    return found


def _others() -> list[PublishedRun]:
    large, small = find_device("a100-80gb"), find_device("a100-40gb")
    bloom, neox = Cluster(large, 384).with_network(50e9), Cluster(small, 96).with_network(100e9)
    found = [
        PublishedRun(
            "BLOOM-176B",
            "bloom-176b",
            recomputed_run("bloom-176b", bloom, (4, 12, 1), 2048, 2, MEGATRON_DEEPSPEED, ends=1),
            seconds=104.7,
            source="BigScience, log of the run",
            bf16=True,
        ),
        PublishedRun(
            "GLM-130B",
            "glm-130b",
            recomputed_run("glm-130b", Cluster(small, 768), (4, 8, 1), 4224, 1, MEGATRON_DEEPSPEED, ends=1),
            seconds=88.5,
            source="Zeng et al. 2022, section 2.3",
            note="micro-batch not published, taken as 1",
        ),
        PublishedRun(
            "GPT-NeoX-20B",
            "gpt-neox-20b",
            recomputed_run("gpt-neox-20b", neox, (2, 4, 1), 1536, 4, MEGATRON_DEEPSPEED),
            tflops=117,
            source="Black et al. 2022, section 3",
        ),
    ]
    opt = recomputed_run("opt-175b", Cluster(large, 992), (8, 1, 1), 992, 8, FAIRSCALE)
    found.append(PublishedRun("OPT-175B", "opt-175b", opt, 147, source="Zhang et al. 2022, section 2.4", note="up to"))
    for dp, seconds in ((8, 60.1), (10, 50.2), (12, 44.4)):
        nlg = recomputed_run("mt-nlg-530b", Cluster(large, 280 * dp), (8, 35, 1), 1920, 1, MEGATRON_DEEPSPEED)
        source = "Smith et al. 2022, section 2.3"
        found.append(PublishedRun(f"MT-NLG-530B, dp {dp}", "mt-nlg-530b", nlg, seconds=seconds, source=source))
    geex = recomputed_run("codegeex-13b", Cluster(find_device("ascend-910"), 1536), (8, 1, 1), 3072, 16, MINDSPORE)
    source, note = "Zheng et al. 2023, section 2.3", "no speed published; recomputation taken from its memory"
    found.append(PublishedRun("CodeGeeX-13B", "codegeex-13b", geex, source=source, note=note))
    return found


def recomputed_run(
    preset: str,
    cluster: Cluster,
    shape: tuple[int, int, int],
    batch: int,
    micro: int,
    software: Software,
    ends: int = 0,
) -> PlannedRun:
    """The run of a preset with all layers computed again.

    `shape`: tensor- and pipeline-parallel ranks, and stages of each. `ends`: layers that each end counts as.
    """
    tp, pp, virtual = shape
    model = ModelConfig(preset=preset).resolve(1, SEQ_LEN)
    dp, zero = cluster.devices // (tp * pp), max(software.zero)
    schedule: Any = "interleaved-1f1b" if virtual > 1 else "1f1b"
    layout = ParallelConfig(
        dp=dp, tp=tp, pp=pp, schedule=schedule, virtual_stages=virtual, micro_batches=batch // (dp * micro),
        zero=zero, zero_group=dp if zero else 1,
    )  # fmt: skip
    layers = divided_layers(model.layers, pp * virtual, ends)
    return PlannedRun(model, layout, batch, SEQ_LEN, cluster, "full", software, layers)


def divided_layers(layers: int, stages: int, ends: int = 0) -> tuple[int, ...]:
    """Layers of each stage, as even as they get; an end of the model counts as `ends` layers."""
    each, left = divmod(layers + 2 * ends, stages)
    counts = [each + (stage < left) for stage in range(stages)]
    counts[0] -= ends
    counts[-1] -= ends
    return tuple(counts)
