"""Benchmark: all that only a GPU shows, in one Markdown report: tests, certificate, speed, memory, offload, resuming.

    bash benchmarks/gpu.sh --wheels WHEELS --out report.md     on a machine with torch and a GPU
    python benchmarks/bench_gpu.py --tiny --device cpu         the same code in small, anywhere

Tokens are random. The report is written anew after every section, so that an interrupted run leaves what it found.
"""

import math
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import torch
import tyro

from benchmarks.gpu_sections import PARTS, SECTIONS, Setting, sizes_of
from gristmill.command import run_with_exit_code
from gristmill.errors import GristmillError, UsageError, require
from gristmill.storage.local import atomic_write_bytes

_MOST_BYTES = 99_000  # of the report


def bench_gpu(
    out: Path = Path("gpu-report.md"),
    device: Literal["cpu", "cuda"] = "cuda",
    tiny: bool = False,
    minutes: float = 10.0,
    leave_out: list[str] = [],  # noqa: B006  the default that tyro shows
) -> None:
    """Run all sections and write the report; exits with an error if one failed.

    Args:
        out: The report, Markdown.
        device: Where to train.
        tiny: Small models and a few rows of the certificate, to test the benchmark itself.
        minutes: A section that would begin later than this is left out, and one that runs then is ended.
        leave_out: Names of sections, or of parts of them such as compiled, to leave out.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device is cuda, and torch finds no GPU on this machine; try --tiny --device cpu")
    require(0 <= minutes < math.inf, f"--minutes is {minutes}; expected 0 or more; try --minutes 10")
    known = [*SECTIONS, *PARTS]
    unknown = [name for name in leave_out if name not in known]
    require(not unknown, f"--leave_out has {', '.join(unknown)}; expected names among {', '.join(known)}")
    started, parts, failed = time.monotonic(), [_machine(device, tiny)], []
    with TemporaryDirectory() as folder:
        for name, section in SECTIONS.items():
            left = 60 * minutes - (time.monotonic() - started)
            if name in leave_out or left <= 0:
                parts.append(
                    [f"## {name}", "", "left out" if name in leave_out else f"not begun in {minutes:g} minutes"]
                )
                continue
            setting = Setting(device, tiny, sizes_of(tiny), Path(folder), left, tuple(leave_out))
            lines, good = _run(section, setting)
            parts.append([f"## {name}", "", *lines])
            failed += [] if good else [name]
            _write(out, parts, time.monotonic() - started)
    _write(out, parts, time.monotonic() - started)
    print(f"{out}: {len(parts) - 1} sections in {time.monotonic() - started:.0f} s")
    if failed:
        raise GristmillError(f"failed: {', '.join(failed)}; see {out}")


def _run(section: Callable[[Setting], list[str]], setting: Setting) -> tuple[list[str], bool]:
    """Run a section: its lines, and whether it succeeded. An error of any kind is part of the report."""
    started = time.monotonic()
    try:
        lines, good = section(setting), True
    except GristmillError as error:
        lines, good = ["**failed**", "", "```", str(error)[-3000:], "```"], False
    except Exception:  # the sections after it may still run
        lines, good = ["**failed**", "", "```", traceback.format_exc()[-3000:], "```"], False
    return [*lines, "", f"({time.monotonic() - started:.0f} s)"], good


def _machine(device: str, tiny: bool) -> list[str]:
    rows = {
        "device": torch.cuda.get_device_name(0) if device == "cuda" else f"CPU, {platform.machine()}",
        "GPUs": torch.cuda.device_count(),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}",
        "Python": platform.python_version(),
        "sizes": "tiny: no figure below means anything" if tiny else "as named",
    }
    return ["# Report from one machine", "", "| | |", "|---|---|", *(f"| {k} | {v} |" for k, v in rows.items())]


def _write(out: Path, parts: Sequence[list[str]], seconds: float) -> None:
    text = "\n\n".join("\n".join(part) for part in parts) + f"\n\nAll of it took {seconds:.0f} s.\n"
    atomic_write_bytes(out, text.encode()[:_MOST_BYTES])


if __name__ == "__main__":
    sys.exit(run_with_exit_code(lambda: tyro.cli(bench_gpu)))
