"""bench_overlap: what of the communication is hidden, in real processes."""

import pytest
from rich.console import Console

from benchmarks.bench_overlap import _length, bench_overlap


def test_spans_that_overlap_count_once() -> None:
    assert _length([(3.0, 5.0), (0.0, 2.0), (1.0, 4.0), (7.0, 8.0)]) == 6.0
    assert _length([]) == 0.0


def test_the_table_has_what_is_communicated_and_what_is_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    table = bench_overlap(steps=2, layers=2, width=32, seq_len=16, batch_size=4, only="dp 2, ZeRO-0")
    Console(width=120).print(table)
    row = next(line for line in capsys.readouterr().out.splitlines() if "ZeRO-0" in line).split()
    step, communication, hidden = map(float, row[3:6])
    assert step > 0 and communication > 0 and 0 <= hidden <= communication and row[6].endswith("%")
