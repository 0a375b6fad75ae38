"""Pictures of a report as inline SVG, drawn by matplotlib; their colours are the page's, light or dark."""

import io
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from gristmill.errors import UsageError
from gristmill.wording import count_of
from gristmill_planner.pipeline_simulator import Timeline
from gristmill_planner.timeline import draw_timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Placeholders of the page's own colours, by which they are replaced.
_INK = "#010203"
_SOFT = "#010204"
_PAPER = "#010205"
_SERIES = [f"#01030{number}" for number in range(8)]
_DASHES = ["-", "--", ":"]  # of the first eight curves, the next eight, and the eight after them
_VARIABLES = {_INK: "--ink", _SOFT: "--soft", _PAPER: "--paper"} | {
    colour: f"--c{number}" for number, colour in enumerate(_SERIES)
}
_STYLE = {
    "svg.fonttype": "none",  # texts stay texts
    "svg.hashsalt": "gristmill",  # the same names in each file
    "text.parse_math": False,  # a source may have $ in its name
    "font.family": "DejaVu Sans",  # is matplotlib's own: the same places everywhere
    "font.size": 9,
    "axes.edgecolor": _SOFT,
    "axes.labelcolor": _INK,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_WIDTH = 5.0  # inches; a page of 400 pixels shows letters of nine pixels then
_MAX_CELLS = 64  # of a row of a heat map
_LONGEST = 22  # characters of a label
_GAP = 0.035  # between the boxes of a column of ribbons, of the thickness of all ribbons together
_LINE = 0.16  # inches from a line of letters to the next

Bars = Mapping[str, Sequence[float]]  # of each series, a value for each label
Curves = Mapping[str, Sequence[tuple[float, float]]]  # of each name, (x, y)
Extent = tuple[float, float]  # the top and the bottom of a box


def short(name: str) -> str:
    """Return a name as a label: of a long one the beginning and the end, where names differ."""
    if len(name) <= _LONGEST:
        return name
    return f"{name[: _LONGEST - 9]}…{name[-8:]}"


def draw_sankey(flows: Mapping[tuple[str, str], float], left: Sequence[str], right: Sequence[str]) -> Markup:
    """Draw ribbons from each name of `left` to each of `right`, as thick as `flows` says."""
    with _style():
        total = sum(flows.values()) or 1
        rows = max(len(left), len(right))
        height = 1 + _GAP * (rows - 1)  # in units of the thickness of all ribbons together
        inches = max(3.0, 0.27 * rows + 1)
        axes = _axes(height=inches, width=5.2)
        axes.set_axis_off()
        axes.set_xlim(-0.5, 1.65)
        axes.set_ylim(height, -0.01)
        left_sizes = dict.fromkeys(left, 0.0)
        right_sizes = dict.fromkeys(right, 0.0)
        for (start, end), size in flows.items():
            left_sizes[start] += size
            right_sizes[end] += size
        left_extents = _stack(left_sizes, total, height)
        right_extents = _stack(right_sizes, total, height)
        line = _LINE / inches * height
        right_tops = {name: top for name, (top, _) in right_extents.items()}
        labels = _spread([_middle(extent) for extent in left_extents.values()], 2 * line, height)
        for number, (start, label) in enumerate(zip(left, labels, strict=True)):
            colour = _SERIES[number % len(_SERIES)]
            _draw_left_end(axes, start, left_sizes[start], left_extents[start], label, colour)
            left_top = left_extents[start][0]
            for end in right:
                thickness = flows.get((start, end), 0) / total
                if thickness:
                    _draw_ribbon(axes, left_top, right_tops[end], thickness, colour)
                    left_top += thickness
                    right_tops[end] += thickness
        labels = _spread([_middle(extent) for extent in right_extents.values()], line, height)
        for end, label in zip(right, labels, strict=True):
            _draw_right_end(axes, end, right_sizes[end], right_extents[end], label)
        return _svg(axes.figure)


def _draw_left_end(axes: "Axes", name: str, size: float, extent: Extent, label: float, colour: str) -> None:
    """Draw a box, and to its left its label of two lines around the height `label`."""
    _draw_box(axes, -0.03, extent, colour)
    axes.text(-0.07, label, f"{short(name)}\n{size:,.0f}", ha="right", va="center")
    axes.plot([-0.055, -0.035], [label, _middle(extent)], color=_SOFT, linewidth=0.6)


def _draw_right_end(axes: "Axes", name: str, size: float, extent: Extent, label: float) -> None:
    """Draw a box, and to its right its label of one line at the height `label`."""
    _draw_box(axes, 1, extent, _SOFT)
    axes.text(1.06, label, f"{short(name)}  {size:,.0f}", va="center")
    axes.plot([1.035, 1.055], [_middle(extent), label], color=_SOFT, linewidth=0.6)


def _middle(extent: Extent) -> float:
    return (extent[0] + extent[1]) / 2


def _draw_box(axes: "Axes", x: float, extent: Extent, colour: str) -> None:
    from matplotlib.patches import Rectangle

    top, bottom = extent
    axes.add_patch(Rectangle((x, top), 0.03, bottom - top, facecolor=colour, edgecolor="none"))


def _draw_ribbon(axes: "Axes", left_top: float, right_top: float, thickness: float, colour: str) -> None:
    """Draw a ribbon from x = 0 to x = 1: its upper edge to the right, its lower edge back."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    left_bottom = left_top + thickness
    right_bottom = right_top + thickness
    corners = [
        (0, left_top),
        *[(0.5, left_top), (0.5, right_top), (1, right_top)],
        (1, right_bottom),
        *[(0.5, right_bottom), (0.5, left_bottom), (0, left_bottom)],
        (0, left_top),
    ]
    curve = [Path.CURVE4] * 3
    codes = [Path.MOVETO, *curve, Path.LINETO, *curve, Path.CLOSEPOLY]
    axes.add_patch(PathPatch(Path(corners, codes), facecolor=colour, edgecolor="none", alpha=0.45))


def _spread(middles: Sequence[float], step: float, height: float) -> list[float]:
    """Return the places of labels in a column, as near to their middles as they get at `step` from one another.

    >>> _spread([0.5, 0.6, 1.0], 0.25, 1.0)
    [0.375, 0.625, 0.875]
    """
    places = list[float]()
    below = step / 2
    for middle in middles:
        places.append(max(middle, below))
        below = places[-1] + step
    above = height - step / 2
    for number in reversed(range(len(places))):
        places[number] = min(places[number], above)
        above = places[number] - step
    return places


def _stack(sizes: Mapping[str, float], total: float, height: float) -> dict[str, Extent]:
    """Return where each box of a column begins and ends, with equal gaps over the whole height."""
    extents = dict[str, Extent]()
    gap = (height - 1) / max(len(sizes) - 1, 1)
    top = 0.0
    for name, size in sizes.items():
        extents[name] = (top, top + size / total)
        top += size / total + gap
    return extents


def values_of(values: Mapping[str, float], names: Sequence[str]) -> list[float]:
    """Return the values of these names, in their order."""
    return [values[name] for name in names]


def draw_bars(labels: Sequence[str], bars: Bars, unit: str) -> Markup:
    """Draw bars to the right, a group for each label and in it one for each series."""
    with _style():
        from matplotlib.ticker import MaxNLocator

        thick = 0.8 / len(bars)
        axes = _axes(height=0.75 + len(labels) * max(0.24, 0.16 * len(bars)))
        for number, (name, values) in enumerate(bars.items()):
            offset = (number - (len(bars) - 1) / 2) * thick
            heights = [row + offset for row in range(len(labels))]
            axes.barh(heights, values, thick * 0.9, color=_SERIES[number], label=short(name))
        axes.set_yticks(range(len(labels)), [short(label) for label in labels])
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.set_xlabel(unit)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(lambda value, _: _brief(value))
        _legend(axes, len(bars))
        return _svg(axes.figure)


def draw_columns(labels: Sequence[str], values: Sequence[float], x: str, y: str) -> Markup:
    """Draw columns, such as of a histogram; the scale is logarithmic: the few large ones count."""
    with _style():
        axes = _axes()
        axes.bar(range(len(labels)), values, 0.8, color=_SERIES[0])
        axes.set_xlim(-0.6, max(len(labels), 6) - 0.4)
        step = max(1, -(-len(labels) // 7))
        axes.set_xticks(range(0, len(labels), step), list(labels)[::step])
        axes.set_yscale("symlog", linthresh=1)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.yaxis.set_major_formatter(lambda value, _: _brief(value))
        return _svg(axes.figure)


def draw_curves(curves: Curves, x: str, y: str, histogram: Sequence[tuple[float, float]] = ()) -> Markup:
    """Draw lines, and behind them a `histogram` of (x, share of the highest column)."""
    with _style():
        axes = _axes()
        if histogram:
            places, heights = zip(*histogram, strict=True)
            axes.bar(places, heights, 0.9 * (places[1] - places[0]), color=_SERIES[1], alpha=0.5, align="edge")
        for number, (name, points) in enumerate(curves.items()):
            dashes = number // len(_SERIES)
            axes.plot(
                [x_value for x_value, _ in points],
                [y_value for _, y_value in points],
                color=_SERIES[number % len(_SERIES)],
                linestyle=_DASHES[dashes % len(_DASHES)],
                linewidth=1.3,
                marker="o" if len(points) < 2 else None,
                label=short(name),
            )
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        _legend(axes, len(curves))
        return _svg(axes.figure)


def draw_passes(timeline: Timeline) -> Markup:
    """Draw the passes of a pipeline: a row for each rank, a box for each pass with its micro-batch."""
    with _style():
        axes = _axes(height=0.9 + 0.3 * len(timeline.ranks), width=7.0)
        draw_timeline(timeline, axes)
        axes.set_title("", loc="left")
        axes.set_xlabel("seconds")
        return _svg(axes.figure)


def draw_matrix(names: Sequence[str], values: Sequence[Sequence[float]], rows: str, columns: str) -> Markup:
    """Draw a square of cells with their numbers, the darker the larger the share of the largest."""
    with _style():
        from matplotlib.patches import Rectangle

        axes = _axes(height=1.4 + 0.36 * len(names))
        greatest = max(map(max, values)) or 1
        for row, row_values in enumerate(values):
            for column, value in enumerate(row_values):
                corner = (column - 0.48, row - 0.48)
                alpha = 0.04 + 0.6 * value / greatest
                text = f"{value:,.0f}" if value < 1e5 else f"{value:.0e}"
                axes.add_patch(Rectangle(corner, 0.96, 0.96, facecolor=_SERIES[0], alpha=alpha, edgecolor="none"))
                axes.text(column, row, text, ha="center", va="center", fontsize=7)
        axes.set_xlim(-0.5, len(names) - 0.5)
        axes.set_ylim(len(names) - 0.5, -0.5)
        labels = [short(name) for name in names]
        axes.set_xticks(range(len(names)), labels, rotation=35, ha="right")
        axes.set_yticks(range(len(names)), labels)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_xlabel(columns)
        axes.set_ylabel(rows)
        return _svg(axes.figure)


def draw_heat(names: Sequence[str], values: Sequence[Sequence[float]], top: float, rows: str, columns: str) -> Markup:
    """Draw a row of cells for each name, from white, 0, to dark, `top`; beyond 64, the largest of neighbours."""
    with _style():
        axes = _axes(height=1.4 + min(6.0, 0.2 * len(names)), width=7.0)
        columns_per_cell = -(-len(values[0]) // _MAX_CELLS)
        edges = [*range(0, len(values[0]), columns_per_cell), len(values[0])]
        cells = list[list[float]]()
        for row in values:
            cells.append([max(row[first:end]) for first, end in pairwise(edges)])
        axes.pcolormesh(edges, range(len(names) + 1), cells, cmap="Blues", vmin=0, vmax=top)
        step = max(1, -(-len(names) // 16))
        axes.set_yticks([row + 0.5 for row in range(0, len(names), step)], list(names)[::step])
        axes.invert_yaxis()
        axes.spines[:].set_visible(False)
        axes.set_xlabel(columns)
        axes.set_ylabel(rows)
        return _svg(axes.figure)


def _style() -> Any:
    """Return a context in which matplotlib draws for a page."""
    try:
        import matplotlib as mpl
    except ModuleNotFoundError as error:
        raise UsageError(
            "the report's pictures need matplotlib, which is not installed: pip install 'gristmill[report]'"
        ) from error
    return mpl.rc_context(_STYLE)  # type: ignore[arg-type]


def _axes(height: float = 2.8, width: float = _WIDTH) -> "Axes":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.patch.set_visible(False)
    axes = figure.add_subplot()
    axes.patch.set_visible(False)
    return axes


def _brief(value: float) -> str:
    """Return a number for an axis.

    >>> [_brief(value) for value in (0, 0.5, 250, 20_000, 3e6, 1e9)]
    ['0', '0.5', '250', '20k', '3M', '1G']
    """
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def _legend(axes: "Axes", series: int) -> None:
    if series > 1:
        axes.figure.legend(loc="outside upper left", ncols=min(series, 3), frameon=False, fontsize=8)


def _svg(figure: Any) -> Markup:
    """Return the figure as an element of a page: without a size of its own, in the page's colours."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    file = io.StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that its font lacks: the browser's fonts have them
        # Not savefig, which draws twice: first to see how large the figure is
        FigureCanvasSVG(figure).print_svg(file, metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", text)  # the same in each picture; none refers to them
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    text = text.replace("'DejaVu Sans'", "system-ui, sans-serif").replace("<svg", '<svg role="img"', 1)
    return Markup(text)  # matplotlib has escaped its labels


def largest(names: Iterable[str], sizes: Mapping[str, float], count: int) -> list[str]:
    """Return the `count` largest of the names, in their own order."""
    ordered = list(names)
    chosen = set(sorted(ordered, key=lambda name: (-sizes.get(name, 0), name))[:count])
    return [name for name in ordered if name in chosen]


def group_small(sizes: Mapping[str, float], count: int, always: Sequence[str] = ()) -> dict[str, str]:
    """Return a label of each name: its own if it is among the `count` largest or `always`, or else one for all others.

    >>> group_small({"a": 5, "b": 1, "c": 2}, 1)
    {'a': 'a', 'b': '2 others', 'c': '2 others'}
    """
    optional = [name for name in sizes if name not in always]
    chosen = {*always, *largest(optional, sizes, count - len(always))}
    grouped = len(sizes) - len(chosen)
    if grouped == 1:  # a label of its own says more
        return {name: name for name in sizes}
    labels = dict.fromkeys(sizes, count_of(grouped, "other"))
    for name in chosen & sizes.keys():
        labels[name] = name
    return labels
