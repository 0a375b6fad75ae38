"""Layer traffic: seconds of the communication within a layer and the head that no computation hides.

What is sent is that of each kind's traffic.py, which the certificate compares with real steps. Ring attention sends
keys and values while queries meet those before; SUMMA broadcasts the blocks of the next round during one. Both are
hidden up to as long as that takes, where a device's collectives run beside its passes.
"""

from typing import NamedTuple

from gristmill_planner.cost.communication_time import collective_time, tensor_all_reduce
from gristmill_planner.cost.fitted_constants import Constants
from gristmill_planner.cost.hardware import Cluster
from gristmill_planner.cost.planned_run import PlannedRun
from gristmill_planner.cost.rank_work import rank_sequences, sides
from training.experimental.grids.cube_traffic import CubeTraffic
from training.experimental.grids.grid_traffic import GridSizes, GridTraffic, ModuleTraffic, Passes
from training.experimental.parallel_config import ParallelConfig
from training.parallel.context.traffic import ContextSizes, attention_traffic

_WIDE = 4  # bytes of a statistic, and of a gradient that ranks add to


class Seconds(NamedTuple):
    """Of a forward and of a backward pass."""

    forward: float
    backward: float


def hidden_bytes(run: PlannedRun) -> float:
    """Bytes of a micro-batch's residual stream on a rank, before sequence parallelism divides it."""
    side = run.layout.grid[1]
    return float(run.cluster.device.element_bytes) * rank_sequences(run) * run.seq_len * run.model.width / side


def layer_collectives(run: PlannedRun, constants: Constants, products: Seconds, attention: Seconds) -> Seconds:
    """Of one layer; its `products` with matrices and its `attention` take so long."""
    layout = run.layout
    if layout.tensor != "1d":
        return _grid_layer(_grid_place(run), layout, run.cluster, constants, products)
    reduce = 2 * tensor_all_reduce(run.cluster, constants, layout.tp, hidden_bytes(run))
    if layout.cp == 1:
        return Seconds(reduce, reduce)
    sent = _context(run, constants, attention)
    return Seconds(reduce + sent.forward, reduce + sent.backward)


def head_collectives(run: PlannedRun, constants: Constants) -> float:
    """Of the output matrix and the loss, and on a grid of the embedding: forward and backward together."""
    if run.layout.tensor == "1d":
        return tensor_all_reduce(run.cluster, constants, run.layout.tp, hidden_bytes(run))
    found = _traffic(_grid_place(run), run.layout.tensor == "3d")
    found.output(Passes(1, 1, 1))
    found.norms(1, 1, 1)
    found.embedding(1)
    return _seconds(found, run.layout, run.cluster, constants)


def _context(run: PlannedRun, constants: Constants, attention: Seconds) -> Seconds:
    """Of a ring what is not hidden behind attention; of Ulysses all."""
    layout, model, cluster = run.layout, run.model, run.cluster
    tokens, widths = round(rank_sequences(run) * run.seq_len), (model.q_width // layout.tp, model.kv_width // layout.tp)
    sizes = ContextSizes(layout.context, layout.cp, tokens, *widths, cluster.device.element_bytes, _WIDE)
    found = []
    for passes, meanwhile in (((1, 0), attention.forward), ((0, 1), attention.backward)):
        each = attention_traffic(sizes, *passes)
        seconds = sum(
            collective_time(cluster, constants, layout.tp, layout.cp, operation, *volume)
            for operation, volume in each.items()
        )
        hides = layout.context == "ring" and cluster.device.overlaps
        found.append(max(0.0, seconds - meanwhile) if hides else seconds)
    return Seconds(*found)


def _grid_place(run: PlannedRun) -> GridSizes:
    """A rank off the diagonal, which sends most."""
    sequences, itemsize = round(rank_sequences(run)), run.cluster.device.element_bytes
    return GridSizes(run.model, run.layout.grid[1], 0, 1, sequences * run.seq_len, itemsize, _WIDE, sequences)


def _traffic(place: GridSizes, cube: bool) -> CubeTraffic | GridTraffic:
    return CubeTraffic(place) if cube else GridTraffic(place)


def _grid_layer(
    place: GridSizes, layout: ParallelConfig, cluster: Cluster, constants: Constants, products: Seconds
) -> Seconds:
    """SUMMA hides all rounds but one behind its products; a cube gathers before each product and hides nothing."""
    side, cube = sides(layout)
    found = []
    for passes, meanwhile in ((Passes(1, 0, 0), products.forward), (Passes(0, 1, 1), products.backward)):
        sent = _traffic(place, cube)
        sent.blocks(passes)
        seconds = _seconds(sent, layout, cluster, constants)
        hides = not cube and cluster.device.overlaps
        found.append(seconds - min(seconds, meanwhile) * (side - 1) / side if hides else seconds)
    return Seconds(*found)


def _seconds(found: ModuleTraffic, layout: ParallelConfig, cluster: Cluster, constants: Constants) -> float:
    """Of all calls of a rank of a grid, whose columns are neighbours, then its rows, then its layers."""
    depth, side, _ = layout.grid
    places = {"column": (1, side), "row": (side, side), "depth": (side * side, depth), "tp": (1, layout.tp)}
    return sum(
        collective_time(cluster, constants, *places[axis], operation, calls, found.bytes[axis, operation])
        for (axis, operation), calls in found.calls.items()
    )
