"""Layer division: layers over pipeline stages by dynamic programming on their costs, as Alpa's inter-operator pass."""

from collections.abc import Sequence

import numpy as np

from gristmill_planner.cost.fitted_constants import Constants
from gristmill_planner.cost.planned_run import PlannedRun
from gristmill_planner.cost.step_time import head_time, layer_time


def divide_by_cost(costs: Sequence[float], stages: int) -> list[int]:
    """Numbers of consecutive items of `costs` for each stage, with the least cost of the most expensive stage.

    Every stage gets one or more. (Zheng et al. 2022, section 5.2, for stages on equal devices; the least maximum is
    also the least step time if there are many micro-batches.) Takes stages x items² steps.
    """
    total = np.concatenate([[0.0], np.cumsum(costs)])
    count = len(costs)
    best = np.where(np.arange(count + 1) == 0, 0.0, np.inf)
    cuts = []
    for _ in range(stages):
        # worst[j, i]: the first i items are in the stages before, items i to j in this one
        worst = np.maximum(best[None, :], total[:, None] - total[None, :])
        worst[np.triu_indices(count + 1)] = np.inf
        cuts.append(worst.argmin(axis=1))
        best = worst.min(axis=1)
    ends = [count]
    for cut in reversed(cuts):
        ends.append(int(cut[ends[-1]]))
    return [end - start for start, end in zip(ends[:0:-1], ends[-2::-1], strict=True)]


def divided_by_time(run: PlannedRun, constants: Constants) -> tuple[int, ...]:
    """Layers of each stage of `run` with the least time of the slowest stage; the head's time is the last layer's."""
    layer, head = layer_time(run, constants), head_time(run, constants)
    costs = [layer.forward + layer.backward] * run.model.layers
    costs[-1] += head.forward + head.backward
    return tuple(divide_by_cost(costs, run.layout.stages))
