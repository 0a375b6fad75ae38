"""Command: what is installed here, what each extra would add, and what this machine can do."""

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path

import psutil
from rich.console import Group
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text
from tyro.conf import Positional

from gristmill.kernels import SUFFIX, cache_folders
from gristmill.wording import count_of

EXTRAS = {
    "train": "training, evaluation, Hugging Face models",
    "tokenizers": "tokenizer.json and byte-level BPE",
    "web": "web archives and HTML",
    "fasttext": "scores of fastText models",
    "classifier": "scores of Hugging Face classifiers",
    "language": "the rule `language` of recipes, and the recipe fineweb2",
    "personal": "telephone, card and account numbers in `personal` of recipes",
    "hub": "hf:// corpora",
    "report": "gristmill report",
    "ray": "--executor ray",
    "graph": "gristmill show-cluster",
    "ftfy": "--normalize.ftfy",
    "wandb": "--metrics.wandb",
    "eval": "gristmill evaluate --tasks, gristmill lm-eval",
    "mlflow": "--metrics.mlflow",
}  # in the order of how often they are asked for
DEVELOPMENT = frozenset(["test", "bench", "versions", "docs"])  # extras for the project itself
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def doctor(config: Positional[Path | None] = None) -> Group:
    """Print what is installed here, what each extra would add, and what this machine can do.

    It writes nothing and uses no network. A line that begins with "try" is a command to type.

    Args:
        config: The TOML file of a run: which extras that needs, all at once, and what for.
    """
    if config:
        return _extras_of_run(config)
    return Group(_machine(), Text(), _extras(), *map(Text, _advice()))


def requirements_of(extra: str) -> list[str]:
    """Return the distributions that an extra asks for; '': the ones that are always there."""
    names = list[str]()
    for line in requires("gristmill") or []:
        requirement, _, marker = line.partition(";")
        named = re.search(r"extra\s*==\s*[\"']([^\"']+)", marker)
        extra_of_line = named[1] if named else ""
        name = _NAME.match(requirement)
        if name and extra_of_line == extra:
            names.append(name[0])
    return names


def missing(extra: str) -> list[str]:
    """Return the distributions of an extra that are not installed."""
    return [name for name in requirements_of(extra) if not _version_of(name)]


def _version_of(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _machine() -> Table:
    memory = psutil.virtual_memory()
    disks = {"here": Path.cwd(), "temporary": Path(os.environ.get("TMPDIR", "/tmp"))}
    free = list[str]()
    for name, path in disks.items():
        if path.exists():
            free.append(f"{decimal(shutil.disk_usage(path).free)} {name}")
    rows = {
        "gristmill": f"{_version_of('gristmill')}, {Path(__file__).resolve().parents[1]}",
        "Python": f"{platform.python_version()}, {sys.executable}",
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}, {platform.machine()}",
        "memory": f"{decimal(memory.available)} free of {decimal(memory.total)}",
        "disk": f"free: {', '.join(free)}",
        "kernels": f"{count_kernels():,} compiled",
        "GPUs": ", ".join(_gpus()) or "none found",
        "torch": _torch(),
    }
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in rows.items():
        table.add_row(name, Text(value))
    return table


def count_kernels() -> int:
    """Return how many compiled kernels are in the cache."""
    count = 0
    for folder in cache_folders():
        if folder.is_dir():
            count += len(list(folder.glob(f"*{SUFFIX}")))
    return count


def _gpus() -> list[str]:
    """Return names and memory of the GPUs that NVIDIA's driver knows."""
    program = shutil.which("nvidia-smi")
    if not program:
        return []
    query = [program, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode != 0:
        return []
    return done.stdout.splitlines()


def _torch() -> str:
    """Return the version of torch, and whether it computes on a GPU here."""
    if find_spec("torch") is None:
        return "not installed"
    import torch

    computes_on = "CPU only"
    if torch.cuda.is_available():
        computes_on = count_of(torch.cuda.device_count(), "GPU")
    return f"{torch.__version__}, {computes_on}"


def _extras() -> Table:
    table = Table("extra", "adds", "state", box=None, pad_edge=False)
    for extra, adds in EXTRAS.items():
        table.add_row(extra, Text(adds), Text(_state_of(extra)))
    return table


def _state_of(extra: str) -> str:
    """Return whether an extra is installed, or which distributions it lacks."""
    lacking = missing(extra)
    if not lacking:
        return "installed"
    return f"lacks {', '.join(lacking)}"


def _extras_of_run(config: Path) -> Group:
    """Return the extras that a run needs, and the command that installs the missing ones."""
    from gristmill_cli.needed_extras import needed_extras  # which imports the stages

    needed = needed_extras(config)
    if not needed:
        return Group(Text(f"{config} needs no extra"))
    table = Table("extra", "needed for", "state", box=None, pad_edge=False)
    for extra, reason in needed.items():
        table.add_row(extra, Text(reason), Text(_state_of(extra)))
    lacking_extras = [extra for extra in needed if missing(extra)]
    if not lacking_extras:
        return Group(table)
    lines = [*_torch_first(lacking_extras), f"try pip install 'gristmill[{','.join(lacking_extras)}]'"]
    return Group(table, Text(), *map(Text, lines))


def _torch_first(extras: Sequence[str]) -> list[str]:
    """Say that torch's CPU build is to be installed before extras that would bring another; nothing where it is not."""
    brings_torch = any("torch" in missing(extra) for extra in extras)
    if not brings_torch or _gpus():
        return []
    return ["first torch's CPU build, as pytorch.org names it, or pip fetches CUDA, which this machine has no GPU for"]


def _advice() -> list[str]:
    """Return the commands that would change what is lacking, after an empty line."""
    lines = list[str]()
    lacking = [extra for extra in EXTRAS if missing(extra)]
    if lacking:
        lines += _torch_first(lacking)
        lines.append(f"try pip install 'gristmill[{','.join(lacking)}]' for all of them")
    if not count_kernels():
        lines.append("try gristmill compile, so that no later command waits for its kernels")
    if _gpus() and "CPU only" in _torch():
        lines.append("try a torch for CUDA: pip install torch --index-url as pytorch.org names it for your driver")
    if not lines:
        return []
    return ["", *lines]
