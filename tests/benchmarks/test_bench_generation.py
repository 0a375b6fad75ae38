"""bench_generation: both write the same tokens, for the model itself and for random ones of every family."""

from collections.abc import Callable
from pathlib import Path

from benchmarks.bench_generation import bench_generation
from tests.training.generation.conftest import checkpoint_of
from training.hugging_face.export_hf import export_hf
from training.hugging_face.families import FAMILIES

__all__ = ["checkpoint_of"]


def rows(table: str) -> list[list[str]]:
    """The cells of a table's rows."""
    lines = [line for line in table.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_both_write_the_same_tokens(tmp_path: Path, checkpoint_of: Callable[[str], Path]) -> None:
    run = checkpoint_of("llama")
    export_hf(run, tmp_path / "hf", run / "train")
    measured = rows(bench_generation(tmp_path / "hf", tokens=4, batches=(1, 2), rounds=1))
    assert [row[:2] for row in measured] == [["hf", "1"], ["hf", "2"]]
    every = rows(bench_generation(tmp_path / "hf", 4, (2,), rounds=1, families=("all",), width=32))
    assert [row[0] for row in every] == list(FAMILIES)
    for *_, ours, theirs, ratio, is_same in [*measured, *every]:
        assert float(ours.replace(",", "")) > 0 and float(theirs.replace(",", "")) > 0 and float(ratio) > 0
        assert is_same == "yes"
