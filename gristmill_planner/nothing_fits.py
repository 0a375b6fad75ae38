"""Nothing fits: by how much the smallest layout misses a device's memory, and the least change that makes one fit."""

from collections.abc import Iterator
from dataclasses import replace

from gristmill.errors import UsageError
from gristmill_planner.cost.fitted_constants import Constants
from gristmill_planner.cost.hardware import DEVICES, Cluster
from gristmill_planner.layouts.plan_request import PlanRequest
from gristmill_planner.search import Choice, search

_GIB = 1 << 30
_MOST_TIMES = 64  # as many GPUs


def nothing_fits(request: PlanRequest, closest: Choice, constants: Constants) -> str:
    """What to say where no layout of `request` fits, and `closest` comes closest."""
    cluster, total = request.cluster, closest.memory.total
    text = (
        f"no layout fits {cluster.devices} x {cluster.device.name}: the smallest, {closest.run.layout.describe()} with "
        f"recompute {closest.run.recompute}, takes {total / _GIB:.1f} GiB a GPU, "
        f"{(total - cluster.device.memory) / _GIB:.1f} too many"
    )
    more = next((each for each in _more_devices(cluster) if _fits(request, each, constants)), None)
    if more is not None:
        more = next((each for each in _fewer_devices(cluster, more) if _fits(request, each, constants)), more)
    other = next((each for each in _larger_devices(cluster) if _fits(request, each, constants)), None)
    changes = [f"--gpus {more.devices}"] if more is not None else []
    changes += [f"--gpu {other.device.name}"] if other is not None else []
    return f"{text}; try {', or '.join(changes) or 'a smaller model'}"


def _more_devices(cluster: Cluster) -> Iterator[Cluster]:
    times = 2
    while times <= _MOST_TIMES:
        more = replace(cluster, devices=times * cluster.devices)
        if more.fills_nodes:
            yield more
        times *= 2


def _fewer_devices(cluster: Cluster, fits: Cluster) -> Iterator[Cluster]:
    """Three sizes between one that fits and half of it, which does not; of whole nodes."""
    half = fits.devices // 2
    for quarters in (1, 2, 3):
        devices = half + quarters * half // 4
        if devices > cluster.devices and 4 * devices == (4 + quarters) * half and devices % cluster.per_node == 0:
            yield replace(cluster, devices=devices)


def _larger_devices(cluster: Cluster) -> Iterator[Cluster]:
    """As many of other devices, by memory."""
    larger = [device for device in DEVICES.values() if device.memory > cluster.device.memory]
    for device in sorted(larger, key=lambda device: device.memory):
        yield replace(cluster, device=device)


def _fits(request: PlanRequest, cluster: Cluster, constants: Constants) -> bool:
    """False also where no layout divides the cluster."""
    try:
        return bool(search(replace(request, cluster=cluster), constants, 1).choices)
    except UsageError:
        return False
