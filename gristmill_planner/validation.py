"""Validation: published runs, and a published comparison of ZeRO-3 with other layouts, beside what is predicted."""

from dataclasses import replace

from rich.table import Table

from gristmill_planner.cost.fitted_constants import Constants
from gristmill_planner.cost.hardware import Cluster, find_device
from gristmill_planner.cost.layer_work import model_flops
from gristmill_planner.cost.planned_run import DEEPSPEED_ZERO_3, MEGATRON, PlannedRun
from gristmill_planner.cost.step_time import step_time
from gristmill_planner.published_runs import SEQ_LEN, PublishedRun, divided_layers, published_runs, recomputed_run
from gristmill_planner.run_memory import megatron_memory
from training.model.model_config import ModelConfig

_SOURCE = "Narayanan et al. 2021, table 2"


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
    for each in [*published_runs(), *narayanan_table_2()]:
        run, measured, predicted = each.run, each.measured, step_time(each.run, constants).total
        rate = model_flops(run.model, run.batch, run.seq_len, run.recompute) / run.cluster.devices / predicted / 1e12
        memory = megatron_memory(run, each.bf16).total / (1 << 30)
        table.add_row(
            each.name,
            run.layout.describe(),
            str(run.cluster.devices),
            f"{measured:.2f}" if measured else "",
            f"{predicted:.2f}",
            f"{rate:.0f}",
            f"{100 * (predicted / measured - 1):+.1f} %" if measured else "",
            f"{memory:.0f} of {run.cluster.device.memory / (1 << 30):.0f}",
            each.source + (f"; {each.note}" if each.note else ""),
        )
    return table


def narayanan_table_2() -> list[PublishedRun]:
    """Narayanan et al. 2021, table 2: ZeRO-3 alone beside tensor, pipeline and data parallelism, on Selene.

    Whether its pipelines are interleaved is not printed; they are taken not to be.
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
    found = []
    for size, (tp, pp), gpus, batch, micro, tflops in rows:
        software = MEGATRON if pp > 1 else DEEPSPEED_ZERO_3
        preset, cluster = "megatron-529.6b", Cluster(find_device("a100-80gb"), gpus)
        run = recomputed_run(preset, cluster, (tp, pp, 1), batch, micro, software)
        run = run if size > 500 else _as_gpt_3(run)
        name = f"{size}B, {'3D' if pp > 1 else 'ZeRO-3'}, {gpus} GPUs"
        found.append(PublishedRun(name, preset, run, tflops, source=_SOURCE))
    return found


def _as_gpt_3(run: PlannedRun) -> PlannedRun:
    """With GPT-3's 96 layers of 12,288, of 96 heads."""
    model = ModelConfig(preset="megatron-145.6b", layers=96).resolve(1, SEQ_LEN)
    return replace(run, model=model, stage_layers=divided_layers(96, run.layout.pp))
