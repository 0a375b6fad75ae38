"""bench_training runs, and its tables show the values of the reports. No test depends on speed."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.bench_training import bench_training
from benchmarks.training_tables import PEER, TrainingRun, pipeline_table, speed_table
from gristmill.errors import UsageError
from tests.patience import patience

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks/bench_training.py"
TINY = """
device = "cpu"
[model]
layers = 2
width = 16
heads = 2
[data]
seq_len = 8
batch_size = 4
"""
# What a nanoGPT would do with the options it is given, as far as we read it
TRAIN = """
import sys
given = dict(argument[2:].split("=") for argument in sys.argv[2:])
assert (given["n_embd"], given["block_size"], given["batch_size"], given["compile"]) == ("16", "8", "4", "False")
for number in range(int(given["max_iters"]) + 1):
    print(f"iter {number}: loss 4.1, time {2000.0 if number else 9000.0:.2f}ms, mfu 0.02%")
"""


def report(**values: object) -> dict[str, object]:
    return {"seconds": [2.0, 1.0, 1.0], "busy": [1.0, 0.75, 0.25], "tokens_per_step": 32, "peak": 1e9, "memory": 2**30,
            "parameters": 9, "flops_per_token": 1e6, "pp": 2, "stages": 4, "micro_batches": 4} | values  # fmt: skip


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in row.strip("│ ").split("│")] for row in table.splitlines() if row.startswith("│")]


def test_ours_and_nanogpt_in_one_run(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    (tmp_path / "peer/data/shakespeare_char").mkdir(parents=True)
    (tmp_path / "peer/data/shakespeare_char/train.bin").touch()
    (tmp_path / "peer/train.py").write_text(TRAIN)
    command = [sys.executable, str(SCRIPT), "tiny.toml", "--steps", "3", "--rounds", "1", "--peer", "peer"]
    command += ["--options", "model.kv_heads=1", "parallel.micro_batches=2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=patience(300))
    assert done.returncode == 0, done.stderr
    peer, ours = cells(done.stdout)
    assert peer[0] == PEER and peer[2:7] == ["2000.0", "2000.0..2000.0", "16", "1.000", "1.00..1.00"]
    kv_heads_less = 2 * 2 * 8 * 16 // 2  # of two layers' key and value matrices, half
    layer = 4 * 16**2 + 3 * 16 * 64 + 2 * 16
    assert ours[:2] == ["tiny", f"{2 * layer + 16 + 2 * 65 * 16 - 2 * kv_heads_less:,}"]
    assert float(ours[5]) > 1 and all(ours)


def test_two_processes_of_a_pipeline(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    command = [sys.executable, str(SCRIPT), "tiny.toml", "--steps", "3", "--rounds", "1", "--layouts"]
    command += ["--only", "pp 2, 1f1b", "--options", "data.batch_size=12"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=patience(300))
    assert done.returncode == 0, done.stderr
    one, two, pipeline = cells(done.stdout)
    assert (one[0], two[0], pipeline[:4]) == ("one process", "pp 2, 1f1b", ["pp 2, 1f1b", "2", "6", "16.7%"])


def test_ratios_are_per_round_and_bubbles_relative_to_computing_time() -> None:
    ours = TrainingRun("ours", Path(), rounds=[[report(), report(seconds=[2.0, 4.0, 4.0])], [report()]])
    peer = TrainingRun(PEER, Path(), rounds=[[report(seconds=[8.0])], [report(seconds=[4.0])]])
    assert ours.seconds() == [2.0, 4.0, 4.0, 2.0, 1.0, 1.0] and ours.rates() == [8.0, 32.0]
    assert ours.bubble() == pytest.approx((14 / 4 - 1 + 4 / 2 - 1) / 2)
    columns = speed_table([peer, ours]).columns
    assert [columns[5]._cells, columns[6]._cells] == [["1.000", "3.000"], ["1.00..1.00", "2.00..4.00"]]
    assert pipeline_table([ours]).columns[3]._cells == ["12.5%"]  # (p - 1) / (v m): two stages a process


@pytest.mark.parametrize("options", [{"steps": 1}, {"rounds": 0}, {"options": ["compile"]}, {"peer": Path("none")}])
def test_invalid_options_are_rejected(options: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    with pytest.raises(UsageError):
        bench_training([tmp_path / "tiny.toml"], **options)  # type: ignore[arg-type]
