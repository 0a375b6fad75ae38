"""bench_memory runs, shows the memory saved, and finds the same loss in every row."""

import subprocess
import sys
from pathlib import Path

from tests.patience import patience

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "bench_memory.py"


def test_the_table_has_a_row_per_setting() -> None:
    sizes = {"layers": 4, "width": 64, "heads": 4, "vocab_size": 300, "seq_len": 64, "batch_size": 2, "steps": 1}
    options = [word for key, value in sizes.items() for word in (f"--{key}", str(value))]
    names = ["nothing", "recompute full", "ZeRO-3, both disk"]
    command = [sys.executable, str(SCRIPT), *options, "--only", *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(240))
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in done.stdout.splitlines() if "|" in line]
    assert [row[0] for row in rows[2:]] == names
    activations = [float(row[1]) for row in rows[2:]]
    assert min(activations[0], activations[2]) > 1.5 * activations[1]
    assert len({row[-1] for row in rows[2:]}) == 1
