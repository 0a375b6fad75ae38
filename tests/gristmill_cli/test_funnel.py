"""The funnel: files of the corpus that were not read are in it, and disturb no count of documents."""

from pathlib import Path

import pytest
from rich.console import Console

from gristmill.counts import READ, WRITTEN, Counts, Tally
from gristmill.errors import InputError
from gristmill_cli.funnel import TRAIN, Funnel, build_funnel, show_funnel


def stage(*unread: str) -> Counts:
    counts = Counts({}, [])
    counts.add_read_file("book")
    for reason in (READ, WRITTEN):
        counts.add("book", reason, 10)
    for reason in unread:
        counts.add_unread_file("book", reason, 7)
    return counts


def test_files_not_read_by_the_first_stage_are_shown() -> None:
    later = stage(".malformed")  # such files of ours are no part of the corpus
    funnel = build_funnel([stage(".csv", ".csv", ".md"), later, later, later, later], {})
    assert funnel.tallies["book"] == {
        READ: Tally(1, 10, 1), "not read: .csv": Tally(0, 14, 2), "not read: .md": Tally(0, 7, 1), TRAIN: Tally(1, 10),
    }  # fmt: skip
    console = Console(width=160)
    with console.capture() as shown:
        console.print(Funnel(funnel.tallies, {TRAIN: {}}))
    row = next(line.split() for line in shown.get().splitlines() if ".csv" in line)
    assert row[-5:] == ["1", "2", ".csv,", "1", ".md"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b'{"went": {',
        b'{"went": {"book": {"read": {"documents": 2}}}, "tokens": {"train": {}}}',  # two came in, none is left
        b'{"went": {}, "tokens": {}}',
    ],
)
def test_a_damaged_funnel_is_not_shown(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "funnel.json").write_bytes(content)
    with pytest.raises(InputError, match=r"funnel\.json is damaged .*run the same `gristmill run` again"):
        show_funnel(tmp_path)
