"""The report on training runs: their records, and what the page shows of them, of several in the same pictures."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import getitem, itemgetter
from pathlib import Path
from typing import Any

from markupsafe import Markup

from gristmill.errors import GristmillError, UsageError
from gristmill.io.files import RUN_FILE
from gristmill.wording import count_of
from gristmill_cli.report.page import (
    NOTHING,
    Number,
    figure,
    fold,
    grid,
    heading,
    paragraph,
    pointer,
    quotation,
    section,
    table,
    tiles,
    warnings,
)
from gristmill_cli.report.pictures import draw_curves, draw_heat, draw_passes
from gristmill_cli.run_config import recorded_options
from gristmill_planner.hardware import Cluster, find_device
from gristmill_planner.memory import RankMemory
from gristmill_planner.planned_run import OptimizerStates, PlannedRun, layers_of_stages
from gristmill_planner.timeline import describe, read_timeline
from training.experimental.parallel_config import ParallelConfig
from training.model.model_config import ModelConfig
from training.profiling.profile_config import FOLDER
from training.reporting.metrics_file import METRICS, finite, read_metrics_and_damage, table_of
from training.reporting.plot import Curve, read_panels

Record = dict[str, Any]  # a line of metrics.jsonl
Row = list[str | Number]
_POINTS = 400  # of a curve
_LINES = 16  # curves of a picture
_SAMPLES = 3  # texts of each run
_LAYERS = 8  # whose experts' loads are drawn
_FIELDS = {  # of the records, by panel
    "loss (nats/token)": {"train": ("step", "loss"), "holdout": ("eval", "loss")},
    "learning rate": {"": ("step", "lr")},
    "gradient norm": {"": ("step", "grad_norm")},
    "tokens/s": {"": ("step", "tokens_per_second")},
}
_OF_EXPERTS = {
    "max_load": "largest load", "min_load": "smallest load", "entropy": "entropy of the loads", "dropped": "dropped",
}  # fmt: skip
_MIB = 2**20
_GPU = find_device("a100-80gb")  # memory depends on no other property than that it is a GPU
_CPU = replace(_GPU, element_bytes=4)


@dataclass
class TrainingRun:
    """What a training run has recorded; `name` is empty if the page is of this run alone."""

    folder: Path
    name: str
    records: list[Record]
    options: dict[str, Any]
    faults: list[str]

    def of(self, kind: str) -> list[Record]:
        """The records of a kind."""
        return [record for record in self.records if record["kind"] == kind]

    def last(self, kind: str) -> Record:
        """The last record of a kind; {} if there is none."""
        return next((record for record in reversed(self.records) if record["kind"] == kind), {})

    def where(self, kind: str, step: int, *names: str) -> str:
        """Which number of metrics.jsonl is meant: kind of record, step, field."""
        return pointer(f"{self.name}/{METRICS}" if self.name else METRICS, kind, step, *names)

    def number(self, record: Record, form: str, *names: str) -> Number:
        """A number of a record, as `form` shows it."""
        value: Any = reduce(getitem, names, record)
        return Number(value, format(value, form), self.where(record["kind"], record["step"], *names))


def is_training_run(folder: Path) -> bool:
    """Whether a folder is the --out_dir of a training run that has recorded something."""
    return (folder / METRICS).is_file()


def read_training_runs(folders: Sequence[Path]) -> list[TrainingRun]:
    """The records of some runs. Raises UsageError where one has none, InputError where they cannot be read."""
    names = [folder.resolve().name for folder in folders]
    runs = list[TrainingRun]()
    for folder, name in zip(folders, names, strict=True):
        if not is_training_run(folder):
            raise UsageError(f"{folder}: expected the --out_dir of a training run, got no {METRICS} in it")
        records, damaged = read_metrics_and_damage(folder / METRICS)
        options = recorded_options(folder)
        label = "" if len(folders) == 1 else name if names.count(name) == 1 else str(folder)
        run = TrainingRun(folder, label, records, options, [])
        faults = [f"{count_of(damaged, 'damaged line')} of {METRICS} left out."] if damaged else []
        if not options:
            faults.append(f"{RUN_FILE} is missing or damaged: its options are not shown.")
        steps = run.of("step")
        asked = run.options.get("steps")
        if not steps:
            faults.append("No step is recorded.")
        elif isinstance(asked, int) and (done := steps[-1]["step"]) < asked:
            faults.append(f"The run has not finished: {done:,} of {count_of(asked, 'step')} recorded.")
        if odd := [it["step"] for it in steps if finite(it.get("loss")) is None]:
            faults.append(f"The loss is not finite at {count_of(len(odd), 'step')}, first at step {odd[0]:,}.")
        if skipped := [it["step"] for it in steps if it.get("skipped")]:
            faults.append(f"{count_of(len(skipped), 'update')} skipped, first at step {skipped[0]:,}.")
        run.faults += [f"{name}: {fault}" if len(folders) > 1 else fault for fault in faults]
        runs.append(run)
    return runs


def training_sections(runs: Sequence[TrainingRun], title: str) -> Iterator[Markup]:
    """The parts of the page."""
    yield heading(title)
    yield warnings(fault for run in runs for fault in run.faults)
    for run in runs:
        yield paragraph(run.name, "soft") if run.name else NOTHING
        yield _totals(run)
    yield _curves(runs)
    yield _memory(runs)
    yield _passes(runs)
    yield _experts(runs)
    yield _by_source(runs)
    yield _seen(runs)
    yield _texts(runs)
    yield _options(runs)


def _totals(run: TrainingRun) -> Markup:
    began = run.last("run")
    step = run.last("step")
    held = run.last("eval")
    speeds = [speed for it in run.of("step") if (speed := finite(it.get("tokens_per_second")))]
    numbers = {
        "steps": (step, "step"), "parameters": (began, "parameters"), "processes": (began, "processes"),
        "training loss": (step, "loss"), "holdout loss": (held, "loss"), "unigram loss": (began, "unigram_loss"),
    }  # fmt: skip
    shown = {
        name: run.number(record, "," if isinstance(record[field], int) else ".4f", field)
        for name, (record, field) in numbers.items() if finite(record.get(field)) is not None
    }  # fmt: skip
    if speeds:
        shown["tokens/s, median"] = Number(statistics.median(speeds), f"{statistics.median(speeds):,.0f}")
    if (each := began.get("tokens_per_step")) and step:
        shown["tokens seen"] = Number(each * step["step"])
    return tiles(shown)


def _curves(runs: Sequence[TrainingRun]) -> Markup:
    panels = dict[str, dict[str, tuple[TrainingRun, str, Curve]]]()
    for run in runs:
        for title, curves in read_panels(run.records).items():
            for name, curve in curves.items():
                label = f"{run.name} {name}".strip() or "all"
                panels.setdefault(title, {})[label] = run, name, curve
    figures = list[Markup]()
    for title, lines in panels.items():
        rows = list[Row]()
        for label, (run, name, curve) in lines.items():
            kind, key = _FIELDS.get(title, {}).get(name, ("", ""))
            cells = [
                Number(value, f"{value:.5g}", run.where(kind, step, key) if kind else "")
                for step, value in (curve[0], min(curve, key=itemgetter(1)), max(curve, key=itemgetter(1)), curve[-1])
            ]
            rows.append([label, *cells])
        drawn = {label: _thinned(curve) for label, (_, _, curve) in list(lines.items())[:_LINES]}
        picture = draw_curves(drawn, "step", "")
        figures.append(figure(title, picture, table(["", "first", "least", "most", "last"], rows)))
    note = paragraph(
        f"A plot has at most {_POINTS} points per curve and {_LINES} curves; the numbers cover all of them.", "soft"
    )
    return section("Curves", note if figures else NOTHING, grid(*figures))


def _thinned(curve: Curve) -> Curve:
    step = -(-len(curve) // _POINTS)
    return curve if step == 1 else [*curve[:-1:step], curve[-1]]


def _memory(runs: Sequence[TrainingRun]) -> Markup:
    """The peak memory that rank 0 measured, and the planner's formula for it, kind by kind."""
    rows = list[Row]()
    kinds = RankMemory.KINDS
    is_cpu = False
    for run in runs:
        peaks = [(peak, it["step"]) for it in run.of("step") if (peak := finite(it.get("memory_bytes")))]
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
        return NOTHING
    cpu = " On a CPU the measured peak includes the interpreter and all its libraries." if is_cpu else ""
    note = f"MiB of rank 0. The formula is the planner's; its kinds peak at different moments of a step.{cpu}"
    numbers = table(["", "measured", "formula", *kinds], rows, "memory")
    return section("Peak memory and the formula", paragraph(note, "soft"), numbers)


def _formula(run: TrainingRun) -> RankMemory | None:
    """The formula for rank 0 of a run; None of what it does not count, or where the records do not say enough."""
    began = run.last("run")
    options = run.options
    if began.get("parameters_on") != "device":
        return None
    try:
        of_model = {name.removeprefix("model."): value for name, value in options.items() if name.startswith("model.")}
        model = ModelConfig.from_record(of_model)
        layout = ParallelConfig(**began["layout"])
        length = options["data.seq_len"]
        planned = PlannedRun(
            model, layout, began["tokens_per_step"] // length, length,
            Cluster(_CPU if began["device"] == "cpu" else _GPU, layout.processes), began["recompute"],
            stage_layers=layers_of_stages(model, layout.stages, length),
            states=OptimizerStates(options["optim.name"], options["optim.ema_decay"] > 0, began["moments"]),
            precision=options["precision"],
        )  # fmt: skip
        memory = RankMemory(planned, 0)
        return memory if memory.peak > 0 else None
    except (GristmillError, LookupError, TypeError, ValueError, ArithmeticError):  # records of another version
        return None


def _passes(runs: Sequence[TrainingRun]) -> Markup:
    """The passes of the last step that each run has traced on every rank of its pipeline."""
    figures = list[Markup]()
    for run in runs:
        if not (run.folder / FOLDER).is_dir():
            continue
        try:
            timeline = read_timeline(run.folder)
        except GristmillError:  # traces of one device, or of some ranks
            continue
        rows = list[Row]()
        for rank, passes in enumerate(timeline.ranks):
            busy = sum(each.end - each.start for each in passes)
            idle = 1 - busy / timeline.seconds
            rows.append([f"rank {rank}", Number(len(passes)), Number(busy, f"{busy:.4g}"), Number(idle, f"{idle:.1%}")])
        numbers = table(["", "passes", "seconds at work", "idle"], rows)
        figures.append(figure(f"{run.name} {describe(timeline)}".strip(), draw_passes(timeline), numbers, wide=True))
    note = paragraph("Blue is forward, orange backward, green a backward pass for weights alone; lighter is every "
                     "second stage of a rank; the number is the micro-batch's.", "soft")  # fmt: skip
    return section("Passes of the pipeline", note, *figures) if figures else NOTHING


def _experts(runs: Sequence[TrainingRun]) -> Markup:
    """How a sparse model's tokens fell on its experts: each measure over time by layer, and the last loads of all."""
    parts = list[Markup]()
    for run in runs:
        records = run.of("experts")
        if not records:
            continue
        layers = list(records[-1].get("max_load") or {})
        drawn = layers[:: -(-len(layers) // _LAYERS)] if layers else []
        pictures = list[Markup]()
        for kind, title in _OF_EXPERTS.items():
            if not isinstance(records[-1].get(kind), dict):
                continue
            of = {layer: [it for it in records if finite(it.get(kind, {}).get(layer)) is not None] for layer in layers}
            curves = {f"layer {layer}": [(it["step"], float(it[kind][layer])) for it in of[layer]] for layer in drawn}
            ends = list[Row]()
            for layer in layers:
                shown = [it for it in (records[0], records[-1]) if it in of[layer]]
                ends.append([f"layer {layer}", *(run.number(it, ".3f", kind, layer) for it in shown)])
            numbers = table(["", "first", "last"], ends)
            pictures.append(figure(f"{run.name} {title}".strip(), draw_curves(curves, "step", ""), numbers))
        heat = NOTHING
        if maps := [record for record in records if isinstance(record.get("loads"), dict)]:
            loads = maps[-1]["loads"]
            most = max(map(max, loads.values()))
            title = f"{run.name} loads by layer and expert at step {maps[-1]['step']:,}, from 0 (white) to {most:.2f}"
            heat = figure(
                title.strip(), draw_heat(list(loads), list(loads.values()), most, "layer", "expert"), wide=True
            )
        parts.append(grid(*pictures) + heat)
    note = paragraph(
        "Loads are tokens of an expert over the mean of its layer's experts since the report before; entropy is over "
        "that of equal loads.", "soft",
    )  # fmt: skip
    return section("Experts", note, *parts) if parts else NOTHING


def _by_source(runs: Sequence[TrainingRun]) -> Markup:
    rows = list[Row]()
    for run in runs:
        held = run.last("eval")
        for name, losses in {"": held, **table_of(held, "holdouts")}.items():
            for source, values in {"all": losses, **table_of(losses, "sources")}.items():
                path = [*(["holdouts", name] if name else []), *([] if source == "all" else ["sources", source])]
                cells = [
                    run.number(held, ".4f", *path, key)
                    for key in ("loss", "bits_per_byte")
                    if isinstance(values, dict) and finite(values.get(key)) is not None
                ]
                if cells:
                    rows.append([" ".join(part for part in (run.name, name, source) if part), *cells])
    numbers = table(["", "loss", "bits per byte"], rows, "sources") if rows else NOTHING
    return section("Losses of the last evaluation", numbers)


def _seen(runs: Sequence[TrainingRun]) -> Markup:
    """Tokens that were read of each data set and source."""
    forms = {"tokens": ",", "share": ".2%", "requested": ".2%"}
    rows = list[Row]()
    for run in runs:
        seen = run.last("data")
        for kind in ("sets", "sources"):
            for name in table_of(seen, kind):
                cells = [run.number(seen, form, kind, name, key) for key, form in forms.items()]
                rows.append([f"{run.name} {name}".strip(), *cells])
    return section("Tokens seen", table(["", *forms], rows, "seen") if rows else NOTHING)


def _texts(runs: Sequence[TrainingRun]) -> Markup:
    parts = list[Markup]()
    for run in runs:
        texts = [(it["step"], it["text"]) for it in run.of("eval") if it.get("text")]
        for step, text in [*texts[:1], *texts[1:][-_SAMPLES + 1 :]]:
            parts.append(quotation(f"{run.name} after step {step:,}".strip(), str(text)))
    note = paragraph("The first sample, and the latest ones.", "soft")
    return section("Texts sampled from the model", note, *parts) if parts else NOTHING


def _options(runs: Sequence[TrainingRun]) -> Markup:
    """The options, those first in which runs differ; and the layout that a run had when it last began."""
    shown = [
        run.options | {f"parallel.{name}": value for name, value in table_of(run.last("run"), "layout").items()}
        for run in runs
    ]
    names = dict.fromkeys(name for options in shown for name in options)
    rows = [[name, *(str(options.get(name, "")) for options in shown)] for name in names]
    differ = [row for row in rows if len(set(row[1:])) > 1]
    head = ["", *(run.name for run in runs)]
    return section(
        "Options",
        table(head, differ, "differ") if differ else NOTHING,
        fold("all options that decide what is trained, and the layout", table(head, rows)) if rows else NOTHING,
    )
