"""Panels of a run: losses, losses by source, learning rate, gradient norm, throughput and memory, in one figure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from training.reporting.metrics_file import finite

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curve = list[tuple[int, float]]  # (steps done, value)
_COLUMNS = 3
_GIB = 2.0**30


def read_panels(records: list[dict[str, Any]]) -> dict[str, dict[str, Curve]]:
    """The curves of each panel that has any, by the panel's title and the curve's name.

    Values that are not finite are left out. Sources are those of data.holdout, and "NAME: SOURCE" of other holdouts.
    """
    steps = [record for record in records if record["kind"] == "step"]
    evaluations = [record for record in records if record["kind"] == "eval"]
    memory = [(step, value / _GIB) for step, value in _curve(steps, "memory_bytes")]
    panels = {
        "loss (nats/token)": {"train": _curve(steps, "loss"), "holdout": _curve(evaluations, "loss")},
        "holdout loss by source (nats/token)": _sources(evaluations),
        "learning rate": {"": _curve(steps, "lr")},
        "gradient norm": {"": _curve(steps, "grad_norm")},
        "tokens/s": {"": _curve(steps, "tokens_per_second")},
        "peak memory of a rank (GiB)": {"": memory},
    }
    drawn = {title: {name: curve for name, curve in curves.items() if curve} for title, curves in panels.items()}
    return {title: curves for title, curves in drawn.items() if curves}


def _curve(records: list[dict[str, Any]], key: str) -> Curve:
    found = [(record["step"], finite(record.get(key))) for record in records]
    return [(step, value) for step, value in found if value is not None]


def _sources(evaluations: list[dict[str, Any]]) -> dict[str, Curve]:
    """The loss of each source of each holdout, and of each other holdout."""
    curves: dict[str, Curve] = {}
    for record in evaluations:
        for name, losses in {"": record, **_table(record, "holdouts")}.items():
            parts = {name: losses} if name else {}
            parts |= {f"{name}: {source}" if name else source: of for source, of in _table(losses, "sources").items()}
            for part, values in parts.items():
                loss = finite(values.get("loss")) if isinstance(values, dict) else None
                if loss is not None:
                    curves.setdefault(part, []).append((record["step"], loss))
    return curves


def _table(values: Any, key: str) -> dict[str, Any]:
    found = values.get(key) if isinstance(values, dict) else None
    return found if isinstance(found, dict) else {}


def draw_panels(panels: dict[str, dict[str, Curve]], title: str) -> Figure:
    """Draw the panels as a matplotlib figure, without pyplot: no window and no global state."""
    from matplotlib.figure import Figure  # takes half a second to import, needed only here
    from matplotlib.ticker import MaxNLocator

    rows = -(-len(panels) // _COLUMNS)
    figure = Figure(figsize=(4.6 * _COLUMNS, 3.2 * rows), layout="constrained")
    figure.suptitle(title, parse_math=False)  # a folder's name may hold $
    for number, (name, curves) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(rows, _COLUMNS, number, xlabel="step")
        axes.set_title(name, fontsize="medium")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
        axes.grid(color="#e4e4e4", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        for label, curve in curves.items():
            few = "o" if len(curve) < 50 else None
            axes.plot(*zip(*curve, strict=True), label=label, linewidth=1.2, marker=few, markersize=3)
        if any(curves):
            for text in axes.legend(frameon=False, fontsize="small").get_texts():
                text.set_parse_math(False)
    return figure
