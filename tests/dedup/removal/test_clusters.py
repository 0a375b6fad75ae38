"""Clusters files that are damaged or not ours."""

import pickle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from dedup import generate_connected_components, generate_duplicates_dict
from dedup.cluster_graph import read_cluster
from gristmill.errors import InputError
from gristmill.io.documents import DocKey
from gristmill.io.files import STATE_DIR
from tests.dedup.removal.clustered_corpus import (
    QUIET,
    removed_by,
    write_table,
)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"cluster": [1, 0], "file": ["a", "b"], "row": [0, 0]}, "do not ascend"),
        ({"cluster": [0, 0], "file": ["a", None], "row": [0, 0]}, "file name is missing"),
        ({"cluster": [0, 0], "file": ["a", "b"], "row": [0, None]}, "column row is int64 with 1 nulls"),
        ({"cluster": [0.5, 1], "file": ["a", "b"], "row": [0, 0]}, "column cluster is double"),
        ({"cluster": [0, 0], "file": ["a", "b"], "row": [-1, 0]}, "column row has -1"),
        ({"cluster": [0, 0], "file": ["a", "b"], "row": pa.array([0, 1 << 63], pa.uint64())}, "column row has 9223"),
        ({"cluster": [0, 0], "file": [1, 2], "row": [0, 1]}, "column file is int64: expected strings"),
        ({"cluster": [0, 0], "file": ["a", "b"]}, "has no column row: it has cluster, file"),
        (
            pa.table([[0], ["a"], [0], [0]], ["cluster", "file", "row", "row"]),
            "has several columns row: it has cluster",
        ),
    ],
)
def test_tables_that_are_none_of_ours(tmp_path: Path, columns: dict | pa.Table, message: str) -> None:
    pyarrow.parquet.write_table(pa.table(columns), tmp_path / "c.parquet")
    with pytest.raises(InputError, match=message):
        generate_duplicates_dict(tmp_path / "c.parquet", tmp_path / "d.pickle", QUIET)


@pytest.mark.parametrize("zeros", [19, 25, 5000])
def test_a_row_that_no_file_has(tmp_path: Path, zeros: int) -> None:
    key = f"a/x@1{'0' * zeros}"
    (tmp_path / "c.pickle").write_bytes(pickle.dumps(([[0, 1]], 1, {0: "a/x@0", 1: key})))
    with pytest.raises(InputError, match=r"c\.pickle: 'a/x@10.*is not a document's key"):
        generate_duplicates_dict(tmp_path / "c.pickle", tmp_path / "d.pickle", QUIET)


def test_a_folder_of_the_users_beside_the_output_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "duplicate_pairs.txt").write_text("a/x@1 :: a/x@2\n")
    notes = [tmp_path / "c.pickle.work/notes.txt", tmp_path / "d.parquet.runs/notes.txt"]
    for path in notes:
        path.parent.mkdir()
        path.write_text("mine")
    generate_connected_components(tmp_path, tmp_path / "c.pickle", options=QUIET)
    generate_duplicates_dict(tmp_path / "c.pickle", tmp_path / "d.parquet", QUIET)
    assert [path.read_text() for path in notes] == ["mine", "mine"]
    assert not list((tmp_path / STATE_DIR).glob("*/"))


@pytest.mark.parametrize("rows", [[0, None], [0.0, 1.5]])
def test_one_cluster_of_a_table_that_is_none_of_ours(tmp_path: Path, rows: list) -> None:
    pyarrow.parquet.write_table(pa.table({"cluster": [0, 0], "file": ["a", "b"], "row": rows}), tmp_path / "c.parquet")
    with pytest.raises(InputError, match=r"column row is .*: expected integers"):
        read_cluster(tmp_path / "c.parquet", DocKey("a", 0), 9)


def test_a_name_that_is_no_unicode(tmp_path: Path) -> None:
    (tmp_path / "c.pickle").write_bytes(pickle.dumps(([[0, 1]], 1, {0: "a@0", 1: "\udc80@1"})))
    with pytest.raises(InputError, match=r"'\\udc80@1' is not a document's key.*generate_connected_components again"):
        generate_duplicates_dict(tmp_path / "c.pickle", tmp_path / "d.pickle", QUIET)


@pytest.mark.parametrize("rows", [[0, 0], [0, 1, 1]])
def test_a_document_twice_in_a_cluster(tmp_path: Path, rows: list[int]) -> None:
    write_table(tmp_path / "c.parquet", [[("a/x", row) for row in rows]])
    with pytest.raises(InputError, match=r"a/x@\d is in the clusters twice"):
        generate_duplicates_dict(tmp_path / "c.parquet", tmp_path / "d.pickle", QUIET)


def test_a_document_in_two_clusters(tmp_path: Path, chained_norm: Path) -> None:
    key = ("arxiv/a.jsonl", 0)
    with pytest.raises(InputError, match=r"arxiv/a\.jsonl@0 is in the clusters twice"):
        removed_by(
            tmp_path, [[key, ("arxiv/a.jsonl", 2)], [key, ("arxiv/a.jsonl", 4)]], verify="jaccard", corpus=chained_norm
        )


@pytest.mark.parametrize("clusters", [[[0, 1], [1, 0]], [[1, 2], [0, 1]]])
def test_a_document_that_one_cluster_keeps_and_another_removes(tmp_path: Path, clusters: list[list[int]]) -> None:
    write_table(tmp_path / "c.parquet", [[("a/x", row) for row in cluster] for cluster in clusters])
    with pytest.raises(InputError, match=r"a/x@\d is in the clusters twice"):
        generate_duplicates_dict(tmp_path / "c.parquet", tmp_path / "d.pickle", QUIET)
    assert not list(tmp_path.glob("d.*"))
