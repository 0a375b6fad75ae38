"""Noise of measured steps, and what rank correlation a planner can reach in spite of it.

Layouts that differ in the micro-batch m alone take a + b m + c / m seconds, with no term below 0: the bubble grows with
m, and what is spent on each micro-batch or saturates with its size falls. How far measured rows are from every such
curve is noise that no model of the layout explains; it is found without the planner.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean

import numpy as np
from scipy.optimize import nnls
from scipy.stats import spearmanr

from scripts.planner_rows import MeasuredRow

_NOISE = (0.01, 0.02, 0.03, 0.05)
_NORMAL = np.random.default_rng(1).normal(size=1000)
_DRAWS = 300
_FEWEST = 5  # rows of a model


def rank_correlation(rows: Iterable[MeasuredRow], predicted: dict[int, float]) -> tuple[float, int]:
    """Spearman's, of the rows of one model, in layout and batch; the mean of models with five or more; their number."""
    found = [
        spearmanr([predicted[id(row)] for row in group], [row.seconds for row in group]).statistic
        for group in _by_model(rows)
    ]
    return (fmean(found), len(found)) if found else (math.nan, 0)


def print_noise(rows: Sequence[MeasuredRow], predicted: dict[int, float]) -> None:
    """Print how far rows are from curves of their layout, and the rank correlation of a perfect model with noise."""
    for layout, found in curve_deviations(rows).items():
        print(f"  {layout}: off a + b m + c / m by {', '.join(f'{100 * each:+.1f} %' for each in found)}")
    reached = {f"{100 * noise:.0f} %": perfect_correlation(rows, predicted, noise * _NORMAL) for noise in _NOISE}
    errors = [math.log(row.seconds / predicted[id(row)]) for row in rows if row.seconds is not None]
    reached["all that is not predicted"] = perfect_correlation(rows, predicted, errors)
    words = ", ".join(f"{value:.3f} ({name})" for name, value in reached.items())
    print(f"Spearman of a perfect model, on average, by the size of the noise: {words}")


def curve_deviations(rows: Iterable[MeasuredRow]) -> dict[str, list[float]]:
    """Of each layout with three or more micro-batches, by least squares: shares, from the smallest micro-batch on."""
    groups: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in rows:
        layout = row.run.layout
        name = f"{row.size}, tp {layout.tp}, pp {layout.pp}, dp {layout.dp}"
        groups[name].append((row.run.micro_batch, row.seconds or math.nan))
    return {name: _deviations(np.array(sorted(group))) for name, group in groups.items() if len(group) >= 3}


def _deviations(points: np.ndarray) -> list[float]:
    """`points`: micro-batch and seconds of each row, (rows, 2)."""
    micro, seconds = points.T
    terms = np.stack([np.ones_like(micro), micro, 1 / micro], axis=1) / seconds[:, None]
    weights, _ = nnls(terms, np.ones(len(points)))
    return list(1 / (terms @ weights) - 1)


def perfect_correlation(
    rows: Iterable[MeasuredRow], true: dict[int, float], errors: Sequence[float] | np.ndarray, draws: int = _DRAWS
) -> float:
    """Mean rank correlation of a model that predicts `true`, with measurements off by one of `errors` each, as logs."""
    random = np.random.default_rng(0)
    seconds = [np.array([true[id(row)] for row in group]) for group in _by_model(rows)]
    return fmean(
        spearmanr(each, each * np.exp(random.choice(errors, len(each)))).statistic
        for each in seconds
        for _ in range(draws)
    )


def _by_model(rows: Iterable[MeasuredRow]) -> list[list[MeasuredRow]]:
    """Models with five rows or more."""
    groups = defaultdict(list)
    for row in rows:
        groups[row.run.model].append(row)
    return [group for group in groups.values() if len(group) >= _FEWEST]
