"""Communication time: seconds of collectives and messages over the links of a node and the network between nodes.

A ring over n ranks moves (n - 1) / n of the bytes through each link in a gather, and twice that in an all-reduce
(Thakur et al. 2005; Patarasuk and Yuan 2009). Ranks are numbered tensor-parallel first, then data, then pipeline.
"""

from gristmill_planner.cost.fitted_constants import Constants
from gristmill_planner.cost.hardware import Cluster


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
