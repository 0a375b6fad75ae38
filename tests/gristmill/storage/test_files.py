"""Files: the same answers for a folder of this machine and for one in a bucket."""

import errno
import hashlib
import os
from pathlib import Path
from typing import NoReturn

import pytest

from gristmill.errors import InputError
from gristmill.io.documents import Document
from gristmill.io.readers import read_corpus
from gristmill.storage.files import (
    HIDDEN,
    exists,
    file_info,
    hash_file,
    is_file,
    is_folder,
    list_folder,
    list_names,
    locked_file,
    read_file,
    read_files,
    remove_files,
    remove_folder,
    resolved,
    walk,
    walk_all,
    write_file,
)
from gristmill.storage.local import atomic_write, locked

NAMES = ("a b.txt", "deep/er@1/ö.jsonl", "deep/x", "deeper", ".hidden/y", "deep/.gristmill/z")


@pytest.fixture(params=["local", "remote"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with NAMES, each of which holds its own name."""
    root = tmp_path / "root" if request.param == "local" else request.getfixturevalue("folder") / "root"
    for name in NAMES:
        write_file(root / name, name.encode())
    return root


def test_what_is_there(root: Path) -> None:
    assert [is_file(root / name) for name in (*NAMES, "deep", "no")] == [True] * len(NAMES) + [False] * 2
    assert [is_folder(root / name) for name in ("deep", "deep/er@1", "deeper", "dee", "no")] == [True] * 2 + [False] * 3
    assert [exists(root / name) for name in ("deep", "deeper", "dee")] == [True, True, False]
    info = file_info(root / "deep/x")
    assert info and info.size == 6 and info == list_folder(root / "deep")["x"] and file_info(root / "deep") is None
    assert info != file_info(root / "deeper") and file_info(root / "no") is None


def test_listings(root: Path) -> None:
    assert sorted(list_folder(root)) == ["a b.txt", "deeper"]
    assert sorted(list_names(root)) == [".hidden", "a b.txt", "deep", "deeper"]
    assert list_names(root / "no") == [] and list_folder(root / "no") == {}
    seen = ["a b.txt", "deep/er@1/ö.jsonl", "deep/x", "deeper"]
    assert sorted(path.relative_to(root).as_posix() for path in walk(root)) == seen
    found = {path.relative_to(root).as_posix(): (size, reason) for path, size, reason in walk_all(root, ".gristmill")}
    assert {name for name, (_, reason) in found.items() if not reason} == set(seen)
    assert {reason for _, reason in found.values()} == {"", HIDDEN}
    assert found["deep/er@1/ö.jsonl"] == (18, "")


def test_contents(root: Path) -> None:
    assert read_file(root / "deep/x") == b"deep/x"
    assert hash_file(root / "deep/x") == hashlib.sha256(b"deep/x").hexdigest()
    with pytest.raises(FileNotFoundError):
        read_file(root / "no")
    assert list(read_files([root / "deeper", root / "no", root / "deep/x"])) == [b"deeper", b"deep/x"]
    write_file(root / "deep/x", b"")
    assert read_file(root / "deep/x") == b""


def test_removal(root: Path) -> None:
    remove_files([root / "deep/x", root / "no"])
    remove_folder(root / "deep/er@1")
    remove_folder(root / "no")
    assert [is_file(root / name) for name in NAMES] == [True, False, False, True, True, True]


def test_names(root: Path) -> None:
    assert resolved(root / "x") == resolved(resolved(root) / "x") and resolved(root).is_absolute()
    with locked_file(root / "lock"):
        write_file(root / "deep/x", b"1")


def test_no_local_file_has_the_name_of_an_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for open_file in (atomic_write, locked):
        with pytest.raises(AssertionError, match="s3:/bucket/a is remote"), open_file(Path("s3://bucket/a")):
            pass
    assert not list(tmp_path.iterdir())


def test_a_folder_that_may_not_be_searched_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "stat", _refuse)  # as root, who runs tests in containers, may search every folder
    for asked in (is_file, is_folder, exists, read_first):
        with pytest.raises(InputError, match=f"cannot read {tmp_path}/private/a: Permission denied"):
            asked(tmp_path / "private/a")


def read_first(path: Path) -> Document:
    return next(read_corpus(path))


def _refuse(path: Path, *, follow_symlinks: bool = True) -> NoReturn:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
