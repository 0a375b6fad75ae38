"""Drops: replacements for short kept documents. (Drops within pass 1: test_shuffle_holdout.)"""

from pathlib import Path

import numpy as np
import pyarrow as pa

from gristmill.io.keys import KeySet
from gristmill.io.parquet_tables import write_table
from preprocessing.mixing.drops import find_replacements


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
