"""A small stage for the tests of the engine: copies files in upper case through temporary files, then joins them.

As a script, `upper_stage.py SOURCE TARGET WORKERS SECONDS [--shard I/N]`, each task sleeps first, so that the run can
be killed.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from gristmill.command import run_with_exit_code
from gristmill.counts import READ, WRITTEN, Counts
from gristmill.engine.options import RunOptions
from gristmill.engine.run import StageRun, open_stage
from gristmill.engine.task import Result, Stage, Task
from gristmill.errors import DamagedFile
from gristmill.storage.local import atomic_write_bytes

DAMAGED = b"damaged\n"  # content of a file on which a task fails
STAGE = Stage("upper", libraries=())
QUIET = RunOptions(workers=1, quiet=True)


@dataclass(frozen=True)
class Settings:
    """Arguments that change the output, and one that does not."""

    suffix: str = ""
    seconds: float = 0.0
    memory: int = 1 << 20


def upper(source: Path, output: Path, suffix: str, seconds: float, memory: int) -> Result:
    """Task: write a file in upper case; its value is its length."""
    time.sleep(seconds)
    counts, data = Counts({}, []), source.read_bytes()
    if data == DAMAGED:
        raise DamagedFile(source, "cut off", "ends too early")
    atomic_write_bytes(output, data.upper() + suffix.encode())
    counts.add("all", READ, len(data))
    counts.add("all", WRITTEN, len(data))
    return Result(counts, {"length": len(data)})


def join(parts: list[Path], target: Path) -> None:
    """Task: concatenate files."""
    atomic_write_bytes(target, b"".join(path.read_bytes() for path in parts))


def upper_stage(
    source: Path, target: Path, settings: Settings = Settings(), options: RunOptions = QUIET, stage: Stage = STAGE
) -> StageRun:
    """Write target/whole, the files of `source` in upper case, joined, and target/<name> of each; return the run."""
    files = sorted(source.iterdir())
    with open_stage(stage, target, options, reads=[source], publishes=[target]) as run:
        done = run.step("upper", [_task(path, target / path.name, settings) for path in files])
        parts = [_task(path, run.work / path.name, settings) for path in files]
        run.step("parts", parts)
        lengths = [value["length"] for value in done.values(dict[str, int])]
        assert lengths == [path.stat().st_size for path in files]
        arguments = {"parts": [task.outputs[0] for task in parts], "target": target / "whole"}
        run.step("join", [Task("whole", join, arguments, (target / "whole",))])
        run.finish(done.counts)
    return run


def _task(source: Path, output: Path, settings: Settings) -> Task:
    arguments = {"source": source, "output": output, "suffix": settings.suffix, "seconds": settings.seconds}
    return Task(source.name, upper, arguments, (output,), source.stat().st_size, settings.memory)


def main() -> None:
    """Run the stage as a command."""
    from tests.gristmill.engine.upper_stage import upper_stage as by_name  # tasks of __main__ cannot be pickled

    options = RunOptions(workers=int(sys.argv[3]), shard=sys.argv[6] if sys.argv[5:] else "")
    by_name(Path(sys.argv[1]), Path(sys.argv[2]), Settings(seconds=float(sys.argv[4])), options)


if __name__ == "__main__":
    sys.exit(run_with_exit_code(main))
