"""Key sets at scale: a table gives the rows of some files without reading the others; writing is in row groups."""

import pickle
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.errors import InputError, UsageError
from gristmill.io import artefacts as module
from gristmill.io.artefacts import open_table_writer, write_table
from gristmill.io.keys import read_keys, stream_keys, write_keys

SCHEMA = pa.schema({"file": pa.string(), "row": pa.int64(), "why": pa.string()})
NAMES = st.text("ab/é东", min_size=1, max_size=3)
SETS = st.dictionaries(NAMES, st.sets(st.integers(0, 40), min_size=1), max_size=8)


def columns(file: str, first: int, stop: int) -> dict[str, pa.Array]:
    count = stop - first
    return {"file": pa.repeat(file, count), "row": pa.array(range(first, stop)), "why": pa.repeat("x", count)}


@settings(deadline=None, max_examples=40)
@given(cuts=st.lists(st.integers(0, 50), max_size=6))
def test_the_rows_of_each_call_do_not_change_the_bytes(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int]
) -> None:
    folder = tmp_path_factory.getbasetemp()
    bounds = [0, *sorted(cuts), 50]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ROW_GROUP_SIZE", 12)
        write_table(folder / "whole.parquet", columns("a", 0, 50))
        with open_table_writer(folder / "pieces.parquet", SCHEMA) as write:
            for first, stop in pairwise(bounds):
                write(columns("a", first, stop))
    assert (folder / "whole.parquet").read_bytes() == (folder / "pieces.parquet").read_bytes()
    assert pa.parquet.read_metadata(folder / "pieces.parquet").num_row_groups == 5
    assert pa.parquet.read_table(folder / "pieces.parquet").equals(pa.table(columns("a", 0, 50)))


def test_a_table_is_written_atomically(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), open_table_writer(tmp_path / "a.parquet", SCHEMA) as write:
        write(columns("a", 0, 5))
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with open_table_writer(tmp_path / "a.parquet", SCHEMA):
        pass
    assert read_keys(tmp_path / "a.parquet") == {}


def test_a_table_is_streamed_in_little_memory(tmp_path: Path) -> None:
    write_keys(tmp_path / "a.parquet", {f"s/{number:03}": np.arange(20_000) for number in range(400)})
    next(iter(stream_keys(tmp_path / "a.parquet")))  # imports what it needs
    tracemalloc.start()
    before, most, rows = pa.total_allocated_bytes(), 0, 0
    for _, found in stream_keys(tmp_path / "a.parquet"):
        rows += len(found)
        most = max(most, tracemalloc.get_traced_memory()[1] + pa.total_allocated_bytes() - before)
    tracemalloc.stop()
    assert rows == 8_000_000 and most < 8 * rows / 2


def test_a_file_without_keys_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="run the stage that writes it"):
        read_keys(tmp_path / "none.parquet")
    pa.parquet.write_table(pa.table({"file": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a\.parquet has no column row: it has file"):
        read_keys(tmp_path / "a.parquet")
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match="not a readable Parquet file"):
        read_keys(tmp_path / "a.parquet")


@pytest.mark.parametrize("suffix", [".pickle", ".parquet"])
@settings(deadline=None)
@given(sets=SETS)
def test_keys_file_by_file(tmp_path_factory: pytest.TempPathFactory, suffix: str, sets) -> None:
    path = tmp_path_factory.getbasetemp() / f"streamed{suffix}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ROW_GROUP_SIZE", 3)
        write_keys(path, {file: np.array(sorted(rows), np.int64) for file, rows in sets.items()})
    found = [(file, rows.tolist()) for file, rows in stream_keys(path)]
    assert found == [(file, sorted(sets[file])) for file in sorted(sets)]


def test_keys_of_a_table_that_is_not_sorted(tmp_path: Path) -> None:
    rows = {"file": ["b", "a", "b", "a"], "row": [3, 1, 2, 0]}
    pa.parquet.write_table(pa.table(rows), tmp_path / "a.parquet", row_group_size=2)
    assert [(file, found.tolist()) for file, found in stream_keys(tmp_path / "a.parquet")] == [
        ("a", [0, 1]),
        ("b", [2, 3]),
    ]


@pytest.mark.parametrize("read", [read_keys, lambda path: [*stream_keys(path)]])
@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"row": pa.array([1, None])}, "column row is int64 with 1 nulls"),
        ({"row": [1.0, 2.5]}, "column row is double"),
        ({"row": [True, False]}, "column row is bool"),
        ({"row": ["1", "2"]}, "column row is string"),
        ({"row": [[1], [2]]}, "column row is list"),
        ({"row": pa.array([1, 2], pa.timestamp("ns"))}, "column row is timestamp"),
        ({"row": [-1, 2]}, "column row has -1"),
        ({"row": pa.array([1, 1 << 63], pa.uint64())}, "column row has 9223372036854775808"),
        ({"file": ["a", None]}, "a file name is missing"),
    ],
)
def test_tables_of_other_types(tmp_path: Path, columns: dict, message: str, read: Callable) -> None:
    path = tmp_path / "a.parquet"
    pa.parquet.write_table(pa.table({"file": ["a", "b"], "row": [1, 2], **columns}), path)
    with pytest.raises(InputError, match=rf"a\.parquet.*{message}"):
        read(path)


@pytest.mark.parametrize("file", [[1, 2], [["a"], ["b"]], [b"a", b"b"]])
def test_names_of_other_types(tmp_path: Path, file: list) -> None:
    pa.parquet.write_table(pa.table({"file": file, "row": [1, 2]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a\.parquet: column file is .*: expected strings"):
        read_keys(tmp_path / "a.parquet")


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.large_string())])
@pytest.mark.parametrize("row", [pa.int32(), pa.uint64()])
def test_names_and_rows_of_all_types(tmp_path: Path, kind: pa.DataType, row: pa.DataType) -> None:
    columns = {"file": pa.array(["a", "b", "a"], pa.string()).cast(kind), "row": pa.array([1, 2, 0], row)}
    pa.parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    found = {file: rows.tolist() for file, rows in read_keys(tmp_path / "a.parquet").items()}
    assert found == {"a": [0, 1], "b": [2]}


@pytest.mark.parametrize("rows", [{True}, {"1"}, {1.0}, {1: 2}, b"\x01", "12", {-1}, {1 << 63}, None])
def test_pickles_of_other_types(tmp_path: Path, rows: object) -> None:
    (tmp_path / "a.pickle").write_bytes(pickle.dumps({"a": rows}))
    with pytest.raises(InputError, match=r"a\.pickle: expected a dict of file names to sets of rows"):
        read_keys(tmp_path / "a.pickle")
