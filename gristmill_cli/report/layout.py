"""The sections of a report on how training runs were divided: peak memory beside its formula, a pipeline's passes."""

from collections.abc import Sequence
from dataclasses import replace

from gristmill.errors import GristmillError
from gristmill_cli.report.page import Number, figure, said, section, table
from gristmill_cli.report.pictures import draw_passes
from gristmill_cli.report.training_records import TrainingRun
from gristmill_planner.hardware import Cluster, find_device
from gristmill_planner.memory import RankMemory
from gristmill_planner.planned_run import OptimizerStates, PlannedRun
from gristmill_planner.timeline import describe, read_timeline
from training.experimental.parallel_config import ParallelConfig
from training.model.model_config import ModelConfig
from training.parallel.pipeline.stage_layers import stage_layers
from training.profiling.profile_config import FOLDER
from training.reporting.metrics_file import finite

_MIB = 2**20
_GPU = find_device("a100-80gb")  # memory depends on no other property than that it is a GPU
_CPU = replace(_GPU, element_bytes=4)


def show_memory(runs: Sequence[TrainingRun]) -> str:
    """The peak memory that rank 0 measured, and the planner's formula for it, kind by kind."""
    rows, kinds, is_cpu = list[list[str | Number]](), RankMemory.KINDS, False
    for run in runs:
        peaks = [
            (peak, it["step"])
            for it in run.records
            if it["kind"] == "step" and (peak := finite(it.get("memory_bytes")))
        ]
        formula = _formula(run)
        if not peaks or formula is None:
            continue
        peak, step = max(peaks)
        is_cpu = is_cpu or run.last("run")["device"] == "cpu"
        counted = [formula.peak, *(getattr(formula, kind) for kind in kinds)]
        rows.append([
            run.name or "MiB", Number(int(peak), f"{peak / _MIB:,.1f}", run.where("step", step, "memory_bytes")),
            *(Number(size, f"{size / _MIB:,.1f}") for size in counted),
        ])  # fmt: skip
    if not rows:
        return ""
    cpu = " On a CPU the measured peak has the interpreter and all its libraries, too." if is_cpu else ""
    note = f"MiB of rank 0. The formula is the planner's; its kinds peak at different moments of a step.{cpu}"
    numbers = table(["", "measured", "formula", *kinds], rows, "memory")
    return section("Peak memory beside the formula", said(note, "soft"), numbers)


def _formula(run: TrainingRun) -> RankMemory | None:
    """The formula for rank 0 of a run; None of what it does not count, or where the records do not say enough."""
    began, options = run.last("run"), run.options
    if began.get("parameters_on") != "device":
        return None
    try:
        of_model = {name.removeprefix("model."): value for name, value in options.items() if name.startswith("model.")}
        model, layout = ModelConfig.from_record(of_model), ParallelConfig(**began["layout"])
        length = options["data.seq_len"]
        planned = PlannedRun(
            model, layout, began["tokens_per_step"] // length, length,
            Cluster(_CPU if began["device"] == "cpu" else _GPU, layout.processes), began["recompute"],
            stage_layers=tuple(len(each) for each in stage_layers(model, layout.stages, length)),
            states=OptimizerStates(options["optim.name"], options["optim.ema_decay"] > 0, began["moments"]),
            precision=options["precision"],
        )  # fmt: skip
        memory = RankMemory(planned, 0)
        return memory if memory.peak > 0 else None
    except (GristmillError, LookupError, TypeError, ValueError, ArithmeticError):  # records of another version
        return None


def show_passes(runs: Sequence[TrainingRun]) -> str:
    """The passes of the last step that each run has traced on every rank of its pipeline."""
    figures = list[str]()
    for run in runs:
        if not (run.folder / FOLDER).is_dir():
            continue
        try:
            timeline = read_timeline(run.folder)
        except GristmillError:  # traces of one device, or of some ranks
            continue
        rows = list[list[str | Number]]()
        for rank, passes in enumerate(timeline.ranks):
            busy = sum(each.end - each.start for each in passes)
            rows.append([
                f"rank {rank}", Number(len(passes)), Number(busy, f"{busy:.4g}"),
                Number(1 - busy / timeline.seconds, f"{1 - busy / timeline.seconds:.1%}"),
            ])  # fmt: skip
        figures.append(
            figure(f"{run.name} {describe(timeline)}".strip(), draw_passes(timeline),
                   table(["", "passes", "seconds at work", "idle"], rows), wide=True)
        )  # fmt: skip
    note = said("Blue is forward, orange backward, green a backward pass for weights alone; lighter is every second "
                "stage of a rank; the number is the micro-batch's.", "soft")  # fmt: skip
    return section("Passes of the pipeline", note, *figures) if figures else ""
