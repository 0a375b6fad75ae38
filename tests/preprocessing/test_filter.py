"""filter: the length rule, and key sets extended one data set at a time."""

import pickle
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.counts import READ
from gristmill.engine.key_sets import merge_keys
from gristmill.engine.options import RunOptions
from gristmill.engine.task import FileSet
from gristmill.errors import TooManyMalformed, UsageError
from gristmill.io import readers as reading
from gristmill.io.keys import read_keys, write_keys
from gristmill.text import matching_form
from preprocessing.filter import filter as find_short
from preprocessing.minimum_length import is_short
from tests.gristmill.engine.sandbox import sandboxed
from tests.patience import patience

FILTER = "preprocessing/filter.py"


def short_of(path: Path) -> dict[str, set[int]]:
    with path.open("rb") as file:
        return pickle.load(file)


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("abcde", 5),
        ("  ab,  c\n\td!  ", 6),
        ("?!.,;:-_()[]{}", 0),
        ("ÄÖÜß—“”", 7),  # only ASCII punctuation goes
        ("日本語", 3),
        ("😀" * 4, 4),
        ("İ", 2),  # lower case is two code points
        ("", 0),
    ],
)
def test_length_is_in_characters_of_the_matching_form(
    tmp_path, quiet: RunOptions, write, text: str, length: int
) -> None:
    write(tmp_path / "norm" / "book" / "a.jsonl", [{"text": text}, {"text": "long enough"}])
    for threshold, wanted in ((length, {}), (length + 1, {"book/a.jsonl": {0}})):
        find_short(tmp_path / "norm", tmp_path / "short.pickle", 2, "all", threshold, quiet)
        assert short_of(tmp_path / "short.pickle") == wanted


@pytest.mark.parametrize(("text", "length"), [("a  B, c!", 5), ("日本語。", 12), ("😀" * 4, 16), ("Ä-ß", 4), ("", 0)])
def test_length_may_be_in_bytes(tmp_path, quiet: RunOptions, write, text: str, length: int) -> None:
    write(tmp_path / "norm" / "book" / "a.jsonl", [{"text": text}])
    for threshold, wanted in ((length, {}), (length + 1, {"book/a.jsonl": {0}})):
        find_short(tmp_path / "norm", tmp_path / "short.pickle", 1, "all", threshold, quiet, unit="byte")
        assert short_of(tmp_path / "short.pickle") == wanted


def test_source_folder_and_corpus_root_give_the_same(tmp_path: Path, quiet: RunOptions, corpus) -> None:
    norm = corpus(book=6, c4=4)
    find_short(norm, tmp_path / "all.pickle", 10, "all", 30, quiet)
    for source in ("c4", "book"):
        find_short(norm / source, tmp_path / "each.pickle", 5, source, 30, quiet)
        find_short(norm, tmp_path / "named.pickle", 5, source, 30, quiet)
    assert (
        short_of(tmp_path / "all.pickle") == short_of(tmp_path / "each.pickle") == short_of(tmp_path / "named.pickle")
    )
    assert {name.split("/")[0] for name in short_of(tmp_path / "all.pickle")} == {"book", "c4"}


def test_second_run_replaces_only_its_own_data_set(tmp_path: Path, quiet: RunOptions, write) -> None:
    write(tmp_path / "norm" / "book" / "a.jsonl", [{"text": "abc"}, {"text": "abcdef"}])
    write(tmp_path / "norm" / "book" / "b.jsonl", [{"text": "abc"}])
    write(tmp_path / "norm" / "c4" / "a.jsonl", [{"text": "abc"}])
    out = tmp_path / "short.pickle"
    find_short(tmp_path / "norm" / "book", out, 0, "book", 10, quiet)
    find_short(tmp_path / "norm" / "c4", out, 0, "c4", 10, quiet)
    assert short_of(out) == {"book/a.jsonl": {0, 1}, "book/b.jsonl": {0}, "c4/a.jsonl": {0}}
    (tmp_path / "norm" / "book" / "b.jsonl").unlink()
    find_short(tmp_path / "norm" / "book", out, 0, "book", 5, quiet)
    assert short_of(out) == {"book/a.jsonl": {0}, "c4/a.jsonl": {0}}
    find_short(tmp_path / "norm" / "c4", out, 0, "c4", 0, quiet)
    assert short_of(out) == {"book/a.jsonl": {0}}


def test_concurrent_runs_lose_nothing(tmp_path: Path, start, corpus, capsys) -> None:
    sizes = {f"s{i}": 3 + i for i in range(4)}
    norm = corpus(files=1, **sizes)
    started = [
        start(FILTER, norm / name, tmp_path / "short.pickle", size, name, 10_000) for name, size in sizes.items()
    ]
    errors = [process.communicate(timeout=patience(60))[1] for process in started]
    assert [process.returncode for process in started] == [0] * 4, errors
    assert short_of(tmp_path / "short.pickle") == {f"{s}/0.jsonl": set(range(n)) for s, n in sizes.items()}
    for name in sizes:
        find_short(norm / name, tmp_path / "short.pickle", 0, name, 10_000, RunOptions(workers=1))
    assert capsys.readouterr().err.count("done already") == 4


def test_a_merge_has_what_another_call_found_while_it_waited(
    tmp_path: Path, corpus, quiet, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm = corpus(files=1, s0=3, s1=4)
    module = sys.modules[find_short.__module__]
    real_open = module.open_stage
    others = ["s1"]

    def open_stage(*arguments, part: str, **named):
        if part == "all/merged" and others:
            name = others.pop()
            find_short(norm / name, tmp_path / "short.pickle", 0, name, 10_000, quiet)
        return real_open(*arguments, part=part, **named)

    monkeypatch.setattr(module, "open_stage", open_stage)
    find_short(norm / "s0", tmp_path / "short.pickle", 0, "s0", 10_000, quiet)
    assert short_of(tmp_path / "short.pickle") == {"s0/0.jsonl": {0, 1, 2}, "s1/0.jsonl": {0, 1, 2, 3}}


def test_parquet_table_equals_the_pickle(
    tmp_path: Path, quiet: RunOptions, corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm = corpus(book=30)
    find_short(norm, tmp_path / "a.pickle", 0, "all", 40, quiet)
    monkeypatch.setattr(reading, "SLICE_BYTES", 300)
    counts = find_short(norm, tmp_path / "a.parquet", 0, "all", 40, quiet)
    table = {file: set(rows.tolist()) for file, rows in read_keys(tmp_path / "a.parquet").items()}
    assert table == short_of(tmp_path / "a.pickle")
    assert counts.total("short").documents == sum(map(len, table.values())) > 0
    assert counts.total(READ).documents == 30


def test_invalid_arguments_are_rejected_before_the_work(tmp_path: Path, quiet: RunOptions, corpus) -> None:
    with pytest.raises(UsageError, match="threshold -1"):
        find_short(corpus(book=1), tmp_path / "a.pickle", 0, "all", -1, quiet)
    with pytest.raises(UsageError, match=r"\.pickle"):
        find_short(corpus(book=1), tmp_path / "a.txt", 0, "all", 1, quiet)
    assert not (tmp_path / ".gristmill").exists()


@given(
    st.lists(st.sampled_from([*"aB. ,!\tΣσİéß", "word ", " . ", "\u2003", "日本"]) | st.characters()),
    st.integers(0, 12),
)
def test_is_short_equals_its_definition(pieces: list[str], threshold: int) -> None:
    text = "".join(pieces)
    assert is_short(text, threshold) == (len(matching_form(text)) < threshold)


def test_rows_are_sorted_as_numbers(tmp_path: Path, quiet: RunOptions, corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "SLICE_BYTES", 300)
    find_short(corpus(files=1, book=60), tmp_path / "a.parquet", 0, "all", 10_000, quiet)
    table = pyarrow.parquet.read_table(tmp_path / "a.parquet")
    assert table.column("row").to_pylist() == list(range(60))


def test_another_folder_of_the_same_data_set_is_refused(tmp_path: Path, quiet: RunOptions, corpus) -> None:
    one, two = corpus("one", book=4), corpus("two", book=6)
    find_short(one, tmp_path / "a.pickle", 0, "book", 10_000, quiet)
    with pytest.raises(UsageError, match=r"would lose it if .*two/book were"):
        find_short(two, tmp_path / "a.pickle", 0, "book", 10_000, quiet)
    assert sum(map(len, short_of(tmp_path / "a.pickle").values())) == 4


def test_all_data_sets_of_another_folder_are_refused(tmp_path: Path, quiet: RunOptions, corpus) -> None:
    one, two = corpus("one", book=4, c4=4), corpus("two", book=6)
    find_short(one / "book", tmp_path / "a.pickle", 0, "book", 10_000, quiet)
    with pytest.raises(UsageError, match=r"would lose it if .*two/book were"):
        find_short(two / "book", tmp_path / "a.pickle", 0, "book", 10_000, quiet)
    assert sum(map(len, short_of(tmp_path / "a.pickle").values())) == 4


def test_all_data_sets_at_once_and_one_at_a_time_are_not_mixed(tmp_path: Path, quiet: RunOptions, corpus) -> None:
    """Keys of one data set would stand in two records, of which one may be of another threshold."""
    norm = corpus("one", book=4, c4=4)
    find_short(norm / "book", tmp_path / "a.pickle", 0, "book", 10_000, quiet)
    with pytest.raises(UsageError, match=r"holds what filter-a\.pickle\+.* wrote, .*; give another output file"):
        find_short(norm, tmp_path / "a.pickle", 0, "all", 10_000, quiet)
    find_short(norm, tmp_path / "b.pickle", 0, "all", 10_000, quiet)
    with pytest.raises(UsageError, match=r"holds what filter-b\.pickle wrote, .*; give another output file"):
        find_short(norm / "book", tmp_path / "b.pickle", 0, "book", 10, quiet)
    assert sum(map(len, short_of(tmp_path / "a.pickle").values())) == 4
    assert sum(map(len, short_of(tmp_path / "b.pickle").values())) == 8


def test_output_in_the_corpus_is_refused(tmp_path: Path, quiet: RunOptions, corpus) -> None:
    with pytest.raises(UsageError, match="lies in the corpus"):
        find_short(corpus(book=4), tmp_path / "norm" / "book" / "a.parquet", 0, "all", 10, quiet)


def test_too_many_malformed_records_leave_the_keys_as_they_were(tmp_path: Path, quiet: RunOptions, write) -> None:
    write(tmp_path / "norm" / "book" / "a.jsonl", [{"text": "abc"}])
    find_short(tmp_path / "norm", tmp_path / "a.pickle", 0, "all", 10, quiet)
    write(tmp_path / "norm" / "book" / "a.jsonl", [{"text": None}, {"text": "abc"}])
    with pytest.raises(TooManyMalformed):
        find_short(tmp_path / "norm", tmp_path / "a.pickle", 0, "all", 10, quiet)
    assert short_of(tmp_path / "a.pickle") == {"book/a.jsonl": {0}}


def test_tasks_open_only_what_they_declare(tmp_path: Path, quiet: RunOptions, corpus, monkeypatch) -> None:
    monkeypatch.setattr(reading, "SLICE_BYTES", 400)
    norm = corpus(files=3, book=40, c4=4)
    with sandboxed(tmp_path) as sandbox:
        for name in ("c4", "book"):
            find_short(norm, tmp_path / "sandboxed.pickle", 0, name, 40, quiet)
    assert sandbox.tasks > 8
    find_short(norm, tmp_path / "plain.pickle", 0, "all", 40, quiet)
    assert (tmp_path / "sandboxed.pickle").read_bytes() == (tmp_path / "plain.pickle").read_bytes()


@pytest.mark.parametrize("suffix", [".pickle", ".parquet"])
def test_merging_holds_a_file_at_a_time(tmp_path: Path, suffix: str) -> None:
    files = [f"s/{number:02}" for number in range(50)]
    for number, file in enumerate(reversed(files)):
        write_keys(tmp_path / f"{number}.parquet", {file: np.arange(0, 12_000, 2)})
    found = FileSet(tuple(tmp_path / f"{number}.parquet" for number in range(50)))
    tracemalloc.start()
    merge_keys(found, tmp_path / f"all{suffix}", memory=4 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12e6, peak
    write_keys(tmp_path / f"whole{suffix}", {file: np.arange(0, 12_000, 2) for file in files})
    assert (tmp_path / f"all{suffix}").read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()
    if suffix == ".pickle":
        assert (tmp_path / "all.pickle").read_bytes() == pickle.dumps(
            {file: {*range(0, 12_000, 2)} for file in files}, 4
        )
