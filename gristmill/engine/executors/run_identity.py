"""RunIdentity: what the processes of one run must have in common: the work, its options, the code, its versions."""

import hashlib
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import msgspec

from gristmill.engine.options import words_of_work
from gristmill.engine.task import LIBRARIES, library_version
from gristmill.errors import UsageError

_PACKAGES = ("gristmill", "preprocessing", "dedup")
_ALWAYS = ("numpy", "numba", "msgspec")  # work in every stage; what decides bytes of some stages is in LIBRARIES


class RunIdentity(msgspec.Struct, frozen=True):
    """What is written, and with which options: sessions of equal work write the same bytes from the same input."""

    part: str = ""
    options: tuple[str, ...] = ()

    @classmethod
    def of_command(cls, part: str, words: Sequence[str], folders: Iterable[str]) -> "RunIdentity":
        """The work of a command line on some folders. The order and the spelling of its options do not matter.

        >>> RunIdentity.of_command("filter", ["x.py", "in", "--a", "1", "--workers", "3", "--b-c=2"], ["in"]).options
        ('--a 1', '--b_c 2', 'in', 'on in')
        """
        options = list[str]()
        for word in words_of_work(words[1:]):
            name, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
            if name:
                options.append(f"--{name[2:].replace('-', '_')}" + f" {value}" * bool(equals))
            elif options and options[-1].startswith("--"):
                options[-1] += f" {value}"
            else:
                options.append(value)
        return cls(part, tuple(sorted([*options, *(f"on {folder}" for folder in folders)])))

    def differences(self, other: "RunIdentity") -> str:
        """The options in which another work differs: what is theirs instead of ours."""
        ours, theirs = sorted(set(self.options) - set(other.options)), sorted(set(other.options) - set(self.options))
        return f"{', '.join(theirs) or 'without'} instead of {', '.join(ours) or 'none'}"


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
