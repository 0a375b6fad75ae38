"""Objects: what is written is read back, in whole and in part; listings; conditional writes."""

import hashlib
import os
from datetime import timedelta
from pathlib import Path

import pytest

from gristmill.errors import InputError, UsageError
from gristmill.paths import object_name
from gristmill.storage import objects
from gristmill.storage.files import download
from gristmill.storage.objects import (
    Chunks,
    delete_objects,
    find_object,
    list_level,
    list_objects,
    read_object,
    swap_object,
    upload,
    write_object,
)
from tests.object_faults import Times, short_body
from tests.object_store import Store

DATA = bytes(range(256)) * 40


@pytest.mark.parametrize("data", [b"", b"x", DATA], ids=["empty", "one byte", "10 kB"])
def test_an_object_is_read_as_it_was_written(folder: Path, tmp_path: Path, data: bytes) -> None:
    written = write_object(folder / "ö a@1", data)
    assert read_object(folder / "ö a@1") == (data, written)
    assert find_object(folder / "ö a@1") == written == dict(list_objects(folder))["ö a@1"]
    assert Chunks(folder / "ö a@1").sha256() == hashlib.sha256(data).hexdigest()
    (tmp_path / "source").write_bytes(data)
    assert upload(tmp_path / "source", folder / "b") == written
    assert download(folder / "b", tmp_path / "target") == written
    assert (tmp_path / "target").read_bytes() == data


@pytest.mark.parametrize(("start", "end"), [(0, 1), (100, 300), (5000, None), (10_000, 99_999), (300, 300)])
def test_a_range_goes_to_its_place_in_the_file(folder: Path, tmp_path: Path, start: int, end: int | None) -> None:
    info = write_object(folder / "a", DATA)
    found = download(folder / "a", tmp_path / "part", start, end)
    assert (tmp_path / "part").read_bytes()[start:] == DATA[start:end]
    assert found == info or start == end


def test_marks_of_folders_are_no_files(folder: Path, store: Store) -> None:
    """As Spark, Hadoop and consoles write them, also with the name of a file."""
    written = write_object(folder / "part.jsonl", b"text"), write_object(folder / "empty.jsonl", b"")
    for name in ("part.jsonl/", "data.parquet/", "deep/er/"):
        store.put(f"{object_name(folder).key}/{name}")
    assert dict(list_objects(folder)) == {"part.jsonl": written[0], "empty.jsonl": written[1]}
    assert [name for name, _ in list_objects(folder)] == ["empty.jsonl", "part.jsonl"]


def test_a_large_file_is_put_in_parts(folder: Path, tmp_path: Path, store, monkeypatch) -> None:
    monkeypatch.setattr(objects, "PART_BYTES", 5 << 20)
    monkeypatch.setitem(objects._CLIENT, "timeout", timedelta(seconds=60))  # moto knows no end that is sent twice
    objects._open.cache_clear()
    data = os.urandom(11 << 20)
    (tmp_path / "source").write_bytes(data)
    info = upload(tmp_path / "source", folder / "big")
    assert len({path for _, path in store.requests if "partNumber" in path}) == 3
    assert read_object(folder / "big") == (data, info) and find_object(folder / "big") == info
    hole = download(folder / "big", tmp_path / "target", 10 << 20, (10 << 20) + 5)
    assert hole == info and (tmp_path / "target").stat().st_blocks * 512 < 1 << 20


@pytest.mark.parametrize("cut", [0, 1, 2, 3])
def test_a_listing_of_several_pages_is_sorted_and_whole(folder: Path, store, cut: int) -> None:
    names = [f"{part}/{number}" for part in ("a", "a b", "a@") for number in range(9)]
    for name in names[::-1]:
        write_object(folder / name, b"x")
    pages = iter(range(100))

    def shorten(application, environment, start_response):
        environment["QUERY_STRING"] += "&max-keys=10"
        return short_body(application, environment, start_response) if next(pages) == cut else None

    store.fault = shorten
    assert [name for name, _ in list_objects(folder)] == sorted(names)
    assert next(pages) == 3 + (0 if cut == 3 else cut + 1)
    store.fault = None
    assert list_level(folder) == (["a", "a b", "a@"], {})
    assert len(list_level(folder / "a")[1]) == 9 and not list(list_objects(folder / "a/4"))


def test_what_is_not_there(folder: Path, tmp_path: Path) -> None:
    assert find_object(folder / "a") is None and list_level(folder) == ([], {}) and not list(list_objects(folder))
    for read in (read_object, lambda path: Chunks(path).sha256(), lambda path: download(path, tmp_path / "target")):
        with pytest.raises(FileNotFoundError, match="no such object"):
            read(folder / "a")
    delete_objects([folder / "a", folder / "b"])


def test_a_conditional_write_replaces_only_what_was_seen(folder: Path) -> None:
    path = folder / "lock"
    first = swap_object(path, b"first", None)
    assert first == find_object(path)
    assert swap_object(path, b"other", None) is None and swap_object(path, b"first", None) == first
    second = swap_object(path, b"second", first)
    assert second and swap_object(path, b"third", first) is None
    delete_objects([path])
    assert swap_object(path, b"third", second) is None and find_object(path) is None


def test_objects_of_two_buckets_are_deleted_at_once(folder: Path, store) -> None:
    for name in "abc":
        write_object(folder / name, b"")
    delete_objects(folder / name for name in "abx")
    assert [name for name, _ in list_objects(folder)] == ["c"]


@pytest.fixture
def changing(folder: Path, store) -> Path:
    """An object of which the first answer is cut off; it is replaced before the rest is asked for."""
    write_object(folder / "a", DATA)
    cut = Times(short_body, 1)

    def cut_and_replace(application, environment, start_response):
        answer = cut(application, environment, start_response)
        if answer is None and cut.made == 1:
            cut.made, store.fault = 2, None
            write_object(folder / "a", DATA[::-1])
        return answer

    store.fault = cut_and_replace
    return folder / "a"


def test_an_object_that_changes_while_it_is_read(changing: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a was changed while it was read: run the same command again"):
        download(changing, tmp_path / "target")


def test_a_small_object_that_changes_while_it_is_read_is_read_anew(changing: Path) -> None:
    """Such as a lease that its holder renews."""
    data, info = read_object(changing)
    assert data == DATA[::-1] and info == find_object(changing)


def test_a_bucket_is_needed() -> None:
    with pytest.raises(UsageError, match="s3:// without a bucket: expected s3://bucket/folder"):
        list(list_objects(Path("s3://")))
