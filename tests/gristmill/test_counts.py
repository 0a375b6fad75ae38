"""Counts: files are counted beside documents, which alone must be conserved."""

import msgspec
import pytest
from rich.console import Console

from gristmill.counts import NOT_READ, READ, WRITTEN, Counts, Tally
from gristmill.errors import ConservationError


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
