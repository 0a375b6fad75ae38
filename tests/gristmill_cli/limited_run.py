"""Script: a run in one process whose memory the system limits to what it has after a small run, and --memory.

    python tests/gristmill_cli/limited_run.py SMALL LARGE OUT BYTES

The run of the corpus SMALL loads all libraries and kernels, that of LARGE is limited (RLIMIT_DATA: private writable
memory): a stage that asks for more raises MemoryError. One worker works in the process itself.
"""

import resource
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if not __package__: sys.path[0] = str(ROOT)  # fmt: skip

from gristmill.config import load_config
from gristmill_cli.run import run
from gristmill_cli.run_config import RunConfig


def limited_run(small: Path, large: Path, out: Path, memory: int) -> None:
    """Run both; raises what the large run raises."""
    _run(small, out / "small", memory)
    most = data_bytes() + memory
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    _run(large, out / "large", memory)


def _run(corpus: Path, out: Path, memory: int) -> None:
    given = {
        "corpus": corpus, "out": out, "memory": memory, "workers": 1, "tokenizer.vocab_size": 400,
        "tokenizer.exact": "false", "mix.holdout": 0.3, "dedup.exact": "true", "spans.min": 100,
    }  # fmt: skip
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    run(load_config(RunConfig, words, prog="limited_run"))


def data_bytes() -> int:
    """Bytes of private writable memory of this process, as RLIMIT_DATA counts them (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData"))


if __name__ == "__main__":
    limited_run(*map(Path, sys.argv[1:4]), int(sys.argv[4]))
