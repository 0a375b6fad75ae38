"""Communication time: seconds of collectives and messages, and of what no computation hides within a layer.

A ring over n ranks moves (n - 1) / n of the bytes through each link in a gather, and twice that in an all-reduce
(Thakur et al. 2005; Patarasuk and Yuan 2009). Ranks are numbered tensor-parallel first, then data, then pipeline.

What a layer sends is that of each kind's traffic.py, which the certificate compares with real steps. Ring attention
sends keys and values while queries meet those before; SUMMA broadcasts the blocks of the next round during one. Both
are hidden up to as long as that takes, where a device's collectives run beside its passes.
"""

from typing import NamedTuple

from gristmill_planner.compute_time import rank_sequences, sides
from gristmill_planner.fitted_constants import Constants
from gristmill_planner.hardware import Cluster
from gristmill_planner.planned_run import PlannedRun
from training.experimental.grids.cube_traffic import CubeTraffic
from training.experimental.grids.grid_traffic import GridSizes, GridTraffic, ModuleTraffic, Passes
from training.experimental.parallel_config import ParallelConfig
from training.parallel.context.traffic import ContextSizes, attention_traffic


def tensor_all_reduce(cluster: Cluster, constants: Constants, ranks: int, size: float) -> float:
    """Seconds to sum `size` bytes over `ranks` neighbours; beyond a node its network cards carry the ring together."""
    if ranks == 1:
        return 0.0
    device = cluster.device
    steps = 2 * (ranks - 1) / ranks
    inside = steps * size / (constants.link_share * device.link)
    latency = constants.collective_latency
    if ranks <= cluster.per_node:
        return inside + latency
    return max(inside, steps * size / (constants.network_share * device.network * cluster.per_node)) + 3 * latency


def gradient_all_reduce(
    cluster: Cluster, constants: Constants, stride: int, ranks: int, size: float, share: float = 0.0
) -> float:
    """Seconds to sum `size` bytes over `ranks` that are `stride` apart: within each node first, then between nodes.

    The rings of all ranks of a node share its network cards, of which they reach the more if each has one rank there. A
    reduce-scatter and a gather of the same bytes, as ZeRO takes them (Rajbhandari et al. 2020, section 7.1), take as
    long. `share` of the cards: 0 as fitted.
    """
    device = cluster.device
    inside = max(1, min(ranks, cluster.per_node // stride))
    nodes = -(-ranks // inside)
    sharing = min(cluster.per_node, stride * inside) / inside
    in_node = 2 * (inside - 1) / inside * size / (constants.link_share * device.link)
    if nodes == 1:
        return in_node
    fitted = constants.reduction_share if inside > 1 else constants.lone_reduction_share
    rate = (share or fitted) * device.network * cluster.per_node
    return in_node + 2 * (nodes - 1) / nodes * size * sharing / rate


_SENT = {"all-reduce": 2.0, "all-gather": 1.0, "reduce-scatter": 1.0, "all-to-all": 1.0}  # times (n - 1) / n


def collective_time(
    cluster: Cluster, constants: Constants, stride: int, ranks: int, operation: str, calls: float, size: float
) -> float:
    """Seconds of `calls` collectives or messages over `ranks` that are `stride` apart, of `size` bytes together.

    `size` as training/parallel/traffic_counter.py counts it. Rings of all ranks of a node share its cards, as in
    `tensor_all_reduce`: one rank's message crosses to the next node for all of a ring that are in the node. What an
    all-to-all sends to other nodes goes through the card of each rank.
    """
    if ranks == 1 or operation == "receive":  # which another rank sends
        return 0.0
    device, inside = cluster.device, min(ranks, max(1, cluster.per_node // stride))
    latency = constants.collective_latency * calls
    sent = size * _SENT[operation] * (ranks - 1) / ranks if operation in _SENT else size
    within = sent / (constants.link_share * device.link)
    if inside == ranks:
        return within + latency
    outside = (ranks - inside) / (ranks - 1) if operation == "all-to-all" else 1 / inside
    return max(within, outside * sent / (constants.network_share * device.network)) + 3 * latency


def message(cluster: Cluster, constants: Constants, size: float) -> float:
    """Seconds to send `size` bytes to the next stage, in another node if there is one."""
    device = cluster.device
    if cluster.devices <= cluster.per_node:
        return size / (constants.link_share * device.link) + constants.collective_latency
    return size / (constants.network_share * device.network) + constants.collective_latency


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
