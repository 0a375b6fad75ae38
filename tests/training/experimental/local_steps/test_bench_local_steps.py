"""The bytes and losses in the table of bench_local_steps."""

from benchmarks.bench_local_steps import Row, _cells


def test_a_row_has_its_loss_beside_the_first_and_its_bytes() -> None:
    rows = [Row("every step", ""), Row("local", "", 50), Row("later", "", 50, 100)]
    losses = {"every step": [4.0, 2.0], "local": [4.2, 2.4], "later": [4.0, 2.0]}
    cells = [_cells(row, rows[0], losses, 1000, 250_000) for row in rows]
    assert cells[0][-3:] == ["+0.00 %", "1,000", "1 / 1.0"]
    assert cells[1] == ["local", "4.2000", "2.4000", "3.3000", "+10.00 %", "20", "1 / 50.0"]
    assert cells[2][-2:] == ["118", "1 / 8.5"]
