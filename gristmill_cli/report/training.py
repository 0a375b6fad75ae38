"""The sections of a report on training runs, one or several in the same pictures: losses, rate, norms, speed, texts."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from gristmill_cli.report.layout import show_memory, show_passes
from gristmill_cli.report.page import Number, figure, fold, grid, said, section, table, tiles
from gristmill_cli.report.pictures import draw_curves
from gristmill_cli.report.routing import show_experts
from gristmill_cli.report.training_records import TrainingRun
from training.reporting.metrics_file import finite
from training.reporting.plot import Curve, read_panels

_POINTS, _LINES, _SAMPLES = 400, 16, 3  # of a curve, and curves of a picture; texts of each run
_FIELDS = {  # of the records, by panel
    "loss (nats/token)": {"train": ("step", "loss"), "holdout": ("eval", "loss")},
    "learning rate": {"": ("step", "lr")},
    "gradient norm": {"": ("step", "grad_norm")},
    "tokens/s": {"": ("step", "tokens_per_second")},
}


def training_sections(runs: Sequence[TrainingRun], title: str) -> Iterator[str]:
    """The parts of the page."""
    yield f"<h1>{escape(title)}</h1>"
    yield "".join(f'<p class="warn">{escape(fault)}</p>' for run in runs for fault in run.faults)
    for run in runs:
        yield said(run.name, "soft") if run.name else ""
        yield _totals(run)
    yield _curves(runs)
    yield show_memory(runs)
    yield show_passes(runs)
    yield show_experts(runs)
    yield _by_source(runs)
    yield _seen(runs)
    yield _texts(runs)
    yield _options(runs)


def _totals(run: TrainingRun) -> str:
    began, step, held = run.last("run"), run.last("step"), run.last("eval")
    speeds = [speed for it in run.records if it["kind"] == "step" and (speed := finite(it.get("tokens_per_second")))]
    numbers = {
        "steps": (step, "step", step.get("step")),
        "parameters": (began, "parameters", began.get("parameters")),
        "processes": (began, "processes", began.get("processes")),
        "training loss": (step, "loss", step.get("loss")),
        "holdout loss": (held, "loss", held.get("loss")),
        "unigram loss": (began, "unigram_loss", began.get("unigram_loss")),
    }
    shown = {
        name: Number(value, f"{value:,}" if isinstance(value, int) else f"{value:.4f}",
                     run.where(record["kind"], record["step"], field))
        for name, (record, field, value) in numbers.items() if value is not None and finite(value) is not None
    }  # fmt: skip
    if speeds:
        shown["tokens/s, median"] = Number(statistics.median(speeds), f"{statistics.median(speeds):,.0f}")
    if (each := began.get("tokens_per_step")) and step:
        shown["tokens seen"] = Number(each * step["step"])
    return tiles(shown)


def _curves(runs: Sequence[TrainingRun]) -> str:
    panels = dict[str, dict[str, tuple[TrainingRun, str, Curve]]]()
    for run in runs:
        for title, curves in read_panels(run.records).items():
            for name, curve in curves.items():
                label = f"{run.name} {name}".strip() or "all"
                panels.setdefault(title, {})[label] = run, name, curve
    figures = list[str]()
    for title, lines in panels.items():
        rows = list[list[str | Number]]()
        for label, (run, name, curve) in lines.items():
            kind, key = _FIELDS.get(title, {}).get(name, ("", ""))
            cells = [
                Number(value, f"{value:.5g}", run.where(kind, step, key) if kind else "")
                for step, value in (curve[0], min(curve, key=_value), max(curve, key=_value), curve[-1])
            ]
            rows.append([label, *cells])
        drawn = {label: _thinned(curve) for label, (_, _, curve) in list(lines.items())[:_LINES]}
        picture = draw_curves(drawn, "step", "")
        figures.append(figure(title, picture, table(["", "first", "least", "most", "last"], rows)))
    note = said(f"Drawn are at most {_POINTS} points of a curve, and {_LINES} curves; the numbers are of all.", "soft")
    return section("Curves", note if figures else "", grid(*figures))


def _value(point: tuple[int, float]) -> float:
    return point[1]


def _thinned(curve: Curve) -> Curve:
    step = -(-len(curve) // _POINTS)
    return curve if step == 1 else [*curve[:-1:step], curve[-1]]


def _by_source(runs: Sequence[TrainingRun]) -> str:
    rows = list[list[str | Number]]()
    for run in runs:
        held = run.last("eval")
        for name, losses in {"": held, **_named(held, "holdouts")}.items():
            for source, values in {"all": losses, **_named(losses, "sources")}.items():
                path = [*(["holdouts", name] if name else []), *([] if source == "all" else ["sources", source])]
                label = " ".join(part for part in (run.name, name, source) if part)
                cells = [
                    Number(values[key], f"{values[key]:.4f}", run.where("eval", held["step"], *path, key))
                    for key in ("loss", "bits_per_byte")
                    if isinstance(values, dict) and finite(values.get(key)) is not None
                ]  # fmt: skip
                if cells:
                    rows.append([label, *cells])
    numbers = table(["", "loss", "bits per byte"], rows, "sources") if rows else ""
    return section("Losses of the last evaluation", numbers)


def _named(values: Any, key: str) -> Mapping[str, Any]:
    found = values.get(key) if isinstance(values, dict) else None
    return found if isinstance(found, dict) else {}


def _seen(runs: Sequence[TrainingRun]) -> str:
    """Tokens that were read of each data set and source."""
    rows = list[list[str | Number]]()
    for run in runs:
        seen = run.last("data")
        for kind in ("sets", "sources"):
            for name, part in _named(seen, kind).items():
                cells = [Number(part[key], f"{part[key]:,}" if key == "tokens" else f"{part[key]:.2%}",
                                run.where("data", seen["step"], kind, name, key))
                         for key in ("tokens", "share", "requested")]  # fmt: skip
                rows.append([f"{run.name} {name}".strip(), *cells])
    return section("Tokens seen", table(["", "tokens", "share", "requested"], rows, "seen") if rows else "")


def _texts(runs: Sequence[TrainingRun]) -> str:
    parts = list[str]()
    for run in runs:
        texts = [(it["step"], it["text"]) for it in run.records if it["kind"] == "eval" and it.get("text")]
        for step, text in [*texts[:1], *texts[1:][-_SAMPLES + 1 :]]:
            parts.append(f"<p><b>{escape(f'{run.name} after step {step:,}'.strip())}</b></p>")
            parts.append(f"<blockquote>{escape(str(text))}</blockquote>")
    note = said("The first text that was sampled, and the last ones.", "soft")
    return section("Texts sampled from the model", note, *parts) if parts else ""


def _options(runs: Sequence[TrainingRun]) -> str:
    """The options, those first in which runs differ; and the layout that a run had when it last began."""
    layouts = ((run.options, run.last("run").get("layout")) for run in runs)
    shown = [
        options | {f"parallel.{name}": value for name, value in (of if isinstance(of, dict) else {}).items()}
        for options, of in layouts
    ]
    names = dict.fromkeys(name for options in shown for name in options)
    rows = [[name, *(str(options.get(name, "")) for options in shown)] for name in names]
    differ = [row for row in rows if len(set(row[1:])) > 1]
    head = ["", *(run.name for run in runs)]
    return section(
        "Options",
        table(head, differ, "differ") if differ else "",
        fold("all options that decide what is trained, and the layout", table(head, rows)) if rows else "",
    )
