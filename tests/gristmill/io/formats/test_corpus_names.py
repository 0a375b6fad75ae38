"""Names of corpus files: those that can be on one disk, and those that cannot."""

from pathlib import Path

import pytest

from gristmill.errors import UsageError
from gristmill.io.formats.corpus_names import corpus_name, reject_clashes


def test_names_that_begin_alike_are_no_clash() -> None:
    reject_clashes(Path("in"), sorted(["a", "a b/c", "a.b", "ab", "ab.c", "b/a", "b/a.c/d", "b/ab"]))


@pytest.mark.parametrize("names", [["a", "a!", "a.b", "a/b"], ["x/a", "x/a.b", "x/a.b/c/d"], ["a", "a b", "a/b/c"]])
def test_a_file_and_a_folder_of_one_name(names: list[str]) -> None:
    with pytest.raises(UsageError, match=r"is a file, and in .* it is a folder"):
        reject_clashes(Path("in"), names)


def test_lengths_are_those_of_disks() -> None:
    assert corpus_name(f"{'d' * 255}/{'ö' * 100}")
    for name in (f"{'ö' * 128}/a", "ö" * 101):
        with pytest.raises(UsageError, match="wanted at most"):
            corpus_name(name)
