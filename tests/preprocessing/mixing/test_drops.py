"""Drops: replacements for short kept documents. (Drops within pass 1: test_shuffle_holdout.)"""

import pickle
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from gristmill.errors import InputError
from gristmill.io.artefacts import write_table
from gristmill.io.keys import KeySet, write_keys
from gristmill.storage.local import flush_later
from preprocessing.mixing.drops import load_drops, split_drops


def test_replacements_are_the_first_duplicates_that_are_not_short(tmp_path: Path) -> None:
    kept = {("a", 3): ("a", 0), ("a", 4): ("a", 0), ("b", 0): ("a", 0), ("b", 1): ("b", 7), ("b", 2): ("c", 9)}
    columns = {
        "file": [file for file, _ in kept], "row": [row for _, row in kept],
        "kept_file": [file for file, _ in kept.values()], "kept_row": [row for _, row in kept.values()],
    }  # fmt: skip
    write_table(tmp_path / "dup.parquet", {name: pa.array(values) for name, values in columns.items()})

    def replacements(short: KeySet) -> dict[str, list[int]]:
        """The duplicates that are not dropped."""
        table, files = tmp_path / "dup.parquet", ("a", "b", "c")
        (tmp_path / "short.pickle").write_bytes(
            pickle.dumps({file: set(rows.tolist()) for file, rows in short.items()})
        )
        split_drops(table, table, tmp_path / "short.pickle", (), [files], [tmp_path / "a.npz"], memory=1)
        dropped = load_drops(tmp_path / "a.npz", files)
        left = {file: {row for name, row in kept if name == file} - {*dropped[file].duplicate} for file in files}
        assert {file: rows.tolist() for file in files if len(rows := dropped[file].short)} == {
            file: rows.tolist() for file, rows in short.items() if len(rows)
        }
        return {file: sorted(rows) for file, rows in left.items() if rows}

    assert replacements({"a": np.array([0, 3])}) == {"a": [4]}
    assert replacements({"a": np.array([0, 3, 4]), "b": np.array([7])}) == {"b": [0, 1]}
    assert replacements({"a": np.array([1])}) == {}
    assert replacements({"a": np.array([], np.int64)}) == {}  # as a user's own pickle may say
    ranked = columns | {"rank": [1, 3, 2, 1, 1]}  # b@0 would be kept before a@4
    write_table(tmp_path / "dup.parquet", {name: pa.array(values) for name, values in ranked.items()})
    assert replacements({"a": np.array([0, 3])}) == {"b": [0]}


def test_a_duplicate_stays_in_place_of_a_kept_document_whose_score_is_too_low(tmp_path: Path) -> None:
    columns = {"file": ["a", "a"], "row": [1, 2], "kept_file": ["a", "a"], "kept_row": [0, 0]}
    table = tmp_path / "dup.parquet"
    write_table(table, {name: pa.array(values) for name, values in columns.items()})
    write_keys(tmp_path / "low.parquet", {"a": np.array([0, 1, 5])})
    write_keys(tmp_path / "short.pickle", {"a": np.array([5])})
    outputs = [tmp_path / "a.npz"]
    short = tmp_path / "short.pickle"
    given = (table, table, short, (), [("a",)], outputs)
    value = split_drops(*given, memory=1, low_scores=tmp_path / "low.parquet").value
    (dropped,) = load_drops(outputs[0], ["a"]).values()
    assert dropped.reasons(np.arange(7)) == ["low score", "low score", "", "", "", "short", ""]
    assert value == (3, 1, False)  # three documents, of which one is a duplicate, too


def test_a_table_that_does_not_say_what_was_kept_or_says_it_with_other_types(tmp_path: Path) -> None:
    write_keys(tmp_path / "short.pickle", {"a": np.array([0])})

    def drop(files: pa.Array, rows: pa.Array) -> object:
        columns = {"file": pa.array(["a", "a"]), "row": pa.array([1, 2]), "kept_file": files, "kept_row": rows}
        write_table(tmp_path / "dup.parquet", columns)
        table, outputs = tmp_path / "dup.parquet", [tmp_path / "a.npz"]
        return split_drops(table, table, tmp_path / "short.pickle", (), [("a",)], outputs, memory=1).value

    assert drop(pa.array([None, "a"]), pa.array([None, 0])) == (2, 0, False)  # row 2 is kept in place of row 0
    assert drop(pa.array(["a", "a"]).dictionary_encode(), pa.array([0, 0], pa.int8())) == (2, 0, False)
    with pytest.raises(InputError, match=r"dup\.parquet: column kept_file is int64: expected strings"):
        drop(pa.array([1, 2]), pa.array([0, 0]))
    with pytest.raises(InputError, match=r"dup\.parquet: column kept_row is double"):
        drop(pa.array(["a", "a"]), pa.array([0.0, 0.5]))


def test_memory_is_a_file_of_a_key_set_at_a_time(tmp_path: Path) -> None:
    files = [f"s/{number:02}" for number in range(50)]
    for name, first in (("short", 0), ("dup", 1)):
        write_keys(tmp_path / f"{name}.parquet", {file: np.arange(first, 12_000, 2) for file in files})
    paths = tmp_path / "dup.parquet", None, tmp_path / "short.parquet", ()
    groups, outputs = [(file,) for file in files], [tmp_path / f"{number}.npz" for number in range(50)]
    with flush_later():
        split_drops(*paths, [tuple(files)], outputs[:1], memory=1)  # imports and compiles
        tracemalloc.start()
        assert split_drops(*paths, groups, outputs, memory=4 << 20).value == (600_000, 0, False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16e6, peak
