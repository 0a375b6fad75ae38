"""Texts of members: fetched slice by slice, ranked by the keep policy, or read straight from the corpus."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from dedup import deduplicate
from dedup.cluster_graph import read_some
from dedup.clustering.keep_policy import Candidate, KeepPolicy, Rank
from gristmill.errors import InputError, UsageError
from gristmill.io.documents import DocKey
from tests.dedup.removal.clustered_corpus import (
    COMMAND,
    removed_by,
    verified_plainly,
    write_corpus,
)

DATED: dict[str, list[Any]] = {
    "a/x.jsonl": [
        {"text": "one " * 9, "meta": {"date": "2021-05-01"}},
        {"text": "two " * 9, "meta": {"date": "2023-05-01T10:00:00Z"}},
        {"text": "three " * 9, "meta": {}},
        {"text": "four", "meta": {"date": "soon"}},
    ],
    "b/y.parquet": [{"text": "five", "meta": {"date": "2022-01-01"}}, {"text": "six", "meta": {"date": "2024-01-01"}}],
}


def test_the_newest_by_a_field_of_the_record(tmp_path: Path, run: Callable) -> None:
    write_corpus(tmp_path / "NORM", DATED)
    a, b = "a/x.jsonl", "b/y.parquet"
    clusters = [[(a, 0), (a, 1), (b, 0)], [(a, 2), (a, 3), (b, 1)]]
    found = removed_by(tmp_path, clusters, keep="newest:meta.date", corpus=tmp_path / "NORM")
    assert found == {(a, 0): (a, 1), (b, 0): (a, 1), (a, 2): (b, 1), (a, 3): (b, 1)}
    options = f"--keep newest:meta.date --corpus {tmp_path}/NORM"
    ended = run(COMMAND.format(clusters=tmp_path / "c.parquet", out=tmp_path / "e.pickle", options=options))
    assert "note: meta.date is missing in 1 of 6 documents, and neither a number nor a date in 1" in ended.stderr
    assert "a/x.jsonl@3: 'soon'" in ended.stderr


@pytest.mark.parametrize(
    ("field", "found"), [("meta.day", "a/x.jsonl@0 has the fields text, meta"), ("text", "'one one"), ("date", "meta")]
)
def test_a_field_that_no_record_has(tmp_path: Path, field: str, found: str) -> None:
    write_corpus(tmp_path / "NORM", DATED)
    clusters = [[("a/x.jsonl", 0), ("a/x.jsonl", 1), ("b/y.parquet", 0)]]
    with pytest.raises(UsageError, match=f"--keep newest:{field}: none of the 3 documents in clusters has") as error:
        removed_by(tmp_path, clusters, keep=f"newest:{field}", corpus=tmp_path / "NORM")
    assert found in str(error.value)
    assert not (tmp_path / "d.parquet").exists()


@dataclass(frozen=True)
class Shortest(KeepPolicy):
    """A policy that a user adds to the code, as the guide shows: one class."""

    name = "shortest"
    reads_documents = True

    def rank(self, candidate: Candidate) -> Rank:
        return len(candidate.text), 0


def test_a_policy_is_one_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage and the library call ask it for ranks, and know nothing else of it."""
    texts = ["one and the same text, and more", "one and the same text", "one and the same text, much the same"]
    write_corpus(tmp_path / "NORM", {"a/x.jsonl": texts})
    clusters = [[("a/x.jsonl", 0), ("a/x.jsonl", 1), ("a/x.jsonl", 2)]]
    for module in ("dedup.generate_duplicates_dict", "dedup.deduplicate"):
        monkeypatch.setattr(import_module(module), "parse_keep", lambda _: Shortest())
    found = removed_by(tmp_path, clusters, keep="shortest", corpus=tmp_path / "NORM")
    assert found == {("a/x.jsonl", 0): ("a/x.jsonl", 1), ("a/x.jsonl", 2): ("a/x.jsonl", 1)}
    alike = ["the mill grinds the grain.", "the mill grinds the grain", "The mill grinds the grain..."]
    assert deduplicate(alike, keep="shortest").kept.tolist() == [1]


def test_the_longest_text(tmp_path: Path) -> None:
    write_corpus(tmp_path / "NORM", {"a/x.jsonl": ["ab", "日本語", "abc", "äöüß", "12345678"]})
    clusters = [[("a/x.jsonl", row) for row in range(4)]]
    found = removed_by(tmp_path, clusters, keep="longest", corpus=tmp_path / "NORM")
    assert found == {("a/x.jsonl", row): ("a/x.jsonl", 3) for row in range(3)}
    assert removed_by(tmp_path, [clusters[0][:3]], keep="longest", corpus=tmp_path / "NORM") == {
        ("a/x.jsonl", 0): ("a/x.jsonl", 1), ("a/x.jsonl", 2): ("a/x.jsonl", 1),
    }  # fmt: skip


def test_no_text_is_copied_where_nothing_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_corpus(tmp_path / "NORM", {"a/x.jsonl": [{"text": "ab", "id": "7"}, {"text": "abc", "id": "8"}]})
    monkeypatch.setattr("dedup.removal.fetching._move_texts", lambda *_: pytest.fail("texts are copied"))
    found = removed_by(tmp_path, [[("a/x.jsonl", 0), ("a/x.jsonl", 1)]], keep="longest", corpus=tmp_path / "NORM")
    assert found == {("a/x.jsonl", 0): ("a/x.jsonl", 1)}


def test_the_text_may_be_in_another_column(tmp_path: Path) -> None:
    write_corpus(tmp_path / "NORM", {"a/x.jsonl": [{"body": "ab"}, {"body": "abcd", "text": ""}, {"body": "abc"}]})
    clusters = [[("a/x.jsonl", row) for row in range(3)]]
    found = removed_by(tmp_path, clusters, keep="longest", corpus=tmp_path / "NORM", text_column="body")
    assert found == {("a/x.jsonl", row): ("a/x.jsonl", 1) for row in (0, 2)}


def test_of_an_index_no_text_is_needed_to_keep_the_longest(tmp_path: Path) -> None:
    write_corpus(tmp_path / "NORM", {"a/x.jsonl": ["ab", "abcd", "abc"]})
    old, ours = ("index:2022:a/x.jsonl", 7), [("a/x.jsonl", row) for row in range(3)]
    found = removed_by(tmp_path, [[old, ours[0]], ours[1:]], keep="longest", corpus=tmp_path / "NORM")
    assert found == {ours[0]: old, ours[2]: ours[1]}


def test_a_large_file_is_read_in_slices(chained: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, clusters = chained
    monkeypatch.setattr("gristmill.io.readers.SLICE_BYTES", 20_000)
    write_corpus(tmp_path / "NORM", files)
    options = {"verify": "jaccard", "corpus": tmp_path / "NORM"}
    found = removed_by(tmp_path, clusters, **options)
    assert found == {key: kept for key, (kept, _) in verified_plainly(files, clusters, "jaccard", 0.8).items()}


def test_texts_come_from_the_slices_that_hold_them(
    write: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a.jsonl", [f"text {row}" for row in range(500)])
    data = (tmp_path / "a.jsonl").read_bytes()
    (tmp_path / "a.jsonl").write_bytes(data.replace(b'{"text":"text 3"}', b"{torn}         ", 1))
    monkeypatch.setattr("gristmill.io.readers.SLICE_BYTES", 1000)
    rows = [499, 0, 250, 251]
    found = {it.key: it.text for it in read_some(tmp_path, [DocKey("a.jsonl", row) for row in rows])}
    assert found == {DocKey("a.jsonl", row): f"text {row}" for row in rows}
    for row in (3, 500, 9999):
        with pytest.raises(InputError, match=f"no document in row {row}"):
            list(read_some(tmp_path, [DocKey("a.jsonl", row)]))
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
