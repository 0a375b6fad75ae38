"""Memory: every stage of a run holds --memory where the system grants no more, with lines that need most of it."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.bench_stage_memory import words, write_lines, write_table
from tests.gristmill_cli.corpus import ROOT
from tests.patience import patience

MEMORY = 64 << 20
LONGEST = 11 << 20  # bytes of a line, which four times in memory are most of what is left to one worker


def make_corpus(root: Path, size: int) -> Path:
    """Lines of `size` bytes, plain and compressed, characters of four bytes, and values that a table repeats."""
    chance = random.Random(size)
    write_lines(root / "long/a.jsonl", [words(chance, size), *(words(chance, 500) for _ in range(40))])
    write_lines(root / "accents/a.jsonl", ["\U0001f600 e\u0301 " + words(chance, size // 4), words(chance, 400)])
    write_lines(root / "packed/a.jsonl.zst", [words(chance, size), words(chance, 300)])
    values = [words(chance, size // 32) for _ in range(4)]
    write_table(root / "table/a.parquet", [values[n % 4] for n in range(40)])
    return root


@pytest.mark.skipif(sys.platform != "linux", reason="the limit and the sizes are Linux's")
def test_every_stage_holds_the_memory_that_it_is_given(tmp_path: Path) -> None:
    small, large = make_corpus(tmp_path / "small", 2000), make_corpus(tmp_path / "large", LONGEST)
    environment = {**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1"}  # others reserve more
    script = ROOT / "tests/gristmill_cli/limited_run.py"
    done = subprocess.run(
        [sys.executable, script, small, large, tmp_path / "out", str(MEMORY)], env=environment, capture_output=True,
        text=True, check=False, timeout=patience(300),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/large/funnel.json").exists()
