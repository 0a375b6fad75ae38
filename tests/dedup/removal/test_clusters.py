"""Clusters files that are damaged or not ours."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from dedup import generate_duplicates_dict
from gristmill.errors import InputError
from tests.dedup.removal.clustered_corpus import (
    QUIET,
    removed_by,
)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"cluster": [1, 0], "file": ["a", "b"], "row": [0, 0]}, "do not ascend"),
        ({"cluster": [0, 0], "file": ["a", None], "row": [0, 0]}, "file name is missing"),
        ({"cluster": [0, 0], "file": ["a", "b"], "row": [0, None]}, "column row is int64 with 1 nulls"),
        ({"cluster": [0.5, 1], "file": ["a", "b"], "row": [0, 0]}, "column cluster is double"),
        ({"cluster": [0, 0], "file": ["a", "b"]}, "has no column row: it has cluster, file"),
    ],
)
def test_tables_that_are_none_of_ours(tmp_path: Path, columns: dict, message: str) -> None:
    pyarrow.parquet.write_table(pa.table(columns), tmp_path / "c.parquet")
    with pytest.raises(InputError, match=message):
        generate_duplicates_dict(tmp_path / "c.parquet", tmp_path / "d.pickle", QUIET)


def test_a_document_in_two_clusters(tmp_path: Path, chained_norm: Path) -> None:
    key = ("arxiv/a.jsonl", 0)
    with pytest.raises(InputError, match=r"arxiv/a\.jsonl@0 is in it twice"):
        removed_by(
            tmp_path, [[key, ("arxiv/a.jsonl", 2)], [key, ("arxiv/a.jsonl", 4)]], verify="jaccard", corpus=chained_norm
        )
