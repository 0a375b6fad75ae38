"""Drops: replacements for short kept documents. (Drops within pass 1: test_shuffle_holdout.)"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from gristmill.errors import InputError
from gristmill.io.keys import KeySet, write_keys
from gristmill.io.parquet_tables import write_table
from preprocessing.mixing.drops import find_replacements, write_drops


def test_replacements_are_the_first_duplicates_that_are_not_short(tmp_path: Path) -> None:
    kept = {("a", 3): ("a", 0), ("a", 4): ("a", 0), ("b", 0): ("a", 0), ("b", 1): ("b", 7), ("b", 2): ("c", 9)}
    columns = {
        "file": [file for file, _ in kept], "row": [row for _, row in kept],
        "kept_file": [file for file, _ in kept.values()], "kept_row": [row for _, row in kept.values()],
    }  # fmt: skip
    write_table(tmp_path / "dup.parquet", {name: pa.array(values) for name, values in columns.items()})

    def replacements(short: KeySet) -> dict[str, list[int]]:
        table = tmp_path / "dup.parquet"
        return {file: rows.tolist() for file, rows in find_replacements(table, table, short).items()}

    assert replacements({"a": np.array([0, 3])}) == {"a": [4]}
    assert replacements({"a": np.array([0, 3, 4]), "b": np.array([7])}) == {"b": [0, 1]}
    assert replacements({"a": np.array([1])}) == {}
    assert replacements({"a": np.array([], np.int64)}) == {}  # as a user's own pickle may say
    ranked = columns | {"rank": [1, 3, 2, 1, 1]}  # b@0 would be kept before a@4
    write_table(tmp_path / "dup.parquet", {name: pa.array(values) for name, values in ranked.items()})
    assert replacements({"a": np.array([0, 3])}) == {"b": [0]}


@pytest.mark.parametrize("given", ["dup.parquet", "dup.pickle"])
def test_documents_kept_in_a_file_that_is_gone_are_told(tmp_path: Path, given: str) -> None:
    """Signatures of a source that was removed would cost its copies in other sources."""
    write_keys(tmp_path / "dup.pickle", {"c4/a": np.array([1, 2])})

    def drop(kept: str) -> object:
        columns = {"file": ["c4/a"] * 2, "row": [1, 2], "kept_file": ["c4/a", kept], "kept_row": [0, 0]}
        write_table(tmp_path / "dup.parquet", {name: pa.array(values) for name, values in columns.items()})
        return write_drops(tmp_path / given, tmp_path / "dup.parquet", None, [("c4/a",)], [tmp_path / "a.npz"]).value

    assert drop("c4/a") == drop("index:2023:book/a") == 2
    with pytest.raises(InputError, match=r"'book/a', a file that .* does not have.*Run to_hash .*MINHASH/book"):
        drop("book/a")
