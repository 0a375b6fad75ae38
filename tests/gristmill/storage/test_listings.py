"""A tree of objects: what is below a folder, and directly in it, as a look at every name says."""

import pytest

from gristmill.storage.listings import FileInfo, Tree

NAMES = ("a.txt", "a/b/c", "a/b/d", "a/b.txt", "a/b0/e", "a0", "a-/f", "z", "é/g", "é/h/i")


@pytest.mark.parametrize("folder", ["", "a", "a/b", "a/b0", "a-", "é", "é/h", "b", "z"])
def test_what_is_below_and_in_a_folder(folder: str) -> None:
    tree = Tree((name, FileInfo(len(name))) for name in NAMES)
    top = f"{folder}/" if folder else ""
    inside = sorted(name[len(top) :] for name in NAMES if name.startswith(top))
    assert [name for name, _ in tree.below(folder)] == inside
    folders, files = tree.level(folder)
    assert sorted(folders) == sorted({name.partition("/")[0] for name in inside if "/" in name})
    assert files == {name: FileInfo(len(top + name)) for name in inside if "/" not in name}
