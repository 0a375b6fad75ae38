"""Clusters from pair files, and the keys to remove from them."""

import pickle
from pathlib import Path

import pytest

from dedup import generate_connected_components, generate_duplicates_dict, generate_exact_pairs
from gristmill.engine.options import RunOptions
from gristmill.errors import InputError, UsageError
from gristmill.io.files import mark_unfinished

QUIET = RunOptions(workers=1, quiet=True)


def clusters_in(path: Path) -> list[list[str]]:
    components, _, keys = pickle.loads(path.read_bytes())
    return [[keys[number] for number in component] for component in components]


def unite(folder: Path, lines: list[str]) -> list[list[str]]:
    folder.mkdir(exist_ok=True)
    (folder / "duplicate_pairs.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    generate_connected_components(folder, folder / "connected_components.pickle", options=QUIET)
    return clusters_in(folder / "connected_components.pickle")


def test_chains_join_and_members_stand_in_key_order(tmp_path: Path) -> None:
    lines = ["b/x@10 :: b/x@9", "a/y@0 :: b/x@10", "c/z@1 :: c/z@0", "b/x@9 :: b/x@10"]
    assert unite(tmp_path, lines) == [["a/y@0", "b/x@9", "b/x@10"], ["c/z@0", "c/z@1"]]


def test_no_pair_at_all(tmp_path: Path) -> None:
    assert unite(tmp_path, []) == []
    generate_duplicates_dict(tmp_path / "connected_components.pickle", tmp_path / "duplicates.pickle", options=QUIET)
    assert pickle.loads((tmp_path / "duplicates.pickle").read_bytes()) == {}
    generate_connected_components(tmp_path, tmp_path / "components.parquet", options=QUIET)
    generate_duplicates_dict(tmp_path / "components.parquet", tmp_path / "other.parquet", options=QUIET)


@pytest.mark.parametrize(
    "bad",
    ["no pair", "a/x@1 : a/x@2", "a/x :: a/x@2", "a/x@1 :: a/x@", "", "a/x@1 :: a/x@-2", "a/x@1 :: b@2 :: a/y@3",
     f"a/x@1 :: a/x@{1 << 40}", f"a/x@{(1 << 63) - 1} :: a/x@1", f"a/x@{1 << 63} :: a/x@1", f"a/x@1 :: a/x@{10**25}"],
)  # fmt: skip
def test_a_malformed_line_is_named(tmp_path: Path, bad: str) -> None:
    with pytest.raises(InputError, match=r"duplicate_pairs\.txt line 2: expected .* got "):
        unite(tmp_path, ["a/x@1 :: a/x@2", bad, "a/x@3 :: a/x@2"])
    assert not (tmp_path / "connected_components.pickle").exists()


def test_pairs_that_are_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "duplicate_pairs.txt").write_bytes(b"a/x@1 :: a/x@2\n\xff@1 :: a/x@2\n")
    with pytest.raises(InputError, match="line 2"):
        generate_connected_components(tmp_path, tmp_path / "c.pickle", options=QUIET)


def test_several_files_of_pairs(tmp_path: Path) -> None:
    (tmp_path / "duplicate_pairs_2.txt").write_text("a/x@1 :: a/x@2\n")
    assert unite(tmp_path, ["a/x@2 :: a/x@3"]) == [["a/x@1", "a/x@2", "a/x@3"]]


def test_without_pairs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="which generate_duplicate_pairs writes, or --signatures"):
        generate_connected_components(tmp_path, tmp_path / "c.pickle", options=QUIET)


def test_a_name_that_is_neither_pickle_nor_table(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\.pickle .* or \.parquet"):
        generate_connected_components(tmp_path, tmp_path / "c.txt", options=QUIET)


def test_a_result_elsewhere_leaves_the_first_one_be(tmp_path: Path) -> None:
    unite(tmp_path, ["a/x@2 :: a/x@3"])
    generate_connected_components(tmp_path, tmp_path / "other/connected_components.pickle", options=QUIET)
    first, other = tmp_path / "connected_components.pickle", tmp_path / "other/connected_components.pickle"
    assert first.read_bytes() == other.read_bytes()


def test_all_but_the_first_are_duplicates(tmp_path: Path) -> None:
    unite(tmp_path, ["b/x@10 :: b/x@9", "a/y@0 :: b/x@10", "c/z@1 :: c/z@0"])
    counts = generate_duplicates_dict(tmp_path / "connected_components.pickle", tmp_path / "d.pickle", options=QUIET)
    assert pickle.loads((tmp_path / "d.pickle").read_bytes()) == {"b/x": {9, 10}, "c/z": {1}}
    assert (counts.total("kept").documents, counts.total("duplicate").documents) == (2, 3)


def test_slimpajamas_components_are_read(tmp_path: Path) -> None:
    """Its components are sets as networkit numbers them; the first in its order is the one it keeps."""
    components = ([[1, 0], [2, 3]], 2, {0: "a/x@5", 1: "b/x@3", 2: "a/x@1", 3: "a/y@1"})
    (tmp_path / "c.pickle").write_bytes(pickle.dumps(components))
    generate_duplicates_dict(tmp_path / "c.pickle", tmp_path / "d.pickle", options=QUIET)
    assert pickle.loads((tmp_path / "d.pickle").read_bytes()) == {"a/x": {5}, "a/y": {1}}


class Surprise:
    def __reduce__(self) -> tuple:
        return print, ("this code must not run",)


@pytest.mark.parametrize("value", [Surprise(), {"a": {1}}, ([[0, 9]], 1, {0: "a@1"}), ([[0]], 1, {0: "no key"}), 7])
def test_pickles_that_hold_something_else(tmp_path: Path, value: object, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "c.pickle").write_bytes(pickle.dumps(value))
    with pytest.raises((InputError, UsageError), match=r"c\.pickle"):
        generate_duplicates_dict(tmp_path / "c.pickle", tmp_path / "d.pickle", options=QUIET)
    assert "must not run" not in capsys.readouterr().out


def test_no_components(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"expected a [.]pickle file"):
        generate_duplicates_dict(tmp_path / "c.pickle", tmp_path / "d.pickle", options=QUIET)


def test_duplicates_of_other_clusters_are_not_replaced(tmp_path: Path) -> None:
    for name in "ab":
        unite(tmp_path / name, [f"{name}/x@2 :: {name}/x@3"])
    clusters = [tmp_path / name / "connected_components.pickle" for name in "ab"]
    for _ in range(2):
        generate_duplicates_dict(clusters[0], tmp_path / "d.pickle", options=QUIET)
    with pytest.raises(UsageError, match=r"or remove .*/d\.pickle and .*/d\.parquet first"):
        generate_duplicates_dict(clusters[1], tmp_path / "d.pickle", options=QUIET)
    assert pickle.loads((tmp_path / "d.pickle").read_bytes()) == {"a/x": {3}}


def test_pair_files_of_somebody_else_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unite(tmp_path, ["a/x@2 :: a/x@3"])
    (tmp_path / "duplicate_pairs_old.txt").write_text("a/x@1 :: a/x@2\n")
    generate_connected_components(tmp_path, tmp_path / "c.pickle", options=RunOptions(workers=1))
    note = "note: reads 2 pair files that no stage here wrote: duplicate_pairs.txt, duplicate_pairs_old.txt\n"
    assert note in capsys.readouterr().err


def test_a_pair_file_that_a_stage_wrote_is_missed(norm: Path, tmp_path: Path) -> None:
    generate_exact_pairs(norm, tmp_path / "dup/duplicate_pairs_exact.txt", options=RunOptions(workers=1))
    unite(tmp_path / "dup", ["a/x@2 :: a/x@3"])
    (tmp_path / "dup/duplicate_pairs_exact.txt").unlink()
    with pytest.raises(InputError, match=r"duplicate_pairs_exact.txt, which generate_exact_pairs wrote, is missing"):
        unite(tmp_path / "dup", ["a/x@2 :: a/x@3"])


def test_pair_files_that_were_not_finished_are_refused(tmp_path: Path) -> None:
    """The first may not be there yet, and none but pair files matter."""
    unite(tmp_path, ["a/x@2 :: a/x@3"])
    mark_unfinished(tmp_path, "other", [tmp_path / "other.txt"])
    unite(tmp_path, ["a/x@2 :: a/x@3"])
    mark_unfinished(tmp_path, "generate_exact_pairs", [tmp_path / "duplicate_pairs_exact.txt"])
    with pytest.raises(InputError, match=r"duplicate_pairs_exact\.txt is not up to date: generate_exact_pairs, which"):
        unite(tmp_path, ["a/x@2 :: a/x@3"])


@pytest.mark.parametrize("options", [{"bands": 8}, {"threshold": 0.5}, {"scope": "per-source"}])
def test_options_of_signatures_are_refused_without_them(tmp_path: Path, options: dict) -> None:
    (tmp_path / "duplicate_pairs.txt").write_text("a/x@1 :: a/x@0\n")
    with pytest.raises(UsageError, match="have no effect on pairs that are already made: give --signatures"):
        generate_connected_components(tmp_path, tmp_path / "c.parquet", **options)
