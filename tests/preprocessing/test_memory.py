"""Memory: all processes of a stage together stay within --memory, beyond what they take for a small corpus."""

import json
import os
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard

from benchmarks.process_memory import MemoryPeak, measure_peak

ROOT = Path(__file__).resolve().parents[2]
MB = 1 << 20
BUDGET = 96 * MB


def make_corpus(root: Path, size: int) -> Path:
    """Two files, for two workers, of each kind: lines of `size` bytes, plain and compressed, and repeated values."""
    line = json.dumps({"text": "word " * (size // 5)}) + "\n"
    for n in range(2):
        (root / str(n)).mkdir(parents=True)
        (root / f"{n}/lines.jsonl").write_text(line * 2)
        (root / f"{n}/packed.jsonl.zst").write_bytes(zstandard.compress(line.encode() * 2))
        values = pa.table({"text": [f"{i % 3} " * (size // 32) for i in range(64)]})
        pa.parquet.write_table(values, root / f"{n}/values.parquet", dictionary_pagesize_limit=1 << 30)
    return root


def normalize(corpus: Path, target: Path) -> MemoryPeak:
    paths = ["--data_dir", str(corpus), "--target_dir", str(target)]
    command = [sys.executable, "-m", "gristmill_cli", "normalize_text", *paths, "--memory", str(BUDGET)]
    command += ["--workers", "2"]
    found = measure_peak(command, os.environ | {"PYTHONPATH": str(ROOT)})
    assert found.exit_code == 0, found.output
    return found


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the sizes of processes are Linux's")
def test_two_workers_that_read_long_records_stay_within_the_budget(tmp_path: Path) -> None:
    own = normalize(make_corpus(tmp_path / "small", 1000), tmp_path / "small_out")
    found = normalize(make_corpus(tmp_path / "large", 11 * MB), tmp_path / "large_out")
    assert found.processes == own.processes >= 4  # this one, the fork server and its tracker, and the workers
    assert found.bytes - own.bytes < BUDGET
