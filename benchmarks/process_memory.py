"""Memory of a command and all its descendants, sampled while it runs; pages that processes share count once."""

import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

_INTERVAL = 0.004  # seconds between two samples


@dataclass(frozen=True)
class MemoryPeak:
    """What a command took at most: bytes of memory in use, and with pages of mapped files; processes; seconds.

    Pages of mapped files are the system's to take back at any time, as those of its file cache.
    """

    bytes: int
    with_files: int
    processes: int
    seconds: float
    exit_code: int
    output: str


def measure_peak(command: Sequence[str], env: Mapping[str, str] | None = None, cwd: Path | None = None) -> MemoryPeak:
    """Run a command to its end and sample its memory (Linux: proportional set sizes of smaps_rollup).

    A peak that is shorter than the time between two samples, some 5 ms, is missed.
    """
    start = time.perf_counter()
    used = files = most = 0
    with (
        TemporaryFile("w+") as output,
        subprocess.Popen(command, env=env, cwd=cwd, stdout=output, stderr=subprocess.STDOUT) as child,
    ):
        while child.poll() is None:
            found = [resident_memory(pid) for pid in [child.pid, *descendants(child.pid)]]
            used, files = max(used, sum(one[0] for one in found)), max(files, sum(sum(one) for one in found))
            most = max(most, sum(one[0] > 0 for one in found))
            time.sleep(_INTERVAL)
        output.seek(0)
        return MemoryPeak(used, files, most, time.perf_counter() - start, child.returncode, output.read())


def resident_memory(pid: int) -> tuple[int, int]:
    """(bytes of memory in use, bytes of mapped files) of a process, its share of shared pages; (0, 0) if it ended."""
    with suppress(OSError, KeyError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        sizes = {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines)}
        return sizes["Pss_Anon"] + sizes["Pss_Shmem"], sizes["Pss_File"]
    return 0, 0


def descendants(root: int) -> list[int]:
    """The processes below a process, as Linux lists them."""
    found = [root]
    for pid in found:
        for task in Path(f"/proc/{pid}/task").glob("[0-9]*"):
            with suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return found[1:]
