"""External sort: the same order in memory and with runs on disk."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.io import external_sort as sorting
from gristmill.io.external_sort import ExternalSorter

TRIPLE = np.dtype([("major", "<u8"), ("minor", "<i8"), ("at", "<u4")])


def make_records(pairs) -> np.ndarray:
    records = np.empty(len(pairs), TRIPLE)
    records["major"], records["minor"] = [p[0] for p in pairs], [p[1] for p in pairs]
    records["at"] = np.arange(len(pairs))
    return records


def sort_by(folder, records: np.ndarray, keys: tuple[str, ...], memory: int, step: int) -> list[tuple]:
    with ExternalSorter(folder / "runs", TRIPLE, keys, memory) as sorter:
        for start in range(0, len(records), step):
            sorter.add(records[start : start + step])
        return [record for block in sorter for record in block.tolist()]


@settings(deadline=None)
@given(
    pairs=st.lists(st.tuples(st.integers(0, 2**64 - 1) | st.integers(0, 3), st.integers(-3, 3)), max_size=120),
    most=st.integers(1, 40),
    step=st.integers(1, 50),
)
def test_sorts_stably_with_any_memory(tmp_path_factory, pairs, most, step) -> None:
    records, folder = make_records(pairs), tmp_path_factory.mktemp("sort")
    expected = sorted(records.tolist(), key=lambda record: record[:2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorting, "_MIN_BLOCK", 1)
        memory = most * sorting._COPIES * TRIPLE.itemsize
        assert sort_by(folder, records, ("major", "minor"), memory, step) == expected
        assert sort_by(folder, records, ("major",), memory, step) == sorted(records.tolist(), key=lambda r: r[0])


def test_writes_runs_and_removes_them(tmp_path) -> None:
    count = 100_003
    records = make_records([(i * 7919 % count, 0) for i in range(count)])
    with ExternalSorter(
        tmp_path / "runs", TRIPLE, ("major",), memory=10_000 * TRIPLE.itemsize * sorting._COPIES
    ) as sorter:
        sorter.add(records)
        assert len(list((tmp_path / "runs").iterdir())) == 10
        blocks = list(sorter)
    assert max(map(len, blocks)) < count // 5
    assert np.concatenate(blocks)["major"].tolist() == list(range(count))
    assert not (tmp_path / "runs").exists()


SHORT = np.dtype([("group", "<u4"), ("score", "<f4")])
DIGEST = np.dtype([("digest", "S16")])


@pytest.mark.parametrize("dtype", [TRIPLE, SHORT, DIGEST], ids=["triple", "short", "digest"])
def test_takes_the_memory_that_it_is_given(tmp_path, dtype: np.dtype) -> None:
    memory = 4 << 20
    count = 8 * memory // dtype.itemsize
    step = 1 << 12  # records that the caller has at a time
    chance = np.random.default_rng(1)
    tracemalloc.start()
    try:
        with ExternalSorter(tmp_path / "runs", dtype, dtype.names or (), memory) as sorter:
            for _ in range(0, count, step):
                sorter.add(np.frombuffer(chance.bytes(step * dtype.itemsize), dtype))
            assert len(list((tmp_path / "runs").iterdir())) > 16
            for block in sorter:
                del block
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert memory / 2 < peak < memory + (1 << 19)  # the caller's own records, and Python's objects


def test_removes_the_runs_of_a_killed_process(tmp_path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "000000.run").write_bytes(b"\0" * 20)
    assert sort_by(tmp_path, make_records([]), ("major",), 1 << 20, 1) == []
