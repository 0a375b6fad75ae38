"""Hardware file: a device and the constants that were measured with it, as TOML."""

import math
import tomllib
from dataclasses import asdict, fields
from pathlib import Path

import msgspec

from gristmill.errors import UsageError, require, wrap_write_errors
from gristmill_planner.cost.fitted_constants import Constants
from gristmill_planner.cost.hardware import Device

SUFFIX = ".toml"
_MAY_BE_NONE = {"processors"}  # also missing, as in files from before there was a field for them


class _File(msgspec.Struct, forbid_unknown_fields=True):
    device: Device
    constants: Constants


def check_name(path: Path) -> None:
    """Raise UsageError for another suffix than .toml."""
    require(
        path.suffix == SUFFIX,
        f"--calibrate {path}: wanted a file name that ends in {SUFFIX}, for example --calibrate cpu{SUFFIX}",
    )


def write_hardware(path: Path, device: Device, constants: Constants) -> None:
    """Write both to `path`. Raises OutputError if it cannot be written."""
    lines = ["# Written by gristmill plan --calibrate"]
    for section, values in (("device", device), ("constants", constants)):
        lines += [f"[{section}]", *(f"{name} = {_toml(value)}" for name, value in asdict(values).items())]
    with wrap_write_errors(path):
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_hardware(path: Path) -> tuple[Device, Constants]:
    """Read what `write_hardware` wrote. Raises UsageError for a field that is missing, unknown or impossible."""
    advice = "wanted a file as gristmill plan --calibrate writes it"
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        found = msgspec.convert(table, _File)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise UsageError(f"--gpu {path}: {error}; {advice}") from error
    for section, kind in (("device", Device), ("constants", Constants)):
        names, values = {each.name for each in fields(kind)}, table[section]
        for name in sorted((names ^ values.keys()) - _MAY_BE_NONE):
            problem = "is missing" if name in names else "is not known"
            raise UsageError(f"--gpu {path}: {section}.{name} {problem}; {advice}")
        for name, value in values.items():
            if isinstance(value, str):
                continue
            positive = (section == "device" and name not in _MAY_BE_NONE) or name.endswith("_share")
            least = "more than 0" if positive else "0 or more"
            possible = value > 0 or (value == 0 and least == "0 or more") or value is False
            require(
                possible and math.isfinite(value),
                f"--gpu {path}: {section}.{name} is {value}; wanted a finite number, {least}",
            )
    return found.device, found.constants


def _toml(value: str | bool | float) -> str:
    if isinstance(value, str):
        return msgspec.json.encode(value).decode()  # TOML's basic strings are escaped alike
    return str(value).lower() if isinstance(value, bool) else f"{value:.5g}"
