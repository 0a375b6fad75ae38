"""Names of files, joined and made relative by strings alone: as os.path does it, in a fraction of the time."""

import os
from itertools import product
from pathlib import Path

import pytest

from gristmill.paths import join, name_of, relative_to

FOLDERS = ("/", "/a", "/a/b", "/a/b/c", "/ab", "/s3:/bucket/a", "/s3:/other")
RELATIVE = ("c", "c.txt", "c/d.txt", "../c", "../../c/d", "../../../../c", "..", "../..", ".", "./c", "../b/../c", ".c")
RELATIVE += ("c/.d/e", "c/..", "..c/d")


def test_as_os_path_does_it() -> None:
    for folder, relative in product(FOLDERS, RELATIVE):
        assert join(folder, relative) == os.path.normpath(os.path.join(folder, relative)), (folder, relative)
    names = {*FOLDERS, *(join(folder, relative) for folder, relative in product(FOLDERS, RELATIVE))}
    for folder, name in product(FOLDERS, sorted(names)):
        assert relative_to(folder, name) == os.path.relpath(name, folder), (folder, name)


def test_names_are_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    paths = ["", "a/", "a//b", "a/./b", "a/.b", "/", "/a/b", "/a/", "//a", "/.a/b", "/a/..b", "/a/..", "s3:/bucket/a"]
    paths += RELATIVE
    for folder in tmp_path / "a", tmp_path, Path("/"):
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        assert [name_of(path) for path in paths] == [os.path.abspath(path) for path in paths], folder
