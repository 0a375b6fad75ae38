"""Communication time: seconds of collectives and messages, and of what no computation hides within a layer.

A ring over n ranks moves (n - 1) / n of the bytes through each link in a gather, and twice that in an all-reduce
(Thakur et al. 2005; Patarasuk and Yuan 2009). Which ranks these are is given by PlannedRun.axes.

What a layer sends is that of each kind's traffic.py, which the certificate compares with real steps. Ring attention
sends keys and values while queries meet those before; SUMMA broadcasts the blocks of the next round during one. Both
are hidden up to as long as that takes, where a device's collectives run during its passes.
"""

from collections.abc import Mapping
from typing import NamedTuple

from gristmill_planner.compute_time import IMBALANCE, rank_sequences
from gristmill_planner.fitted_constants import Constants
from gristmill_planner.hardware import Cluster
from gristmill_planner.planned_run import PlannedRun, RankAxis
from training.experimental.grids.traffic import CubeTraffic, GridSizes, GridTraffic, ModuleTraffic, Passes
from training.parallel.context.traffic import ContextSizes, attention_traffic

_SENT = {"all-reduce": 2.0, "all-gather": 1.0, "reduce-scatter": 1.0, "all-to-all": 1.0}  # times (n - 1) / n


def collective_time(
    cluster: Cluster, constants: Constants, axis: RankAxis, operation: str, calls: float, size: float
) -> float:
    """Return the seconds of `calls` collectives or messages along an axis, of `size` bytes together.

    `size` as training/parallel/traffic_counter.py counts it. Rings of all ranks of a node share its cards: one rank's
    message crosses to the next node for all of a ring that are in the node. What an all-to-all sends to other nodes
    goes through the card of each rank.
    """
    ranks, stride = axis
    if ranks == 1 or operation == "receive":  # which another rank sends
        return 0.0
    device = cluster.device
    inside = min(ranks, max(1, cluster.per_node // stride))
    latency = constants.collective_latency * calls
    sent = size * _SENT[operation] * (ranks - 1) / ranks if operation in _SENT else size
    within = sent / (constants.link_share * device.link)
    if inside == ranks:
        return within + latency
    outside = (ranks - inside) / (ranks - 1) if operation == "all-to-all" else 1 / inside
    return max(within, outside * sent / (constants.network_share * device.network)) + 3 * latency


def gradient_all_reduce(
    cluster: Cluster, constants: Constants, axis: RankAxis, size: float, share: float = 0.0
) -> float:
    """Return the seconds to sum `size` bytes along an axis: within each node first, then between nodes.

    The rings of all ranks of a node share its network cards, of which they reach the more if each has one rank there. A
    reduce-scatter and a gather of the same bytes, as ZeRO takes them (Rajbhandari et al. 2020, section 7.1), take as
    long. `share` of the cards: 0 as fitted.
    """
    ranks, stride = axis
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


def message(cluster: Cluster, constants: Constants, size: float) -> float:
    """Return the seconds to send `size` bytes to the next stage, in another node if there is one."""
    device = cluster.device
    if cluster.devices <= cluster.per_node:
        return size / (constants.link_share * device.link) + constants.collective_latency
    return size / (constants.network_share * device.network) + constants.collective_latency


_WIDE = 4  # bytes of a statistic, and of a gradient that ranks add to


class Seconds(NamedTuple):
    """Seconds of a forward and of a backward pass."""

    forward: float
    backward: float


def hidden_bytes(run: PlannedRun) -> float:
    """Return the bytes of a micro-batch's residual stream on a rank, before sequence parallelism divides it."""
    side = run.layout.grid[1]
    return float(run.cluster.device.element_bytes) * rank_sequences(run) * run.seq_len * run.model.width / side


def layer_collectives(run: PlannedRun, constants: Constants, products: Seconds, attention: Seconds) -> Seconds:
    """Return the seconds of one layer's collectives; its `products` with matrices and its `attention` take so long."""
    if run.layout.on_grid:
        return _grid_layer(run, constants, products)
    reduce = 2 * _all_reduce(run, constants) + _to_experts(run, constants)
    sent = _context(run, constants, attention) if run.layout.cp > 1 else Seconds(0.0, 0.0)
    return Seconds(reduce + sent.forward, reduce + sent.backward)


def head_collectives(run: PlannedRun, constants: Constants) -> float:
    """Return the seconds of the head's collectives, on a grid also the embedding's: forward and backward together."""
    if not run.layout.on_grid:
        return _all_reduce(run, constants)
    traffic = _grid_traffic(run)
    traffic.output(Passes(1, 1, 1))
    traffic.norms(1, 1, 1)
    traffic.embedding(1)
    return _seconds(traffic, run, constants)


def _all_reduce(run: PlannedRun, constants: Constants) -> float:
    """Return the seconds of an all-reduce of the residual stream over tensor-parallel ranks."""
    return collective_time(run.cluster, constants, run.axes["tp"], "all-reduce", 1, hidden_bytes(run))


def _to_experts(run: PlannedRun, constants: Constants) -> float:
    """Return the seconds of sending tokens to their experts and back, of a layer on average: two all-to-alls a pass."""
    model = run.model
    sparse = len(run.model.sparse_layers) / run.model.layers
    size = 2 * IMBALANCE * sparse * model.experts_per_token * hidden_bytes(run)
    return collective_time(run.cluster, constants, run.axes["ep"], "all-to-all", 2 * sparse, size)


def _context(run: PlannedRun, constants: Constants, attention: Seconds) -> Seconds:
    """Return the seconds of context parallelism that attention does not hide: part of a ring's, all of Ulysses'."""
    layout = run.layout
    tokens = round(rank_sequences(run) * run.seq_len)
    widths = layout.attention_widths(run.model)
    itemsize = run.cluster.device.element_bytes
    sizes = ContextSizes(layout.context, layout.cp, tokens, *widths, itemsize, _WIDE)
    forward = _not_hidden(run, constants, attention_traffic(sizes, 1, 0), attention.forward)
    backward = _not_hidden(run, constants, attention_traffic(sizes, 0, 1), attention.backward)
    return Seconds(forward, backward)


def _not_hidden(
    run: PlannedRun, constants: Constants, traffic: Mapping[str, tuple[int, int]], computing: float
) -> float:
    """Return the seconds of context parallelism's traffic in a pass, without those that a ring's computing hides."""
    seconds = 0.0
    for operation, (calls, size) in traffic.items():
        seconds += collective_time(run.cluster, constants, run.axes["cp"], operation, calls, size)
    if run.layout.context == "ring" and run.cluster.device.overlaps:
        return max(0.0, seconds - computing)
    return seconds


def _grid_traffic(run: PlannedRun) -> CubeTraffic | GridTraffic:
    """Return the traffic of a rank off the diagonal, which sends most."""
    sequences = round(rank_sequences(run))
    itemsize = run.cluster.device.element_bytes
    sizes = GridSizes(run.model, run.layout.grid[1], 0, 1, sequences * run.seq_len, itemsize, _WIDE, sequences)
    return CubeTraffic(sizes) if run.layout.tensor == "3d" else GridTraffic(sizes)


def _grid_layer(run: PlannedRun, constants: Constants, products: Seconds) -> Seconds:
    """Return the seconds of a grid's layer: SUMMA hides all rounds but one behind products; a cube hides nothing."""
    forward = _grid_pass(run, constants, Passes(1, 0, 0), products.forward)
    backward = _grid_pass(run, constants, Passes(0, 1, 1), products.backward)
    return Seconds(forward, backward)


def _grid_pass(run: PlannedRun, constants: Constants, passes: Passes, computing: float) -> float:
    traffic = _grid_traffic(run)
    traffic.blocks(passes)
    seconds = _seconds(traffic, run, constants)
    if run.layout.tensor == "3d" or not run.cluster.device.overlaps:
        return seconds
    side = run.layout.grid[1]
    return seconds - min(seconds, computing) * (side - 1) / side


def _seconds(traffic: ModuleTraffic, run: PlannedRun, constants: Constants) -> float:
    """Return the seconds of all calls of a rank of a grid."""
    seconds = 0.0
    for (axis, operation), (calls, size) in traffic.volumes.items():
        seconds += collective_time(run.cluster, constants, run.axes[axis], operation, calls, size)
    return seconds
