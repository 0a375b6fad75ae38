"""Stores: which one a path is in, and what each refuses."""

from pathlib import Path

import pytest

from gristmill.errors import OutputError, UsageError
from gristmill.storage.bucket_store import BucketStore
from gristmill.storage.files import (
    check_writable,
    copy_first_bytes,
    create_file,
    remove_files,
    remove_folder,
    write_file,
)
from gristmill.storage.hub_store import HubStore
from gristmill.storage.local_store import LocalStore
from gristmill.storage.stores import remote_store_of, store_of

HUB = Path("hf://datasets/org/name/a")


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("a/s3", LocalStore),
        ("/data/a:b", LocalStore),
        ("s3://bucket/a", BucketStore),
        ("gs://bucket/a", BucketStore),
        ("az://bucket/a", BucketStore),
        ("/home/me/s3:/bucket/a", BucketStore),
        ("hf://datasets/org/name", HubStore),
    ],
)
def test_the_store_of_a_path(path: str, kind: type) -> None:
    assert type(store_of(Path(path))) is kind and type(store_of(path)) is kind


def test_a_dataset_of_the_hub_is_never_written() -> None:
    writes = (
        lambda: write_file(HUB, b""),
        lambda: create_file(HUB, b""),
        lambda: remove_files([HUB]),
        lambda: remove_folder(HUB),
        lambda: remote_store_of(HUB).upload({HUB: Path("copy")}),
        lambda: check_writable(HUB),
    )
    for write in writes:
        with pytest.raises(UsageError, match=r"^cannot write hf://datasets/org/name/a: datasets on .* are only read"):
            write()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    check_writable(tmp_path / "new/er")
    (tmp_path / "file").write_bytes(b"")
    for folder, reason in (("file", "a file of that name exists"), ("file/below", "")):
        with pytest.raises(OutputError, match=f"cannot write {tmp_path}/{folder}: {reason}"):
            check_writable(tmp_path / folder)


def test_the_first_bytes_of_a_file(folder: Path, tmp_path: Path) -> None:
    for root in (folder, tmp_path / "local"):
        write_file(root / "a", b"0123456789")
    assert copy_first_bytes(tmp_path / "local/a", 4, tmp_path) == tmp_path / "local/a"
    copy = copy_first_bytes(folder / "a", 4, tmp_path)
    assert copy == tmp_path / "a" and copy.read_bytes() == b"0123"
