"""Crossings: a layer's time by ways of dividing it over more and more ranks, and for longer and longer sequences."""

from collections.abc import Mapping
from dataclasses import replace

from gristmill.errors import UsageError
from gristmill_planner.cost.fitted_constants import Constants
from gristmill_planner.cost.hardware import Cluster, Device
from gristmill_planner.cost.planned_run import PlannedRun
from gristmill_planner.cost.step_time import layer_time
from training.experimental.parallel_config import ParallelConfig
from training.model.model_config import ModelConfig

_ONE_STAGE = {"dp": 1, "zero_group": 1, "virtual_stages": 1, "micro_batches": 1}


def divisions(ranks: int) -> Mapping[str, ParallelConfig]:
    """Every way of dividing a layer over `ranks`, by name; of 2.5D that with most layers."""
    found = {"1D": ParallelConfig(tp=ranks, sequence_parallel=True)}
    for side in range(2, ranks):
        if side * side == ranks:
            found["2D"] = ParallelConfig(tp=ranks, tensor="2d")
        depth = ranks // (side * side)
        if 2 <= depth <= side and side * side * depth == ranks:
            found.setdefault("2.5D", ParallelConfig(tp=ranks, tensor="2.5d", depth=depth))
        if side**3 == ranks:
            found["3D"] = ParallelConfig(tp=ranks, tensor="3d")
    found |= {"ring": ParallelConfig(cp=ranks), "Ulysses": ParallelConfig(cp=ranks, context="ulysses")}
    return {name: replace(layout, **_ONE_STAGE) for name, layout in found.items()}  # type: ignore[arg-type]


def layer_seconds(
    model: ModelConfig, device: Device, ranks: int, sequences: int, seq_len: int, constants: Constants
) -> dict[str, tuple[float, float]]:
    """Seconds of a layer's two passes of a micro-batch of `sequences` on nodes of 8, and those of collectives.

    By name of the division; without those that the trainer refuses.
    """
    found = {}
    for name, layout in divisions(ranks).items():
        try:
            layout.check(ranks, model, seq_len)
        except UsageError:
            continue
        time = layer_time(PlannedRun(model, layout, sequences, seq_len, Cluster(device, ranks)), constants)
        found[name] = (time.forward + time.backward, time.collectives)
    return found
