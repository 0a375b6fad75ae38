"""bench_experts: real runs of a dense model and of sparse ones, the table and the picture of what was measured."""

from pathlib import Path

from benchmarks.bench_experts import KINDS, Found, bench_experts, draw, table
from benchmarks.made_up_tokens import write_tokens


def test_dense_and_sparse_models_are_trained(tmp_path: Path) -> None:
    for part, documents in (("train", 60), ("holdout", 40)):
        write_tokens(tmp_path / part, 1, documents)
    found = bench_experts(tmp_path, steps=2, width=16, experts=4, seeds=1, batch=4, picture=tmp_path / "found.svg")
    rows = [line for line in found.splitlines() if line.startswith(("| dense", "| sparse"))]
    assert [row.split("|")[1].strip() for row in rows] == list(KINDS)
    assert "–" in rows[0] and "–" not in rows[1]
    assert "<svg" in (tmp_path / "found.svg").read_text()


def test_the_table_has_the_mean_of_the_seeds_and_each(tmp_path: Path) -> None:
    runs = [Found([(1, 6.0), (2, loss)], [(1, 3.0), (2, 1.5)], 0.5, 1_000_000, 0.25) for loss in (4.0, 5.0)]
    (row,) = [line for line in table({"sparse": runs}, 2).splitlines() if line.startswith("| sparse")]
    assert [cell.strip() for cell in row.split("|")[2:-1]] == ["1.00", "4.500", "4.000 5.000", "1.50", "0.50", "250"]
    draw({"sparse": runs}, tmp_path / "found.svg")
    assert "<svg" in (tmp_path / "found.svg").read_text()
