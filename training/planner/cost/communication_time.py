"""Communication time: seconds of collectives and messages over the links of a node and the network between nodes.

A ring over n ranks moves (n - 1) / n of the bytes through each link in a gather, and twice that in an all-reduce
(Thakur et al. 2005; Patarasuk and Yuan 2009). Ranks are numbered tensor-parallel first, then data, then pipeline.
"""

from training.planner.cost.fitted_constants import Constants
from training.planner.cost.hardware import Cluster


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


def message(cluster: Cluster, constants: Constants, size: float) -> float:
    """Seconds to send `size` bytes to the next stage, in another node if there is one."""
    device = cluster.device
    if cluster.devices <= cluster.per_node:
        return size / (constants.link_share * device.link) + constants.collective_latency
    return size / (constants.network_share * device.network) + constants.collective_latency
