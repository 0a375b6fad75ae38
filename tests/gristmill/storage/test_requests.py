"""Requests of a stage in a bucket: one GET an input, done records after their outputs, no LIST for each task."""

from datetime import timedelta
from pathlib import Path
from urllib.parse import quote

import pytest

from gristmill.engine.run import open_stage
from gristmill.engine.task import Stage, Task
from gristmill.errors import InputError
from gristmill.paths import object_name
from gristmill.storage import objects
from gristmill.storage.files import list_folder, read_file, remove_files, write_file
from preprocessing.filter import filter as find_short
from preprocessing.normalize_text import normalize_text
from tests.gristmill.engine.upper_stage import QUIET, join
from tests.object_store import BUCKET, Store

STAGE = Stage("copy", libraries=())


def copy_stage(source: Path, target: Path) -> None:
    """A consumer: a task for each object of a folder, which copies it."""
    names = sorted(list_folder(source))
    with open_stage(STAGE, target, QUIET, reads=[source], publishes=[target]) as run:
        tasks = [
            Task(name, join, {"parts": [source / name], "target": target / name}, (target / name,)) for name in names
        ]
        run.finish(run.step("copy", tasks).counts)


def requests_of(store: Store, folder: Path, tasks: int) -> list[tuple[str, str]]:
    """The requests of the stage with so many inputs: verb, key; LIST for a GET of the bucket."""
    for number in range(tasks):
        write_file(folder / f"in{tasks}/{number:02}", b"text")
    store.requests.clear()
    copy_stage(folder / f"in{tasks}", folder / f"out{tasks}")
    keys = [(verb, path.partition("?")[0].removeprefix(f"/{BUCKET}").strip("/")) for verb, path in store.requests]
    return [("GET" if key else "LIST", key) if verb == "GET" else (verb, key) for verb, key in keys]


def test_requests_of_a_stage(store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(objects._CLIENT, "timeout", timedelta(seconds=20))
    objects._open.cache_clear()
    found = {tasks: requests_of(store, folder, tasks) for tasks in (3, 12)}
    for tasks, requests in found.items():
        key = object_name(folder).key
        read = [name for verb, name in requests if verb == "GET" and name.startswith(f"{key}/in")]
        assert read == [f"{key}/in{tasks}/{number:02}" for number in range(tasks)]
        put = [name.removeprefix(f"{key}/out{tasks}/") for verb, name in requests if verb == "PUT"]
        kinds = ["record" if ".done/" in name else "output" for name in put if ".done/" in name or "/" not in name]
        assert kinds[-2 * tasks :] == ["output", "record"] * tasks and kinds.count("output") == tasks
    lists, heads = (
        [sum(request[0] == verb for request in requests) for requests in found.values()] for verb in ("LIST", "HEAD")
    )
    assert lists[0] == lists[1] and heads[0] == heads[1]  # none for a task


def copy_twice(source: Path, target: Path) -> int:
    """Copy each object of a folder to a temporary one, and that, each copy in a folder of its own; return tasks run."""
    with open_stage(STAGE, target, QUIET, reads=[source], publishes=[target]) as run:
        first = list[Task]()
        last = list[Task]()
        for name in sorted(list_folder(source)):
            temporary = run.work / name / "copy"
            output = target / name / "copy"
            first.append(Task(name, join, {"parts": [source / name], "target": temporary}, (temporary,)))
            last.append(Task(name, join, {"parts": [temporary], "target": output}, (output,)))
        run.step("first", first)
        run.finish(run.step("last", last).counts)
        return run.ran


def test_folders_of_outputs_are_listed_at_once(store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The outputs, and temporary files, may be in as many folders as there are tasks."""
    monkeypatch.setitem(objects._CLIENT, "timeout", timedelta(seconds=20))
    objects._open.cache_clear()
    lists = []
    for tasks in (10, 20):
        for number in range(tasks):
            write_file(folder / f"in{tasks}/{number:02}", b"text")
        store.requests.clear()
        assert copy_twice(folder / f"in{tasks}", folder / f"out{tasks}") == 2 * tasks
        assert copy_twice(folder / f"in{tasks}", folder / f"out{tasks}") == 0
        lists.append(sum("list-type" in path for _, path in store.requests))
    assert lists[0] == lists[1]
    remove_files([folder / "out20/07/copy", folder / "out20/13/copy"])
    assert copy_twice(folder / "in20", folder / "out20") == 4  # with the temporary files that they are made of
    assert all(read_file(folder / f"out20/{number:02}/copy") == b"text" for number in range(20))


def test_an_input_folder_is_listed_as_a_whole(
    store: Store, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A corpus may have as many folders as files: none of them is asked for, nor for ledgers."""
    monkeypatch.setitem(objects._CLIENT, "timeout", timedelta(seconds=20))
    objects._open.cache_clear()
    lists = []
    for number in (2, 12):
        out, corpus = folder / f"run{number}", tmp_path / f"corpus{number}"
        for i in range(number):
            (corpus / f"book/{i:02}").mkdir(parents=True)
            (corpus / f"book/{i:02}/a.jsonl").write_text('{"text": "grain"}\n')
        normalize_text(corpus, out / "norm", options=QUIET)
        store.requests.clear()
        find_short(out / "norm", out / "filtered.pickle", 0, "all", 200, options=QUIET)
        lists.append(sum("list-type" in path for _, path in store.requests))
        prefix = quote(object_name(out / "norm").key, safe="")
        assert sum(f"prefix={prefix}%2F" in path for _, path in store.requests) == 3  # found, in the stage, at its end
        assert not any(verb == "HEAD" and "/norm/" in path for verb, path in store.requests)
    assert lists[0] == lists[1]
    write_file(folder / "run2/norm/book/00/own.jsonl", b'{"text": "of a user"}\n')
    with pytest.raises(InputError, match=r"00/own.jsonl is in the output of normalize_text, which did not write it"):
        find_short(folder / "run2/norm", folder / "run2/filtered.pickle", 0, "all", 200, options=QUIET)
