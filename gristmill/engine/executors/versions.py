"""The versions of code and libraries that the processes of one run must have in common."""

import hashlib
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError
from pathlib import Path

from gristmill.engine.task import LIBRARIES, library_version
from gristmill.errors import UsageError

_PACKAGES = ("gristmill", "preprocessing", "dedup")
_ALWAYS = ("numpy", "numba", "msgspec")  # work in every stage; what decides bytes of some stages is in LIBRARIES


@cache
def code_versions() -> dict[str, str]:
    """The version of each thing that decides bytes, by name; that of our code is a hash of its sources."""
    root, digest = Path(__file__).resolve().parents[3], hashlib.sha256()
    for path in sorted(path for package in _PACKAGES for path in (root / package).rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    versions = {"gristmill": digest.hexdigest()[:12], "Python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    for name in (*_ALWAYS, *LIBRARIES):
        try:
            versions[name] = library_version(name)
        except PackageNotFoundError:  # ftfy need not be installed
            versions[name] = "none"
    return versions


def check_same_code(expected: dict[str, str], where: str) -> None:
    """Raise UsageError if this process has other versions than the process in charge, whose are `expected`."""
    own = code_versions()
    other = [f"{name} {own.get(name)} instead of {it}" for name, it in expected.items() if own.get(name) != it]
    if other:
        raise UsageError(
            f"{where} has {', '.join(other)}: its files could have other bytes. Install the same versions everywhere"
        )
