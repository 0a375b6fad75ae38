"""Every request times every fault: it ends as without, or in one sentence, and nothing is half done."""

import hashlib
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from gristmill.errors import StorageError
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
from tests.object_faults import Environment, Times, dropped, given_up, lost_answer, refuse, short_body, unavailable
from tests.patience import patience, wait_until

OLD, NEW = b"0123456789" * 100, b"new" * 1000


def get(folder: Path, tmp: Path) -> None:
    assert read_object(folder / "old")[0] == OLD


def get_file(folder: Path, tmp: Path) -> None:
    download(folder / "old", tmp / "a")
    assert (tmp / "a").read_bytes() == OLD


def get_range(folder: Path, tmp: Path) -> None:
    download(folder / "old", tmp / "a", 10, 500)
    assert (tmp / "a").read_bytes()[10:] == OLD[10:500]


def get_hash(folder: Path, tmp: Path) -> None:
    assert Chunks(folder / "old").sha256() == hashlib.sha256(OLD).hexdigest()


def head(folder: Path, tmp: Path) -> None:
    found = find_object(folder / "old")
    assert found and found.size == len(OLD)


def list_all(folder: Path, tmp: Path) -> None:
    assert [name for name, _ in list_objects(folder)] == ["old"]


def list_one_level(folder: Path, tmp: Path) -> None:
    assert list(list_level(folder)[1]) == ["old"]


def put(folder: Path, tmp: Path) -> None:
    write_object(folder / "new", NEW)


def put_file(folder: Path, tmp: Path) -> None:
    (tmp / "new").write_bytes(NEW)
    upload(tmp / "new", folder / "new")


def create(folder: Path, tmp: Path) -> None:
    assert swap_object(folder / "new", NEW, None) is not None


def replace(folder: Path, tmp: Path) -> None:
    assert swap_object(folder / "old", NEW, read_object(folder / "old")[1]) is not None


def delete(folder: Path, tmp: Path) -> None:
    delete_objects([folder / "old"])


CALLS = (get, get_file, get_range, get_hash, head, list_all, list_one_level, put, put_file, create, replace, delete)
BOTH = {"old": OLD, "new": NEW}
AFTER = dict.fromkeys((put, put_file, create), BOTH) | {replace: {"old": NEW}, delete: {}}
Call = Callable[[Path, Path], None]


def contents(folder: Path) -> dict[str, bytes]:
    return {name: read_object(folder / name)[0] for name, _ in list_objects(folder)}


@pytest.mark.parametrize("fault", [unavailable, dropped, lost_answer, short_body], ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_fault_that_passes(folder: Path, tmp_path: Path, store, call: Call, fault: Any) -> None:
    write_object(folder / "old", OLD)
    store.fault = Times(fault, 2)
    call(folder, tmp_path)
    assert store.fault.made
    store.fault = None
    assert contents(folder) == AFTER.get(call, {"old": OLD})


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_request_without_an_answer_is_made_again(
    folder: Path, tmp_path: Path, store, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    write_object(folder / "old", OLD)
    monkeypatch.setitem(objects._CLIENT, "timeout", timedelta(seconds=patience(0.2)))
    objects._open.cache_clear()
    store.fault = Times(given_up, 1)
    call(folder, tmp_path)
    wait_until(lambda: store.fault.ended == 1)
    store.fault = None
    assert contents(folder) == AFTER.get(call, {"old": OLD})


@pytest.mark.parametrize("fault", [unavailable, dropped, lost_answer], ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_fault_that_stays(folder: Path, tmp_path: Path, store, call: Call, fault: Any) -> None:
    write_object(folder / "old", OLD)
    store.requests.clear()
    store.fault = fault
    with pytest.raises(StorageError) as raised:
        call(folder, tmp_path)
    message = str(raised.value)
    assert message.startswith(("cannot read s3://bucket/", "cannot write s3://bucket/")), message
    assert "\n" not in message and len(message) < 200, message
    assert len(store.requests) < 10
    store.fault = None
    assert contents(folder) in ({"old": OLD}, AFTER.get(call))


@pytest.mark.parametrize("call", [get, put, put_file, create, replace])
def test_a_request_that_came_too_slowly_is_made_again(folder: Path, tmp_path: Path, store, call: Call) -> None:
    write_object(folder / "old", OLD)
    store.fault = Times(refuse("400 Bad Request", "RequestTimeout"), 2)
    call(folder, tmp_path)
    assert store.fault.made == 2
    store.fault = None
    assert contents(folder) == AFTER.get(call, {"old": OLD})


def starts_upload(request: Environment) -> bool:
    return request["REQUEST_METHOD"] == "POST" and "uploads" in request["QUERY_STRING"]


def puts_part(request: Environment) -> bool:
    return "partNumber" in request["QUERY_STRING"]


def ends_upload(request: Environment) -> bool:
    return request["REQUEST_METHOD"] == "POST" and "uploadId" in request["QUERY_STRING"]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "file"
    path.write_bytes(os.urandom((5 << 20) + 100))
    return path


@pytest.mark.parametrize("fault", [unavailable, dropped, lost_answer, short_body], ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("of", [starts_upload, puts_part, ends_upload], ids=lambda of: of.__name__)
def test_an_upload_in_parts(folder: Path, store, large: Path, monkeypatch, of: Any, fault: Any) -> None:
    monkeypatch.setattr(objects, "PART_BYTES", 5 << 20)
    store.fault = Times(fault, 1, of)
    upload(large, folder / "large")
    assert store.fault.made == 1
    assert Chunks(folder / "large").sha256() == hashlib.sha256(large.read_bytes()).hexdigest()


def test_an_upload_in_parts_that_fails_leaves_nothing(folder: Path, store, large: Path, monkeypatch) -> None:
    monkeypatch.setattr(objects, "PART_BYTES", 5 << 20)
    store.fault = Times(unavailable, 1000, puts_part)
    with pytest.raises(StorageError, match=r"the store failed or is too busy \(503 SlowDown\)"):
        upload(large, folder / "large")
    assert find_object(folder / "large") is None
