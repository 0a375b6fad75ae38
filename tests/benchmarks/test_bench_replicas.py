"""bench_replicas: real processes, a link that takes time, and the table and picture of what was measured."""

from pathlib import Path

import pytest

from benchmarks.bench_replicas import (
    ASYNCHRONOUS,
    LAYOUTS,
    Clock,
    Conditions,
    Found,
    draw,
    measure,
    options,
    table,
)
from benchmarks.made_up_tokens import write_tokens
from training.distributed.rank_pool import RankPool


def test_every_way_is_measured(tmp_path: Path) -> None:
    for part, documents in (("train", 60), ("holdout", 40)):
        write_tokens(tmp_path / part, 1, documents)
    with RankPool(3) as ranks:
        fast = measure(ranks, tmp_path, options(tmp_path, 8, 16), Conditions("as it is"), 2)
    assert fast.keys() == LAYOUTS.keys() | ASYNCHRONOUS.keys() and all(5 < each.loss < 7 for each in fast.values())
    assert fast["int8"].megabytes < fast["all-reduce"].megabytes / 2
    assert abs(fast["a server, staleness 0"].loss - fast["all-reduce"].loss) < 1e-4


def test_a_slow_link_takes_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = list[float]()
    monkeypatch.setattr("time.sleep", slept.append)
    Conditions("", bandwidth=1.0).wait(50_000)
    assert slept == [0.05]
    clock = Clock()
    clock.times = [0.0, 5.0, 6.0, 7.0]
    assert clock.seconds == 1


def test_the_table_and_the_picture_have_every_way(tmp_path: Path) -> None:
    found = {name: {"all-reduce": Found(2.0, 1.5, 0.25), "int8": Found(2.5, 0.4, 0.125)} for name in ("a", "b")}
    assert "int8" in table(found, 2, 8) and "2.500 |" in table(found, 2, 8) and "needs GPUs" in table(found, 2, 8)
    draw(found, tmp_path / "found.svg")
    assert "<svg" in (tmp_path / "found.svg").read_text()
