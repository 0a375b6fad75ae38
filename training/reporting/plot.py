"""Plot a run: its losses in the terminal, as loss.svg and loss.png, and with more as run.svg and run.png."""

from __future__ import annotations

import importlib.util
import io
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tyro.conf import Positional

from gristmill.errors import UsageError
from gristmill.storage.files import exists, write_file
from gristmill.wording import count_of
from training.reporting.metrics_file import METRICS, finite, read_metrics_and_damage, table_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Curve = list[tuple[int, float]]  # (steps done, value), such as a loss in nats/token
_COLUMNS = 3  # of panels
_GIB = 2.0**30
_COLOURS = {"train": "#9db4cc", "holdout": "#c1512d", "unigram": "#4c7a4c"}
_MARKERS = {"train": "·", "holdout": "o", "unigram": "-"}


def plot(run_dir: Positional[Path]) -> Path:
    """Print the loss curves of `run_dir`/metrics.jsonl and write them to `run_dir`/loss.svg and loss.png.

    run.svg and run.png show losses by source and by data set of a mix, learning rate, gradient norm, throughput and
    memory.

    Args:
        run_dir: The run's --out_dir, also s3://bucket/folder.

    Returns:
        The path of loss.svg.

    Raises:
        UsageError: no step is recorded, or matplotlib is not installed.
    """
    curves = read_curves(run_dir)
    print(terminal_plot(curves))
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("the picture needs matplotlib, which is not installed: pip install 'gristmill[train]'")
    figure = draw_figure(curves, title=f"Loss of {run_dir.resolve().name}")
    panels = draw_panels(read_panels(read_metrics_and_damage(run_dir / METRICS)[0]), title=run_dir.resolve().name)
    images = render_images(figure) | render_images(panels, "run")
    for name, image in images.items():
        write_file(run_dir / name, image)
    return run_dir / "loss.svg"


def read_curves(run_dir: Path) -> dict[str, Curve]:
    """Read the loss curves: training batches, holdout, and the unigram model as a horizontal line.

    Losses that are not finite are left out. A note on standard error counts lines that are damaged.
    """
    path = run_dir / METRICS
    if not exists(path):
        raise UsageError(f"{run_dir}: expected the --out_dir of a training run, got no {METRICS} in it")
    records, damaged = read_metrics_and_damage(path)
    train = _curve(records, "step", "loss")
    holdout = _curve(records, "eval", "loss")
    runs = _curve(records, "run", "unigram_loss")
    if damaged:
        print(f"note: {count_of(damaged, 'damaged line')} of {path} left out", file=sys.stderr)
    if not train:
        raise UsageError(f"{path} records no step with a loss; give the --out_dir of a training run")
    curves = {"train": train}
    if holdout:
        curves["holdout"] = holdout
    if runs:
        _, unigram = runs[-1]
        curves["unigram"] = [(train[0][0], unigram), (train[-1][0], unigram)]
    return curves


def _curve(records: list[dict[str, Any]], kind: str, key: str) -> Curve:
    """Return the finite values of `key` in the records of a kind, by step."""
    curve = Curve()
    for record in records:
        value = finite(record.get(key)) if record["kind"] == kind else None
        if value is not None:
            curve.append((record["step"], value))
    return curve


def _style(axes: Axes, ticks: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(ticks, integer=True, steps=[1, 2, 5, 10]))
    axes.grid(color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def draw_figure(curves: dict[str, Curve], title: str) -> Figure:
    """Draw the curves as a matplotlib figure, without pyplot: no window and no global state."""
    from matplotlib.figure import Figure  # takes half a second to import, needed only here

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats/token)")
    axes.set_title(title, parse_math=False)  # a folder's name may hold $
    _style(axes, 8)
    styles = {
        "train": {"linewidth": 0.9},
        "holdout": {"linewidth": 1.8, "marker": "o", "markersize": 4.5},
        "unigram": {"linewidth": 1.4, "linestyle": "--"},
    }
    for name, curve in curves.items():
        steps, losses = zip(*curve, strict=True)
        label = f"{name} {losses[-1]:.3f}"
        axes.plot(steps, losses, label=label, color=_COLOURS[name], **styles[name])  # type: ignore[arg-type]
    axes.legend(frameon=False)
    return figure


def render_images(figure: Figure, name: str = "loss") -> dict[str, bytes]:
    """Render `name`.svg and `name`.png; the same figure always gives the same bytes."""
    from matplotlib import rc_context

    svg = io.BytesIO()
    png = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # of a folder's name in the title
        with rc_context({"svg.hashsalt": "gristmill", "svg.fonttype": "none"}):  # text as text, not as outlines
            figure.savefig(svg, format="svg", metadata={"Date": None})
        figure.savefig(png, format="png", dpi=100)
    return {f"{name}.svg": svg.getvalue(), f"{name}.png": png.getvalue()}


def terminal_plot(curves: dict[str, Curve]) -> str:
    """Draw the curves as text of 18 lines of 72 characters, plus axes and legend."""
    width = 72
    height = 18
    steps = list[int]()
    losses = list[float]()
    for curve in curves.values():
        steps += [step for step, _ in curve]
        losses += [loss for _, loss in curve]
    first = min(steps)
    low = min(losses)
    span = max(steps) - first or 1
    rise = max(losses) - low or 1
    grid = [[" "] * width for _ in range(height)]
    longest_first = sorted(curves, key=lambda name: -len(curves[name]))  # a shorter curve is drawn over a longer one
    for name in longest_first:
        points: list[tuple[float, float]] = [*curves[name]]
        if name == "unigram":  # a line from end to end
            points = [(first + i * span / width, points[0][1]) for i in range(width)]
        for position, loss in points:
            row = round((low + rise - loss) / rise * (height - 1))
            column = round((position - first) / span * (width - 1))
            grid[row][column] = _MARKERS[name]
    labels = {0: f"{low + rise:.2f}", height - 1: f"{low:.2f}"}
    lines = [f"{labels.get(i, ''):>7} │{''.join(row)}" for i, row in enumerate(grid)]
    legend = [f"{_MARKERS[name]} {name} {curve[-1][1]:.3f}" for name, curve in curves.items()]
    lines.append(" " * 8 + "└" + "─" * width)
    lines.append(" " * 9 + f"{first:<{width // 2}.0f}{first + span:>{width // 2}.0f}")
    lines.append(" " * 9 + "   ".join(legend))
    return "\n".join(lines)


def read_panels(records: list[dict[str, Any]]) -> dict[str, dict[str, Curve]]:
    """Return the curves of each panel that has any, by the panel's title and the curve's name.

    Values that are not finite are left out. Sources are those of data.holdout, and "NAME: SOURCE" of other holdouts.
    """
    memory = [(step, value / _GIB) for step, value in _curve(records, "step", "memory_bytes")]
    panels = {
        "loss (nats/token)": {"train": _curve(records, "step", "loss"), "holdout": _curve(records, "eval", "loss")},
        "training loss by data set (nats/token)": _sets(records),
        "holdout loss by source (nats/token)": _sources(records),
        "answers of tasks (bits per byte)": _tasks(records, "bits_per_byte"),
        "accuracy in tasks": _tasks(records, "acc"),
        "learning rate": {"": _curve(records, "step", "lr")},
        "gradient norm": {"": _curve(records, "step", "grad_norm")},
        "tokens/s": {"": _curve(records, "step", "tokens_per_second")},
        "peak memory of a rank (GiB)": {"": memory},
    }
    drawn = dict[str, dict[str, Curve]]()
    for title, curves in panels.items():
        if any(curves.values()):
            drawn[title] = {name: curve for name, curve in curves.items() if curve}
    return drawn


def _sets(records: list[dict[str, Any]]) -> dict[str, Curve]:
    """Return the training loss of each data set of a mix, by the part of its folder that tells it from the others."""
    curves: dict[str, Curve] = {}
    for record in _of_kind(records, "losses"):
        for name, values in table_of(record, "sets").items():
            _add_point(curves, name, record["step"], values, "loss")
    return dict(zip(distinct_parts(list(curves)), curves.values(), strict=True))


def _of_kind(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record for record in records if record["kind"] == kind]


def _add_point(curves: dict[str, Curve], name: str, step: int, values: Any, key: str) -> None:
    """Add `values[key]` at a step to a curve, if that is a finite number."""
    value = finite(values.get(key)) if isinstance(values, dict) else None
    if value is not None:
        curves.setdefault(name, []).append((step, value))


def distinct_parts(folders: Sequence[str]) -> list[str]:
    """Return folders without the parts that all of them begin or end with.

    >>> distinct_parts(["runs/web/tokens", "runs/books/tokens"])
    ['web', 'books']
    """
    paths = [Path(folder).parts for folder in folders]
    begin = _equal_parts(paths)
    end = _equal_parts([path[begin:][::-1] for path in paths])
    names = ["/".join(path[begin : len(path) - end]) for path in paths]
    return names if all(names) else list(folders)


def _equal_parts(paths: Sequence[tuple[str, ...]]) -> int:
    """Return with how many equal parts all paths begin."""
    count = 0
    for parts in zip(*paths, strict=False):
        if len({*parts}) > 1:
            break
        count += 1
    return count


def _sources(records: list[dict[str, Any]]) -> dict[str, Curve]:
    """Return the loss of each source of each holdout, and of each other holdout."""
    curves: dict[str, Curve] = {}
    for record in _of_kind(records, "eval"):
        step = record["step"]
        for source, values in table_of(record, "sources").items():
            _add_point(curves, source, step, values, "loss")
        for holdout, losses in table_of(record, "holdouts").items():
            _add_point(curves, holdout, step, losses, "loss")
            for source, values in table_of(losses, "sources").items():
                _add_point(curves, f"{holdout}: {source}", step, values, "loss")
    return curves


def _tasks(records: list[dict[str, Any]], key: str) -> dict[str, Curve]:
    """Return the scores in each task that a run evaluated as it trained."""
    curves: dict[str, Curve] = {}
    for record in _of_kind(records, "eval"):
        for name, score in table_of(record, "tasks").items():
            _add_point(curves, name, record["step"], score, key)
    return curves


def draw_panels(panels: dict[str, dict[str, Curve]], title: str) -> Figure:
    """Draw the panels as a matplotlib figure, without pyplot: no window and no global state."""
    from matplotlib.figure import Figure  # takes half a second to import, needed only here

    rows = -(-len(panels) // _COLUMNS)
    figure = Figure(figsize=(4.6 * _COLUMNS, 3.2 * rows), layout="constrained")
    figure.suptitle(title, parse_math=False)  # a folder's name may hold $
    for number, (name, curves) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(rows, _COLUMNS, number, xlabel="step")
        axes.set_title(name, fontsize="medium")
        _style(axes, 6)
        for label, curve in curves.items():
            steps, values = zip(*curve, strict=True)
            marker = "o" if len(curve) < 50 else None
            axes.plot(steps, values, label=label, linewidth=1.2, marker=marker, markersize=3)
        if any(curves):
            for text in axes.legend(frameon=False, fontsize="small").get_texts():
                text.set_parse_math(False)
    return figure
