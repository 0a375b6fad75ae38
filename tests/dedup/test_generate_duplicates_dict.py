"""The removed documents and the kept document of each, against a plain walk over clusters of keys."""

import pickle
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dedup import generate_duplicates_dict
from gristmill.engine.options import RunOptions
from gristmill.errors import UsageError
from gristmill.io.keys import write_keys
from tests.dedup.removal.clustered_corpus import (
    CLUSTERS,
    QUIET,
    Key,
    read_removed,
    removed_by,
    write_pickle,
    write_table,
)


def test_all_but_the_first_whether_pickle_or_table(tmp_path: Path) -> None:
    inputs = [write_pickle(tmp_path / "c.pickle", CLUSTERS), write_table(tmp_path / "c.parquet", CLUSTERS)]
    for path in inputs:
        out = tmp_path / path.suffix[1:] / "d.pickle"
        counts = generate_duplicates_dict(path, out, QUIET)
        assert pickle.loads(out.read_bytes()) == {"a/x": {7}, "b/y": {1, 12}, "c/z": {0, 5}}
        assert read_removed(out.with_suffix(".parquet")) == {
            key: (cluster[0], None) for cluster in CLUSTERS for key in cluster[1:]
        }
        assert (counts.total("read").documents, counts.total("kept").documents) == (8, 3)
        assert counts.total("duplicate", "c").documents == 2
    one, other = ((tmp_path / kind / "d.parquet").read_bytes() for kind in ("pickle", "parquet"))
    assert one == other


def test_sources_in_a_declared_order(tmp_path: Path) -> None:
    found = removed_by(tmp_path, CLUSTERS, keep="source:c,b")
    assert found == {
        ("a/x", 0): ("b/y", 1), ("a/x", 7): ("b/y", 1), ("a/x", 2): ("c/z", 0),
        ("b/y", 3): ("c/z", 5), ("b/y", 12): ("c/z", 5),
    }  # fmt: skip


def test_a_source_that_no_cluster_has_is_pointed_out(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    table = write_table(tmp_path / "c.parquet", CLUSTERS)
    generate_duplicates_dict(table, tmp_path / "d.parquet", RunOptions(workers=1), keep="source:bb,c")
    assert "note: no cluster has a document of bb; a, b, c have" in capfd.readouterr().err


def test_no_cluster_loses_its_last_copy(tmp_path: Path) -> None:
    """What another stage drops comes last, whatever the policy; SlimPajama's pickle and our table say so alike."""
    (tmp_path / "short.pickle").write_bytes(pickle.dumps({"a/x": {0, 2}, "never/seen": {1}}))
    write_keys(tmp_path / "bad.parquet", {"c/z": [0]})
    dropped = (tmp_path / "short.pickle", tmp_path / "bad.parquet")
    found = removed_by(tmp_path, CLUSTERS, dropped=dropped)
    assert found[("a/x", 0)] == found[("b/y", 1)] == ("a/x", 7)
    assert found[("c/z", 0)] == ("a/x", 2)  # all of that cluster is dropped anyway
    assert removed_by(tmp_path, CLUSTERS, dropped=dropped, keep="source:a")[("a/x", 0)] == ("a/x", 7)


def test_documents_of_an_index_are_kept_and_not_counted(tmp_path: Path) -> None:
    old, older = "index:2022:a/x", "index:2023:b/y"
    clusters = [[(old, 3), (older, 1), ("a/x", 0)], [(old, 4), (older, 9)], [("a/x", 5), ("b/y", 5)]]
    assert removed_by(tmp_path, clusters, keep="source:b") == {("a/x", 0): (old, 3), ("a/x", 5): ("b/y", 5)}
    counts = generate_duplicates_dict(tmp_path / "c.parquet", tmp_path / "again.parquet", QUIET)
    assert [counts.total(reason).documents for reason in ("read", "kept", "duplicate")] == [3, 1, 2]


_KEYS = st.tuples(st.sampled_from(["a/x", "a/é@1", "b/y", "index:o:a/x"]), st.integers(0, 30))


@settings(max_examples=40)
@given(keys=st.lists(_KEYS, unique=True, max_size=60), cuts=st.sets(st.integers(2, 58)), drop=st.sets(_KEYS))
def test_equals_a_plain_walk(
    tmp_path_factory: pytest.TempPathFactory, keys: list[Key], cuts: set[int], drop: set[Key]
) -> None:
    folder = tmp_path_factory.mktemp("walk")
    ends = [0, *sorted(cuts), len(keys)]
    clusters = [sorted(keys[i:j]) for i, j in pairwise(ends) if keys[i:j]]
    (folder / "drop.pickle").write_bytes(pickle.dumps({file: {r for f, r in drop if f == file} for file, _ in drop}))
    expected = {}
    for cluster in clusters:
        indexed = {key for key in cluster if key[0].startswith("index:")}  # no stage of ours can drop those
        order = sorted(cluster, key=lambda key: (key not in indexed, key in drop - indexed, key))
        expected |= {key: order[0] for key in order[1:] if key not in indexed}
    assert removed_by(folder, clusters, dropped=(folder / "drop.pickle",)) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"verify": "jaccard"}, "--verify jaccard reads the documents: give --corpus"),
        ({"keep": "longest"}, "--keep longest reads the documents: give --corpus"),
        ({"keep": "oldest"}, "--keep oldest: expected one of first"),
        ({"verify": "jaccard", "threshold": 80.0, "corpus": Path()}, "--threshold 80.0"),
        ({"verify": "jaccard", "width": 0, "corpus": Path()}, "--width 0"),
        ({"verify": "jaccard", "corpus": Path("no/such")}, "no/such: .* a folder"),
        ({"dropped": (Path("none.pickle"),)}, "none.pickle: expected"),
        ({"threshold": 0.5}, "--threshold, --width, --unit and --index have no effect where nothing is compared"),
        ({"unit": "word"}, "have no effect where nothing is compared"),
        ({"text_column": "body"}, "--text_column body has no effect without --corpus"),
    ],
)
def test_options_that_cannot_be_met(tmp_path: Path, options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        removed_by(tmp_path, CLUSTERS, **options)
    assert not (tmp_path / "d.parquet").exists()


def test_no_cluster_at_all(tmp_path: Path, norm: Path) -> None:
    for options in ({}, {"verify": "jaccard", "corpus": norm}, {"keep": "newest:x", "corpus": norm}):
        assert removed_by(tmp_path, [], **options) == {}
        generate_duplicates_dict(write_pickle(tmp_path / "c.pickle", []), tmp_path / "e.pickle", QUIET, **options)
        assert pickle.loads((tmp_path / "e.pickle").read_bytes()) == {}
