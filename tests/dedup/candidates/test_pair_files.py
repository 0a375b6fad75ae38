"""Pair files: keys are parsed unchanged, for any file name."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dedup.candidates.document_ids import DocumentIds
from dedup.candidates.pair_files import ParsedPairs, parse_pairs
from gristmill.engine.task import FileSet
from gristmill.errors import InputError

NAMES = [
    "arxiv/a b.jsonl",
    "arxiv/x@3.jsonl",
    "book/c :: d.jsonl.zst",
    "書/é@1@2.parquet",
    "wiki/'\"[red].jsonl",
    "root.jsonl",
]


@settings(max_examples=40)
@given(st.lists(st.tuples(*[st.sampled_from(NAMES), st.integers(0, 12)] * 2), max_size=30))
def test_names_of_any_kind_travel_unharmed(tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple]) -> None:
    folder = tmp_path_factory.mktemp("pairs")
    path = folder / "duplicate_pairs.txt"
    path.write_text("".join(f"{a}@{i} :: {b}@{j}\n" for a, i, b, j in pairs), encoding="utf-8")
    parsed = ParsedPairs(folder / "pairs.bin", parse_pairs(FileSet((path,)), folder / "pairs.bin").value)
    document_ids = DocumentIds.of(parsed.rows)
    found = [tuple(document_ids.keys(edge).to_pylist()) for edges in parsed.edges(document_ids) for edge in edges]
    assert found == [(f"{a}@{i}", f"{b}@{j}") for a, i, b, j in pairs]


def test_more_rows_than_ids_are_refused() -> None:
    assert len(DocumentIds.of({"a": 1 << 62, "b": (1 << 62) - 1})) == (1 << 63) - 1
    with pytest.raises(InputError, match=r"2 files have rows up to 4,611,.*: expected fewer than 2\^63"):
        DocumentIds.of({"a": 1 << 62, "b": 1 << 62})
