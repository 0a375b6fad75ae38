"""The start of a run, as run.json and checkpoints record it: when, where, with which versions and data."""

import platform
import shlex
import socket
import sys
from collections.abc import Mapping
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from gristmill.paths import scheme_of
from training.checkpoint.run_file import OWN_CODE
from training.data.data_config import DataConfig

_LIBRARIES = ("gristmill", "torch", "numpy")


def describe_start(
    data: DataConfig,
    processes: int,
    device: torch.device,
    dp: int,
    steps_done: int,
    own_code: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return date, host of rank 0, command, versions, device and folders of data of a start after `steps_done` steps.

    `dp`: the data-parallel ranks, which read different sequences. `own_code`: SHA-256 of the user's files by name.
    """
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "command": shlex.join(sys.orig_argv),
        "steps_done": steps_done,
        "processes": processes,
        "dp": dp,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _LIBRARIES}},
        "data": data_folders(data),
        **({OWN_CODE: dict(own_code)} if own_code else {}),
        **({"weights": list(data.weights)} if data.weights else {}),  # run.json has their shares, rounded
    }


def data_folders(data: DataConfig) -> dict[str, list[str]]:
    """Return the folders of token shards that are read, by what for."""
    folders = {"train": list(data.train_folders), "holdout": [data.holdout]}
    for name, folder in data.holdouts.items():
        folders[f"holdout {name}"] = [folder]
    return {name: [str(_place(folder)) for folder in of] for name, of in folders.items()}


def summarize_start(start: dict[str, Any]) -> str:
    """Return the line of a log that says when, where and with which versions a run was started."""
    versions = ", ".join(f"{name} {number}" for name, number in start["versions"].items())
    return f"{start['date']} on {start['host']}: {versions}"


def _version(library: str) -> str:
    if library == "torch":
        return str(torch.__version__)
    try:
        return version(library)
    except PackageNotFoundError:  # a checkout that was not installed
        return "unknown"


def _place(folder: Path) -> Path:
    """Return where a folder is, from any other: its absolute path; that of one in a bucket as it is."""
    return folder if scheme_of(folder) else folder.absolute()
