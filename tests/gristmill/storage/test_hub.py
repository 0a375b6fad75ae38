"""Datasets on the Hugging Face Hub: a stage reads one as it reads a local folder; errors are told in one sentence."""

import gzip
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from gristmill.engine.options import RunOptions
from gristmill.errors import InputError, StorageError, UsageError
from gristmill.io.corpus import scan_corpus
from gristmill.storage import hub as hub_module
from gristmill.storage.files import (
    FileInfo,
    download,
    file_info,
    hash_file,
    is_folder,
    list_folder,
    list_names,
    read_file,
)
from gristmill.storage.stores import remote_store_of
from gristmill_cli.run_check import check_config
from gristmill_cli.run_config import RunConfig
from preprocessing.normalize_text import normalize_text
from tests.hub_server import DATASET, Answer, Fault, Hub, running_hub, status

pytest.importorskip("huggingface_hub")
ROOT = Path(f"hf://datasets/{DATASET}")
LINES = gzip.compress(b'{"text": "e\xcc\x81t\xc3\xa9", "n": 1}\n{"text": "two"}\n', mtime=0)
DATA = bytes(range(256)) * 40


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with running_hub() as hub:
        yield hub


@pytest.fixture
def hub(server: Hub, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The Hub with a small dataset, in the environment of this process; requests are repeated soon."""
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(hub_module, "_RETRIES", {"max_retries": 2, "base_wait_time": 0.01, "max_wait_time": 0.01})
    hub_module._open.cache_clear()
    server.commits.clear()
    server.branches.clear()
    server.commit(_files())
    server.requests.clear()
    yield server
    server.faults.clear()
    server.token = ""
    hub_module._open.cache_clear()


def _files() -> dict[str, bytes]:
    sink = pa.BufferOutputStream()
    pa.parquet.write_table(pa.table({"text": ["aus\u0308", "b"], "id": [1, 2]}), sink)
    return {
        "README.md": b"# Name\n", "data/book/a b.parquet": sink.getvalue().to_pybytes(),
        "data/web/a.jsonl.gz": LINES, "data/web/raw": DATA, "data/web/b@1.jsonl": b'{"text": "three"}\n',
    }  # fmt: skip


def _outputs(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file() and ".gristmill" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_a_stage_reads_a_dataset_as_it_reads_a_local_folder(hub: Hub, tmp_path: Path) -> None:
    for name, data in _files().items():
        (tmp_path / "local" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "local" / name).write_bytes(data)
    options = RunOptions(workers=1, quiet=True)
    expected = normalize_text(tmp_path / "local/data", tmp_path / "a", options=options)
    hub.faults = [status(503)]
    assert normalize_text(ROOT / "data", tmp_path / "b", options=options) == expected
    assert len(_outputs(tmp_path / "a")) == 3 and _outputs(tmp_path / "a") == _outputs(tmp_path / "b")
    pages = [path for _, path in hub.requests if path.endswith("/data") and "/tree/" in path]
    fetched = [path for _, path in hub.requests if "/resolve/" in path]
    assert len(pages) == 3 and len(fetched) == len(set(fetched)) == 3
    hub.requests.clear()
    normalize_text(ROOT / "data", tmp_path / "b", options=options)
    assert not any("/resolve/" in path or path.endswith("/data") for _, path in hub.requests)


def test_a_task_whose_input_has_changed_runs_again_and_no_other(hub: Hub, tmp_path: Path) -> None:
    options = RunOptions(workers=1, quiet=True)
    normalize_text(ROOT / "data", tmp_path, options=options)
    hub.commit(_files() | {"data/web/b@1.jsonl": b'{"text": "other"}\n'})
    hub.requests.clear()
    normalize_text(ROOT / "data", tmp_path, options=options)
    fetched = [path.rpartition("/")[2] for _, path in hub.requests if "/resolve/" in path]
    assert fetched == ["a.jsonl.gz", "b%401.jsonl"]  # which one task reads
    assert b"other" in _outputs(tmp_path)["web/b@1.jsonl"]


def test_names_sizes_and_hashes(hub: Hub) -> None:
    assert is_folder(ROOT) and is_folder(ROOT / "data/web") and not is_folder(ROOT / "data/we")
    assert list_names(ROOT) == ["data", "README.md"]
    raw = FileInfo(len(DATA), 0, _blob(DATA))
    assert list_folder(ROOT / "data/web")["raw"] == file_info(ROOT / "data/web/raw") == raw
    parquet = _files()["data/book/a b.parquet"]
    found = file_info(ROOT / "data/book/a b.parquet")
    assert found == FileInfo(len(parquet), 0, hash_file(ROOT / "data/book/a b.parquet"))
    assert found.e_tag == hashlib.sha256(parquet).hexdigest()
    assert read_file(ROOT / "data/web/raw") == DATA
    with pytest.raises(FileNotFoundError):
        read_file(ROOT / "data/nothing")


def test_a_file_is_found_without_a_listing(hub: Hub) -> None:
    sha = hub.commit({"a": b"x"}, branch="refs/convert/parquet")
    for root in (f"{ROOT}@{sha}", f"{ROOT}@refs/convert/parquet"):
        assert file_info(Path(root, "a")) == FileInfo(1, 0, _blob(b"x"))
        assert file_info(Path(root, "b")) is None and file_info(Path(root)) is None
        assert read_file(Path(root, "a")) == b"x"
    assert not any("/tree/" in path for _, path in hub.requests)
    with pytest.raises(UsageError, match="expected a folder, got a file"):
        scan_corpus(Path(f"{ROOT}@{sha}", "a"))


def _blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@pytest.mark.parametrize("name", ["data/web/raw", "raw.parquet"])
@pytest.mark.parametrize(("start", "end"), [(0, 1), (100, 300), (5000, None), (10_000, 99_999), (300, 300)])
def test_a_range_goes_to_its_place_in_the_file(
    hub: Hub, tmp_path: Path, name: str, start: int, end: int | None
) -> None:
    hub.commit({"data/web/raw": DATA, "raw.parquet": DATA})
    found = download(ROOT / name, tmp_path / "part", start, end)
    assert (tmp_path / "part").read_bytes()[start:] == DATA[start:end]
    assert found == file_info(ROOT / name) or start == end


def test_what_is_cut_off_is_asked_for_again(hub: Hub) -> None:
    hub.faults = [_cut_off]
    assert read_file(ROOT / "data/web/raw") == DATA
    assert len(hub.requests) == 2
    hub.faults = [_cut_off]
    changing = remote_store_of(ROOT).chunks(ROOT / "data/web/raw")
    chunks = iter(changing)
    next(chunks)
    hub.commit({"data/web/raw": DATA[::-1]})
    with pytest.raises(InputError, match=r"hf://datasets/org/name/data/web/raw was changed while it was read"):
        list(chunks)


def _cut_off(verb: str, path: str) -> Answer:
    return 200, {"ETag": f'"{_blob(DATA)}"', "Content-Length": str(len(DATA))}, DATA[:1000]


def test_requests_that_are_too_many_are_made_later(hub: Hub) -> None:
    hub.faults = [status(429), status(429)]
    assert is_folder(ROOT / "data")
    hub.faults = [status(429), status(502)]
    assert read_file(ROOT / "data/web/raw") == DATA


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("org/other/data", UsageError, r"cannot read hf://datasets/org/other: there is no hf://datasets/org/other, or"),
        ("org/name@v9/data", UsageError, r"it has no revision v9: give a branch"),
        ("org/name/nothing", UsageError, r"hf://datasets/org/name/nothing: expected a folder, but there is none"),
        ("org/na--me/data", UsageError, r"the Hub has no such names"),
        ("org", UsageError, r"hf://datasets/org: expected hf://datasets/ORG/NAME/folder"),
    ],
)
def test_a_name_that_is_not_there(hub: Hub, path: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        scan_corpus(Path(f"hf://datasets/{path}"))


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (status(401), UsageError, "or it is private: check the name, and set HF_TOKEN"),
        (status(403, **{"X-Error-Code": "GatedRepo"}), UsageError, "accept the terms on its page, and set"),
        (status(429), StorageError, r"limits the rate of requests \(429\).*with HF_TOKEN"),
        (status(500), StorageError, r"too busy \(500\)"),
        (status(400), UsageError, r"refused the request \(400\)"),
    ],
)
def test_answers_that_are_errors(hub: Hub, fault: Fault, error: type[Exception], message: str) -> None:
    for read in (lambda: scan_corpus(ROOT), lambda: read_file(ROOT / "data/web/raw")):
        hub.faults = [fault] * 3
        with pytest.raises(error, match=message) as raised:
            read()
        assert str(raised.value).startswith("cannot read hf://datasets/org/name")


def test_a_private_dataset_is_read_with_a_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "hf_secret"
    with pytest.raises(UsageError, match="HF_TOKEN"):
        is_folder(ROOT)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert is_folder(ROOT) and read_file(ROOT / "data/web/raw") == DATA


def test_without_a_network_or_the_package(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(StorageError, match=r"the Hub cannot be reached.*check the network and HF_ENDPOINT"):
        is_folder(ROOT / "data")
    assert not caplog.records  # it was not asked again, which the library says with two lines each time
    hub.faults = [lambda *_: (200, {}, b"<html>")]
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    with pytest.raises(
        StorageError, match="the server that answered is not the Hub: check the network and HF_ENDPOINT"
    ):
        is_folder(ROOT / "data")
    monkeypatch.setenv("HF_ENDPOINT", "localhost")
    with pytest.raises(UsageError, match="HF_ENDPOINT 'localhost' is not a URL: expected https://host"):
        is_folder(ROOT / "data")
    hub_module._open.cache_clear()
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", None)
    with pytest.raises(UsageError, match=r"pip install 'gristmill\[hub\]'"):
        is_folder(ROOT / "data")


def test_nothing_is_written_to_a_dataset(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    for write in (
        lambda: normalize_text(tmp_path, ROOT / "out", options=RunOptions(quiet=True)),
        lambda: check_config(RunConfig(corpus=tmp_path, out=ROOT / "out")),
    ):
        with pytest.raises(UsageError, match=r"cannot write hf://datasets/org/name/out: .* only read: give a local"):
            write()
    with pytest.raises(UsageError, match="--scratch hf://datasets/org/name: expected a folder of this machine"):
        RunOptions(scratch=ROOT).check()
