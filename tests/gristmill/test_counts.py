"""Counts: documents are conserved, merged and limited; files are counted beside them."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gristmill.counts import NOT_READ, READ, WRITTEN, Counts, Tally
from gristmill.errors import ConservationError, TooManyMalformed


def some_counts() -> Counts:
    counts = Counts({}, [])
    counts.add_read_file("book")
    counts.add("book", READ, 10)
    counts.add("book", WRITTEN, 10)
    counts.add_unread_file("book", ".csv", 5000)
    counts.add_unread_file("book", ".csv", 70)
    counts.add_unread_file("notes", "hidden", 1)
    return counts


def shown(table: object) -> str:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def test_files_that_are_not_read_do_not_disturb_the_balance_of_documents() -> None:
    counts = some_counts()
    assert counts.check_conserved("a stage") == {"book": (1, 1), "notes": (0, 0)}
    assert counts.total(READ) == Tally(1, 10, 1)
    assert counts.total(f"{NOT_READ}: .csv") == Tally(0, 5070, 2)
    counts.add("book", READ, 1)
    with pytest.raises(ConservationError, match="book"):
        counts.check_conserved("a stage")


def test_files_are_merged_and_stored() -> None:
    counts = some_counts().merge(some_counts())
    assert counts.total(READ).files == 2 and counts.unread_files() == "4 .csv, 2 hidden"
    assert msgspec.json.decode(msgspec.json.encode(counts), type=Counts) == counts
    assert msgspec.json.decode(b'{"documents":1,"bytes":2}', type=Tally) == Tally(1, 2, 0)


def test_the_table_shows_files_read_and_not_read_and_why() -> None:
    lines = shown(some_counts()).splitlines()
    assert lines[0].split("  ")[-1].strip() == "files not read" and "files" in lines[0]
    assert lines[1].split() == ["book", "1", "1", "1", "2", ".csv"]
    assert lines[2].split() == ["notes", "0", "0", "0", "1", "hidden"]
    assert lines[3].split() == ["total", "(*/)", "1", "1", "1", "2", ".csv,", "1", "hidden"]


def test_the_table_of_counts_without_files_has_no_columns_for_them() -> None:
    counts = Counts({}, [])
    counts.add("book", READ, 10)
    assert "files" not in shown(counts)


COUNTED = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from(["read", "written", "short"]), st.integers(0, 99)), max_size=20
)


def counts_of(items: list[tuple[str, str, int]]) -> Counts:
    counts = Counts({}, [])
    for source, reason, size in items:
        counts.add(source, reason, size)
    return counts


@given(COUNTED, COUNTED)
def test_merged_counts_are_counts_of_both(one, two) -> None:
    merged, both = counts_of(one).merge(counts_of(two)), counts_of(one + two)
    for source, reason, tally in both.rows():
        assert merged.total(reason, source) == tally
    assert sum(1 for _ in merged.rows()) == sum(1 for _ in both.rows())


@pytest.mark.parametrize(
    "items",
    [
        [("a", "read", 5)],
        [("a", "read", 5), ("a", "written", 4)],
        [("a", "read", 5), ("b", "written", 5)],
        [("a", "read", 5), ("a", "written", 5), ("a", "repeated", 5)],
    ],
)
def test_counts_that_are_not_conserved_are_an_error(items) -> None:
    with pytest.raises(ConservationError, match="does not add up"):
        counts_of(items).check_conserved("stage")


def test_conserved_counts_are_returned_per_source() -> None:
    counts = counts_of([("a", "read", 5), ("a", "repeated", 5), ("b", "read", 3), ("b", "malformed: broken JSON", 3)])
    counts.add("a", "written", 10, documents=2)
    counts.add("b", "changed", 0, documents=0)
    assert counts.check_conserved("stage") == {"a": (2, 2), "b": (1, 1)}
    assert counts.malformed == 1


def test_the_limit_of_malformed_records_is_a_fraction() -> None:
    counts = counts_of([("a", "read", 1)] * 10 + [("a", "malformed: no text", 1), ("a", "malformed: broken JSON", 1)])
    counts.add_example("a.jsonl line 3: no text")
    counts.check_malformed("stage", 0.2)
    with pytest.raises(TooManyMalformed, match=r"2 of 10 .*a\.jsonl line 3: no text"):
        counts.check_malformed("stage", 0.19)
    Counts({}, []).check_malformed("stage", 0.0)


def test_the_limit_of_malformed_records_is_a_fraction_of_the_bytes_too() -> None:
    whole_file = [("a", "read", 5000), ("a", "malformed: a JSON array", 5000)]
    counts = counts_of([("a", "read", 5)] * 2000 + whole_file)
    with pytest.raises(TooManyMalformed, match=r"1 of 2,001 .* 33\.33% of the bytes"):
        counts.check_malformed("stage", 0.001)
    counts.check_malformed("stage", 0.34)


def test_a_source_named_like_markup_is_shown_as_it_is() -> None:
    console = Console(width=100, record=True, file=None, quiet=False)
    with console.capture() as shown:
        console.print(counts_of([("[red]", "read", 1), ("[/x]", "read", 1), ("a", "no text[/en]", 1)]))
    assert all(name in shown.get() for name in ("[red]", "[/x]", "no text[/en]"))
