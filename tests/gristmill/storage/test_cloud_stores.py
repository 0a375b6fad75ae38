"""gs:// and az://: objects, conditional writes, leases and a whole stage, against servers that answer as they do."""

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from urllib.parse import unquote

import pytest

from gristmill.engine.options import RunOptions
from gristmill.errors import UsageError
from gristmill.storage import lock, objects
from gristmill.storage.files import download, list_folder, list_names, remove_folder, write_file
from gristmill.storage.lock import Lease, lease_seconds
from gristmill.storage.objects import (
    delete_objects,
    find_object,
    list_objects,
    read_object,
    swap_object,
    upload,
    write_object,
)
from preprocessing.normalize_text import normalize_text
from tests.cloud_servers import Bucket, running_bucket
from tests.patience import wait_until

SECONDS = 0.4


@pytest.fixture(scope="module", params=["gs", "az"])
def running(request: pytest.FixtureRequest) -> Iterator[Bucket]:
    with running_bucket(request.param) as bucket:
        yield bucket


@pytest.fixture
def bucket(running: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """The empty bucket, in the environment of this process."""
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("GRISTMILL_LEASE_SECONDS", str(SECONDS))
    monkeypatch.setitem(objects.RETRIES, "max_retries", 1)
    monkeypatch.setitem(objects._CLIENT, "timeout", timedelta(seconds=60))  # of a busy machine
    running.objects.clear()
    running.requests.clear()
    objects._open.cache_clear()
    yield running
    objects._open.cache_clear()


@pytest.fixture
def root(bucket: Bucket) -> Path:
    return Path(f"{bucket.scheme}://bucket/some folder")


def test_an_object_is_the_same_in_every_answer(root: Path, tmp_path: Path) -> None:
    data = os.urandom(5000)
    written = write_object(root / "ö a@1", data)
    assert read_object(root / "ö a@1") == (data, written) and find_object(root / "ö a@1") == written
    assert dict(list_objects(root)) == list_folder(root) == {"ö a@1": written}
    (tmp_path / "source").write_bytes(data)
    put = upload(tmp_path / "source", root / "b")
    assert download(root / "b", tmp_path / "target", 100, 200) == put == find_object(root / "b")
    assert (tmp_path / "target").read_bytes()[100:] == data[100:200]


def test_a_large_file_is_put_in_parts(root: Path, bucket: Bucket, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(objects, "PART_BYTES", 5 << 20)
    data = os.urandom(11 << 20)
    (tmp_path / "source").write_bytes(data)
    assert upload(tmp_path / "source", root / "big") == find_object(root / "big")
    assert read_object(root / "big")[0] == data
    assert len({path for _, path in bucket.requests if "partNumber" in path or "blockid" in path}) == 3


def test_listings_of_several_pages_and_removal(root: Path) -> None:
    names = [f"{part}/{number}" for part in ("a b", "a") for number in range(5)]
    for name in names:
        write_file(root / name, b"x")
    assert [name for name, _ in list_objects(root)] == names and sorted(list_names(root)) == ["a", "a b"]
    delete_objects([root / "a/1", root / "gone", root / "a/3"])
    assert [name for name, _ in list_objects(root / "a")] == ["0", "2", "4"]
    remove_folder(root)
    assert not list(list_objects(root)) and find_object(root / "a/2") is None


def test_a_conditional_write_replaces_only_what_was_seen(root: Path) -> None:
    first = swap_object(root / "lock", b"first", None)
    assert first and first == find_object(root / "lock") and swap_object(root / "lock", b"other", None) is None
    second = swap_object(root / "lock", b"second", first)
    assert second and swap_object(root / "lock", b"third", first) is None
    assert read_object(root / "lock") == (b"second", second)
    delete_objects([root / "lock"])
    assert swap_object(root / "lock", b"third", second) is None and find_object(root / "lock") is None


def test_a_lease_is_renewed_and_taken_over_when_its_holder_dies(root: Path, monkeypatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(lock, "_now", lambda: clock[0])
    first, second = Lease(root / "stage.lock"), Lease(root / "stage.lock")
    assert first.acquire() and not second.acquire()
    for _ in range(8):  # twice the lease's seconds, which pass only once it was renewed
        before = read_object(root / "stage.lock")
        wait_until(lambda seen=before: read_object(root / "stage.lock") != seen)
        clock[0] += lease_seconds() / 4
        assert not second.acquire()
    first.check()
    first._ended.set()  # as if it were killed
    assert first._renewing and not second.acquire()
    first._renewing.join()
    assert not second.acquire()
    clock[0] += lease_seconds()
    assert second.acquire()
    second.release()
    assert find_object(root / "stage.lock") is None


def test_a_stage_reads_and_writes_there_and_finds_its_work_done(root: Path, bucket: Bucket) -> None:
    for name in ("book/a.jsonl", "web/b.jsonl.gz.jsonl"):
        write_file(root / "raw" / name, b'{"text": "e\xcc\x81t\xc3\xa9"}\n' * 3)
    options = RunOptions(workers=1, quiet=True)
    counts = normalize_text(root / "raw", root / "norm", options=options)
    before = dict(bucket.objects)
    assert any(name.endswith("norm/book/a.jsonl") and "é".encode() in found.data for name, found in before.items())
    bucket.requests.clear()
    assert normalize_text(root / "raw", root / "norm", options=options) == counts
    written = [path for verb, path in bucket.requests if verb == "PUT" and ".gristmill" not in unquote(path)]
    assert not written and {name for name in before if ".gristmill" not in name} <= bucket.objects.keys()


def test_a_bucket_that_is_not_there(bucket: Bucket) -> None:
    for call in (read_object, lambda path: write_object(path, b""), lambda path: list(list_objects(path))):
        with pytest.raises(UsageError, match=r"there is no (bucket|container) of that name: check"):
            call(Path(f"{bucket.scheme}://nowhere/a"))
