"""The page on training runs: its sections, which show several runs in the same pictures."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from operator import itemgetter
from typing import Any

from markupsafe import Markup

from gristmill.errors import GristmillError
from gristmill_cli.report.page import (
    NOTHING,
    Number,
    Row,
    figure,
    filled_table,
    fold,
    grid,
    heading,
    paragraph,
    quotation,
    section,
    table,
    tiles,
    warnings,
)
from gristmill_cli.report.pictures import draw_curves, draw_heat, draw_passes
from gristmill_cli.report.task_scores import show_scores
from gristmill_cli.report.training_records import Record, TrainingRun
from gristmill_planner.hardware import Cluster, find_device
from gristmill_planner.memory import RankMemory
from gristmill_planner.planned_run import OptimizerStates, PlannedRun, layers_of_stages
from gristmill_planner.timeline import describe, read_timeline
from training.checkpoint.run_file import STARTS
from training.experimental.parallel_config import ParallelConfig
from training.model.model_config import ModelConfig
from training.profiling.profile_config import FOLDER
from training.reporting.metrics_file import finite, last_with, table_of
from training.reporting.plot import Curve, read_panels

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
_PASSES_NOTE = (
    "Blue is forward, orange backward, green a backward pass for weights alone; lighter is every second stage of a "
    "rank; the number is the micro-batch's."
)
_EXPERTS_NOTE = (
    "Load is the number of an expert's tokens divided by the mean of its layer, since the report before. Entropy is "
    "divided by that of equal loads."
)
_MIB = 2**20
_GPU = find_device("a100-80gb")  # memory depends on no other property than that it is a GPU
_CPU = replace(_GPU, element_bytes=4)


def training_sections(runs: Sequence[TrainingRun], title: str) -> Iterator[Markup]:
    """Yield the parts of the page."""
    faults = list[str]()
    for run in runs:
        faults += run.faults
    yield heading(title)
    yield warnings((fault, "") for fault in faults)
    for run in runs:
        if run.name:
            yield paragraph(run.name, "soft")
        yield _totals(run)
    yield show_scores(runs)
    yield _curves(runs)
    yield _memory(runs)
    yield _passes(runs)
    yield _experts(runs)
    yield _by_source(runs)
    yield _seen(runs)
    yield _texts(runs)
    yield _options(runs)
    yield _starts(runs)


def _totals(run: TrainingRun) -> Markup:
    """Return the numbers at the head of a run."""
    first = run.last("run")
    step = run.last("step")
    evaluation = run.last("eval")
    fields = (
        ("steps", step, "step"),
        ("parameters", first, "parameters"),
        ("processes", first, "processes"),
        ("training loss", step, "loss"),
        ("holdout loss", evaluation, "loss"),
        ("unigram loss", first, "unigram_loss"),
    )
    numbers = dict[str, Number]()
    for name, record, field in fields:
        if finite(record.get(field)) is not None:
            form = "," if isinstance(record[field], int) else ".4f"
            numbers[name] = run.number(record, form, field)
    speeds = list[float]()
    for record in run.of("step"):
        speed = finite(record.get("tokens_per_second"))
        if speed:
            speeds.append(speed)
    if speeds:
        median = statistics.median(speeds)
        numbers["tokens/s, median"] = Number(median, f"{median:,.0f}")
    timed = last_with(run.of("step"), "elapsed_seconds")
    if timed is not None:
        where = run.where("step", timed["step"], "elapsed_seconds")
        seconds = timed["elapsed_seconds"]
        numbers["duration"] = Number(seconds, str(timedelta(seconds=round(seconds))), where)
        name = "GPU hours" if first.get("device") == "cuda" else "process hours"
        numbers[name] = run.number(timed, ",.2f", "device_hours")
    tokens_per_step = first.get("tokens_per_step")
    if tokens_per_step and step:
        numbers["tokens seen"] = Number(tokens_per_step * step["step"])
    return tiles(numbers)


@dataclass(frozen=True)
class NamedCurve:
    """A curve of a run: its name in the panel, and its points."""

    run: TrainingRun
    name: str
    points: Curve


def _curves(runs: Sequence[TrainingRun]) -> Markup:
    """Return the section on what the runs logged over their steps, a picture for each kind of value."""
    panels = dict[str, dict[str, NamedCurve]]()  # by title, and in it by label
    for run in runs:
        for title, curves in read_panels(run.records).items():
            panel = panels.setdefault(title, {})
            for name, points in curves.items():
                label = run.titled(name) or "all"
                panel[label] = NamedCurve(run, name, points)
    if not panels:
        return NOTHING
    figures = list[Markup]()
    for title, panel in panels.items():
        drawn = dict[str, Curve]()
        rows = list[Row]()
        for label, curve in panel.items():
            rows.append(_row_of_curve(title, label, curve))
            if len(drawn) < _LINES:
                drawn[label] = _thinned(curve.points)
        numbers = table(["", "first", "least", "most", "last"], rows)
        figures.append(figure(title, draw_curves(drawn, "step", ""), numbers))
    note = paragraph(
        f"A plot has at most {_POINTS} points per curve and {_LINES} curves; the numbers cover all of them.", "soft"
    )
    return section("Curves", note, grid(*figures))


def _row_of_curve(title: str, label: str, curve: NamedCurve) -> Row:
    """Return the first, the smallest, the largest and the last value of a curve."""
    kind, key = _FIELDS.get(title, {}).get(curve.name, ("", ""))
    points = curve.points
    smallest = min(points, key=itemgetter(1))
    greatest = max(points, key=itemgetter(1))
    row: Row = [label]
    for step, value in (points[0], smallest, greatest, points[-1]):
        where = ""
        if kind:
            where = curve.run.where(kind, step, key)
        row.append(Number(value, f"{value:.5g}", where))
    return row


def _thinned(curve: Curve) -> Curve:
    """Return at most about _POINTS points of a curve, and always its last."""
    step = -(-len(curve) // _POINTS)
    if step == 1:
        return curve
    return [*curve[:-1:step], curve[-1]]


def _memory(runs: Sequence[TrainingRun]) -> Markup:
    """Return the section on the peak memory that rank 0 measured, next to the planner's formula for it."""
    rows = list[Row]()
    is_cpu = False
    for run in runs:
        peaks = list[tuple[float, int]]()
        for record in run.of("step"):
            peak = finite(record.get("memory_bytes"))
            if peak:
                peaks.append((peak, record["step"]))
        formula = _formula(run)
        if not peaks or formula is None:
            continue
        peak, step = max(peaks)
        is_cpu = is_cpu or run.last("run")["device"] == "cpu"
        measured = Number(int(peak), f"{peak / _MIB:,.1f}", run.where("step", step, "memory_bytes"))
        row: Row = [run.name or "MiB", measured, _mebibytes(formula.peak)]
        for kind in RankMemory.KINDS:
            row.append(_mebibytes(getattr(formula, kind)))
        rows.append(row)
    if not rows:
        return NOTHING
    note = "MiB of rank 0. The formula is the planner's; its kinds peak at different moments of a step."
    if is_cpu:
        note += " On a CPU the measured peak includes the interpreter and all its libraries."
    numbers = table(["", "measured", "formula", *RankMemory.KINDS], rows, "memory")
    return section("Peak memory and the formula", paragraph(note, "soft"), numbers)


def _mebibytes(size: float) -> Number:
    return Number(size, f"{size / _MIB:,.1f}")


def _formula(run: TrainingRun) -> RankMemory | None:
    """Return the formula for rank 0 of a run; None where it does not apply, or the records do not say enough."""
    first = run.last("run")
    if first.get("parameters_on") != "device":
        return None
    try:
        memory = RankMemory(_planned_run(first, run.options), 0)
        if memory.peak <= 0:
            return None
        return memory
    except (GristmillError, LookupError, TypeError, ValueError, ArithmeticError):  # records of another version
        return None


def _planned_run(first: Record, options: dict[str, Any]) -> PlannedRun:
    """Return the run that the planner counts, from the first record of a run and its options."""
    model_options = dict[str, Any]()
    for name, value in options.items():
        if name.startswith("model."):
            model_options[name.removeprefix("model.")] = value
    model = ModelConfig.from_record(model_options)
    layout = ParallelConfig(**first["layout"])
    length = options["data.seq_len"]
    device = _CPU if first["device"] == "cpu" else _GPU
    return PlannedRun(
        model,
        layout,
        first["tokens_per_step"] // length,
        length,
        Cluster(device, layout.processes),
        first["recompute"],
        stage_layers=layers_of_stages(model, layout.stages, length),
        states=OptimizerStates(options["optim.name"], options["optim.ema_decay"] > 0, first["moments"]),
        precision=options["precision"],
    )


def _passes(runs: Sequence[TrainingRun]) -> Markup:
    """Return the section on the passes of the last step that each run has traced on every rank of its pipeline."""
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
            busy = sum(step_pass.end - step_pass.start for step_pass in passes)
            idle = 1 - busy / timeline.seconds
            rows.append([f"rank {rank}", Number(len(passes)), Number(busy, f"{busy:.4g}"), Number(idle, f"{idle:.1%}")])
        numbers = table(["", "passes", "seconds at work", "idle"], rows)
        figures.append(figure(run.titled(describe(timeline)), draw_passes(timeline), numbers, wide=True))
    if not figures:
        return NOTHING
    return section("Passes of the pipeline", paragraph(_PASSES_NOTE, "soft"), *figures)


def _experts(runs: Sequence[TrainingRun]) -> Markup:
    """Return the section on how tokens fell on experts: each measure over time by layer, and the last loads of all."""
    parts = list[Markup]()
    for run in runs:
        records = run.of("experts")
        if records:
            parts.append(_measures_of_experts(run, records) + _loads_of_experts(run, records))
    if not parts:
        return NOTHING
    return section("Experts", paragraph(_EXPERTS_NOTE, "soft"), *parts)


def _measures_of_experts(run: TrainingRun, records: Sequence[Record]) -> Markup:
    """Draw each measure of the loads over time, a curve for each of some layers."""
    layers = list(records[-1].get("max_load") or {})
    step_between = -(-len(layers) // _LAYERS) or 1
    figures = list[Markup]()
    for kind, title in _OF_EXPERTS.items():
        if not isinstance(records[-1].get(kind), dict):
            continue
        curves = dict[str, Curve]()
        rows = list[Row]()
        for number, layer in enumerate(layers):
            measured = [record for record in records if finite(record.get(kind, {}).get(layer)) is not None]
            if number % step_between == 0:
                curves[f"layer {layer}"] = [(record["step"], float(record[kind][layer])) for record in measured]
            row: Row = [f"layer {layer}"]
            for record in (records[0], records[-1]):
                if record in measured:
                    row.append(run.number(record, ".3f", kind, layer))
            rows.append(row)
        numbers = table(["", "first", "last"], rows)
        figures.append(figure(run.titled(title), draw_curves(curves, "step", ""), numbers))
    return grid(*figures)


def _loads_of_experts(run: TrainingRun, records: Sequence[Record]) -> Markup:
    """Draw the last loads that were recorded of all experts."""
    with_loads = [record for record in records if isinstance(record.get("loads"), dict)]
    if not with_loads:
        return NOTHING
    last = with_loads[-1]
    loads = last["loads"]
    greatest = max(map(max, loads.values()))
    title = run.titled(f"loads by layer and expert at step {last['step']:,}, from 0 (white) to {greatest:.2f}")
    picture = draw_heat(list(loads), list(loads.values()), greatest, "layer", "expert")
    return figure(title, picture, wide=True)


def _by_source(runs: Sequence[TrainingRun]) -> Markup:
    """Return the section on the losses of each holdout and source in the last evaluation."""
    rows = list[Row]()
    for run in runs:
        evaluation = run.last("eval")
        rows += _rows_of_holdout(run, evaluation, "", evaluation)
        for name, losses in table_of(evaluation, "holdouts").items():
            rows += _rows_of_holdout(run, evaluation, name, losses)
    numbers = filled_table(["", "loss", "bits per byte"], rows, "sources")
    return section("Losses of the last evaluation", numbers)


def _rows_of_holdout(run: TrainingRun, evaluation: Record, holdout: str, losses: Any) -> list[Row]:
    """Return a row for all sources of a holdout, and one for each."""
    path = list[str]()
    if holdout:
        path = ["holdouts", holdout]
    rows = list[Row]()
    for source, values in {"all": losses, **table_of(losses, "sources")}.items():
        if not isinstance(values, dict):
            continue
        own_path = path
        if source != "all":
            own_path = [*path, "sources", source]
        cells = list[Number]()
        for key in ("loss", "bits_per_byte"):
            if finite(values.get(key)) is not None:
                cells.append(run.number(evaluation, ".4f", *own_path, key))
        if cells:
            label = " ".join(filter(None, (run.name, holdout, source)))
            rows.append([label, *cells])
    return rows


def _seen(runs: Sequence[TrainingRun]) -> Markup:
    """Return the section on the tokens that were read of each data set and source."""
    forms = {"tokens": ",", "share": ".2%", "requested": ".2%"}
    rows = list[Row]()
    for run in runs:
        seen = run.last("data")
        for kind in ("sets", "sources"):
            for name in table_of(seen, kind):
                cells = [run.number(seen, form, kind, name, key) for key, form in forms.items()]
                rows.append([run.titled(name), *cells])
    return section("Tokens seen", filled_table(["", *forms], rows, "seen"))


def _texts(runs: Sequence[TrainingRun]) -> Markup:
    """Return the section with the first text that each run sampled, and the last ones."""
    parts = list[Markup]()
    for run in runs:
        with_text = [record for record in run.of("eval") if record.get("text")]
        for record in [*with_text[:1], *with_text[1:][-_SAMPLES + 1 :]]:
            parts.append(quotation(run.titled(f"after step {record['step']:,}"), str(record["text"])))
    if not parts:
        return NOTHING
    note = paragraph("The first sample, and the latest ones.", "soft")
    return section("Texts sampled from the model", note, *parts)


def _options(runs: Sequence[TrainingRun]) -> Markup:
    """Return the options, first where runs differ, and the layout that a run had when it last began."""
    options_of_runs = list[dict[str, Any]]()
    names = dict[str, None]()  # in order
    for run in runs:
        options = {name: value for name, value in run.options.items() if name != STARTS}
        for name, value in table_of(run.last("run"), "layout").items():
            options[f"parallel.{name}"] = value
        options_of_runs.append(options)
        names |= dict.fromkeys(options)
    rows = list[Row]()
    differing = list[Row]()
    for name in names:
        values = [str(options.get(name, "")) for options in options_of_runs]
        rows.append([name, *values])
        if len(set(values)) > 1:
            differing.append([name, *values])
    head = ["", *(run.name for run in runs)]
    return section(
        "Options",
        filled_table(head, differing, "differ"),
        fold("all options that decide what is trained, and the layout", filled_table(head, rows)),
    )


def _starts(runs: Sequence[TrainingRun]) -> Markup:
    """Return the section on when, where and with what each run was started."""
    columns = ["date", "host", "processes", "device", "versions", "command"]
    rows = list[Row]()
    for run in runs:
        for start in run.options.get(STARTS, []):
            versions = [f"{name} {number}" for name, number in table_of(start, "versions").items()]
            shown = {**start, "versions": ", ".join(versions)}
            rows.append([run.name, *(str(shown.get(name, "")) for name in columns)])
    head = ["", *columns]
    return section("Starts", fold("when, where and with what", filled_table(head, rows)))
