"""The ledger: counts are conserved, and entries survive a line that was cut short."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gristmill.counts import Counts, Tally
from gristmill.engine.ledger import Ledger, LedgerEntry
from gristmill.errors import ConservationError, TooManyMalformed

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


def test_a_line_cut_short_is_skipped(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "state" / "a.jsonl")
    assert ledger.read() == {}
    counts = counts_of([("a", "read", 5), ("a", "written", 5)])
    ledger.append(LedgerEntry("one", "f1", {str(tmp_path / "x"): 3}, counts))
    whole = ledger.path.read_bytes()
    ledger.path.write_bytes(whole + whole[: len(whole) // 2])  # killed while it wrote
    ledger.append(LedgerEntry("two", "f2", {}, counts))
    ledger.append(LedgerEntry("one", "f3", {str(tmp_path / "x"): 4}, counts))
    entries = ledger.read()
    assert {name: entry.fingerprint for name, entry in entries.items()} == {"one": "f3", "two": "f2"}
    assert entries["one"].outputs == {str(tmp_path / "x"): 4} and entries["one"].counts.total("read") == Tally(1, 5)


def test_outputs_move_with_the_folder(tmp_path: Path) -> None:
    """A copy of a folder must never speak of, and so remove, files of the original."""
    Ledger(tmp_path / "a" / "s.jsonl").append(LedgerEntry("one", "f", {str(tmp_path / "a" / "x"): 3}, Counts({}, [])))
    (tmp_path / "a").rename(tmp_path / "b")
    assert Ledger(tmp_path / "b" / "s.jsonl").read()["one"].outputs == {str(tmp_path / "b" / "x"): 3}


def test_a_source_named_like_markup_is_shown_as_it_is() -> None:
    console = Console(width=100, record=True, file=None, quiet=False)
    with console.capture() as shown:
        console.print(counts_of([("[red]", "read", 1), ("[/x]", "read", 1)]))
    assert "[red]" in shown.get() and "[/x]" in shown.get()
