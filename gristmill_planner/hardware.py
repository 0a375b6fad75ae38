"""Hardware: speeds and sizes of GPUs and of the links between them, from data sheets or from a measured file.

A file has a device and the constants that were measured with it, as TOML: `gristmill plan --calibrate` writes it.
"""

import tomllib
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import msgspec

from gristmill.arguments import one_of
from gristmill.config import Range, toml_lines
from gristmill.errors import UsageError, require, wrap_write_errors
from gristmill.wording import count_of
from gristmill_planner.fitted_constants import Constants

_GIB = 1 << 30
# Streaming multiprocessors of each kind of device.
_V100 = 80
_A100 = 108
_H100 = 132
_B200 = 148


@dataclass(frozen=True)
class Device:
    """One accelerator, and the links of a node of it as it is usually sold.

    All rates are the data sheet's, per second; what of them is reached is in fitted_constants.py.
    """

    name: str
    flops: float
    """Dense products, FLOP/s; in 16 bits."""
    memory: float
    """Bytes."""
    bandwidth: float
    """Of its memory, bytes/s."""
    link: float
    """To the other devices of its node, bytes/s in each direction."""
    network: float
    """Of its share of the node's network cards, bytes/s in each direction."""
    source: str = ""
    processors: int = 0
    """Streaming multiprocessors, to which the tiles of a product are given in waves; 0: it has none."""
    element_bytes: int = 2
    """Of a number that it computes with."""
    overlaps: bool = True
    """Collectives can run during passes."""
    watts: int = 0
    """Power with which the sheet's rates are reached; 0: not known."""

    @property
    def is_gpu(self) -> bool:
        """Return False for a CPU, which computes in float32, and needs no memory for CUDA."""
        return self.element_bytes == 2


DEVICES = {
    device.name: device
    for device in (
        Device(
            "v100",
            125e12,
            32 * _GIB,
            0.9e12,
            150e9,
            6.25e9,
            "NVIDIA V100 SXM2-32, DGX-2; 8 x 100 Gb/s for 16",
            _V100,
            watts=300,
        ),
        Device(
            "a100-40gb",
            312e12,
            40 * _GIB,
            1.555e12,
            300e9,
            25e9,
            "NVIDIA A100 SXM4-40; 200 Gb/s each",
            _A100,
            watts=400,
        ),
        Device(
            "a100-80gb",
            312e12,
            80 * _GIB,
            2.039e12,
            300e9,
            25e9,
            "NVIDIA A100 SXM4-80; 200 Gb/s each",
            _A100,
            watts=400,
        ),
        Device("h100", 989.4e12, 80 * _GIB, 3.35e12, 450e9, 50e9, "NVIDIA H100 SXM5; 400 Gb/s each", _H100, watts=700),
        Device("h200", 989.4e12, 141e9, 4.8e12, 450e9, 50e9, "NVIDIA H200 SXM5; 400 Gb/s each", _H100, watts=700),
        Device(
            "b200",
            2.25e15,
            180e9,
            8e12,
            900e9,
            50e9,
            "NVIDIA DGX B200 data sheet, MLPerf v6.0; 400 Gb/s each",
            _B200,
            watts=1000,
        ),
        Device("ascend-910", 256e12, 32 * _GIB, 1.2e12, 30e9, 12.5e9, "Huawei Ascend 910, Liao et al. 2019; 100 Gb/s"),
    )
}


@dataclass(frozen=True)
class Cluster:
    """`devices` devices in nodes of `per_node`."""

    device: Device
    devices: int
    per_node: int = 8

    def __post_init__(self) -> None:
        if self.devices < 1 or self.per_node < 1:
            raise UsageError(
                f"a cluster of {count_of(self.devices, 'GPU')} in nodes of {self.per_node}; expected 1 or more of "
                "each, for example --gpus 8 --nodes_of 8"
            )

    @property
    def fills_nodes(self) -> bool:
        """Return whether no node but a lone one is used in part."""
        return self.devices % self.per_node == 0 or self.devices < self.per_node

    def with_network(self, node_bytes: float) -> "Cluster":
        """Return this device with network cards that carry `node_bytes` a second for a node, in each direction."""
        return replace(self, device=replace(self.device, network=node_bytes / self.per_node))


def find_device(name: str) -> Device:
    """Return the device called `name`. Raises UsageError for one that is not in the table, naming the most similar."""
    if name not in DEVICES:
        raise UsageError(f"gpu {name!r} is not in the planner's table; {one_of(name, DEVICES)}")
    return DEVICES[name]


SUFFIX = ".toml"
_MAY_BE_NONE = {"processors", "watts"}  # also missing, as in files from before there was a field for them


class _File(msgspec.Struct, forbid_unknown_fields=True):
    device: Device
    constants: Constants


def check_name(path: Path) -> None:
    """Raise UsageError for another suffix than .toml."""
    require(
        path.suffix == SUFFIX,
        f"--calibrate {path}: expected a file name that ends in {SUFFIX}, for example --calibrate cpu{SUFFIX}",
    )


def write_hardware(path: Path, device: Device, constants: Constants) -> None:
    """Write both to `path`. Raises OutputError if it cannot be written."""
    sections = {"device": _rounded(device), "constants": _rounded(constants)}
    with wrap_write_errors(path):
        path.write_text("\n".join(["# Written by gristmill plan --calibrate", *toml_lines(sections), ""]), "utf-8")


def _rounded(values: Device | Constants) -> dict[str, Any]:
    """Return the fields of `values`, numbers with five digits."""
    rounded = dict[str, Any]()
    for name, value in asdict(values).items():
        rounded[name] = float(f"{value:.5g}") if isinstance(value, float) else value
    return rounded


def read_hardware(path: Path) -> tuple[Device, Constants]:
    """Read what `write_hardware` wrote. Raises UsageError for a field that is missing, unknown or impossible."""
    advice = "expected a file as gristmill plan --calibrate writes it"
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        file = msgspec.convert(table, _File)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise UsageError(f"--gpu {path}: {error}; {advice}") from error
    for section, kind in (("device", Device), ("constants", Constants)):
        names = {field.name for field in fields(kind)}
        values = table[section]
        for name in sorted((names ^ values.keys()) - _MAY_BE_NONE):
            problem = "is missing" if name in names else "is not known"
            raise UsageError(f"--gpu {path}: {section}.{name} {problem}; {advice}")
        for name, value in values.items():
            positive = (section == "device" and name not in _MAY_BE_NONE) or name.endswith("_share")
            fault = "" if isinstance(value, (str, bool)) else Range(0, above=positive).fault(value)
            require(not fault, f"--gpu {path}: {section}.{name} is {value}; expected {fault}")
    return file.device, file.constants
