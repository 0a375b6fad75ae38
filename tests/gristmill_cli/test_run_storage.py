"""`gristmill run` on an object store: the bytes of a local run, whatever fails; nothing is left behind."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs

import pytest

from tests.gristmill_cli.corpus import (
    ROOT,
    documents,
    run,
    run_arguments,
    run_in_process,
    tree,
    write_records,
)
from tests.gristmill_cli.in_process import gristmill
from tests.object_faults import Seldom
from tests.object_store import Store, object_store

OPTIONS = ("--max_malformed", "0.05", "--workers", "2")
SCRATCH_SIZE = 4 << 20  # for one or two tasks at a time
IS_STATE = ".gristmill/"


class Local(NamedTuple):
    """A corpus on disk, and the folder of its finished run."""

    corpus: Path
    out: Path


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Local:
    """Three sources; a malformed line and a damaged file."""
    folder = tmp_path_factory.mktemp("local")
    for name in ("book/b.jsonl", "web/2023/ö w@1.jsonl.gz", "code/x.parquet"):
        (folder / "corpus" / name).parent.mkdir(parents=True)
        write_records(folder / "corpus" / name, list(documents(name, 60)))
    with (folder / "corpus/book/b.jsonl").open("a") as file:
        file.write("not JSON\n")
    damaged = folder / "corpus/web/damaged.jsonl.gz"
    write_records(damaged, list(documents("damaged", 2)))
    damaged.write_bytes(damaged.read_bytes()[:-9])
    done = run_in_process(folder / "corpus", folder / "out", *OPTIONS)
    assert done.returncode == 0, done.stderr
    return Local(folder / "corpus", folder / "out")


@pytest.fixture(scope="module")
def store(local: Local) -> Iterator[Store]:
    """A store with the corpus."""
    with object_store() as running:
        running.upload_tree(local.corpus, "corpus")
        yield running


class Start:
    """Starts runs on the store, in an empty folder and with an empty folder for temporary files."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store, self.cwd, self.scratch = store, folder / "cwd", folder / "scratch"
        self.cwd.mkdir()
        self.scratch.mkdir()

    def __call__(self, out: str, *more: str, corpus: str = "s3://bucket/corpus") -> subprocess.Popen[str]:
        more = (*OPTIONS, "--scratch", str(self.scratch), *more)
        environment = {**os.environ, **self.store.environment, "PYTHONPATH": str(ROOT), "GRISTMILL_LEASE_SECONDS": "1"}
        return subprocess.Popen(
            run_arguments(Path(corpus), Path(out), *more), cwd=self.cwd, env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def finish(self, out: str, *more: str, corpus: str = "s3://bucket/corpus") -> tuple[int, str]:
        """The exit code, and what is printed; nothing is left."""
        process = self(out, *more, corpus=corpus)
        printed, errors = process.communicate()
        assert "Traceback" not in errors, errors
        assert not list(self.cwd.iterdir()) and not list(self.scratch.iterdir())
        return process.returncode, printed + errors

    def finish_in_process(self, out: str, *more: str, corpus: str = "s3://bucket/corpus") -> tuple[int, str]:
        """As finish, in this process, for what ends soon."""
        more = (*OPTIONS, "--scratch", str(self.scratch), *more)
        words = run_arguments(Path(corpus), Path(out), *more)[3:]
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.cwd)
            done = gristmill(*words, **self.store.environment, GRISTMILL_LEASE_SECONDS="1")
        assert not list(self.cwd.iterdir()) and not list(self.scratch.iterdir())
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def start(store: Store, tmp_path: Path) -> Iterator[Start]:
    yield Start(store, tmp_path)
    store.fault = None


class Finished(NamedTuple):
    """The prefix of a finished run, and the requests that it made."""

    prefix: str
    requests: list[tuple[str, str]]


@pytest.fixture(scope="module")
def finished_run(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run in which 2 % of the requests met a fault, and the scratch folder was small."""
    store.requests.clear()
    store.fault = faults = Seldom(seed=1, share=0.02)
    start = Start(store, tmp_path_factory.mktemp("finished"))
    code, printed = start.finish("s3://bucket/finished", "--scratch_size", str(SCRATCH_SIZE))
    store.fault = None
    assert code == 0, printed
    assert faults.made > 10
    return Finished("finished", list(store.requests))


@pytest.fixture
def finished(finished_run: Finished) -> str:
    return finished_run.prefix


def outputs(store: Store, prefix: str) -> dict[str, bytes]:
    """Every file that a run wrote for others to read."""
    found = store.tree(prefix)
    return {name: data for name, data in found.items() if IS_STATE not in name and name != "run.json"}


def test_a_run_with_faults_writes_the_bytes_of_a_local_run(store: Store, local: Local, finished: str) -> None:
    found, expected = outputs(store, finished), tree(local.out)
    assert found.keys() == expected.keys() and any(name.endswith(".malformed") for name in found)
    assert [name for name in expected if found[name] != expected[name]] == []
    left = [name for name in store.tree(finished) if name.endswith((".lock", ".work", ".unfinished"))]
    assert left == []


WRITES = {
    "normalize_text": ("normalized/", "facts/", ""), "filter": ("",), "generate_exact_pairs": ("dup/",),
    "to_hash": ("minhash/",),
    "generate_connected_components": ("dup/",), "generate_duplicates_dict": ("dup/",), "mix": ("mix/",),
    "pass1": ("pass1/",), "pass2": ("train/", "holdout/"), "dedup_train": ("train_deduped/",),
    "train_tokenizer": ("tokenizer/",), "encode": ("tokens/",),
}  # fmt: skip


def listings(requests: list[tuple[str, str]], top: str) -> Iterator[tuple[str, str, bool]]:
    """Stage, folder below `top`, and whether of that alone: listings but of state folders and of a stage's output."""
    stages = iter(WRITES)
    stage = next(stages)
    for verb, path in requests:
        if verb == "PUT" and path.endswith(f"/run/{stage}.json"):
            stage = next(stages, "end")
        query = parse_qs(path.partition("?")[2])
        folder = query.get("prefix", [""])[0]
        name = folder.removeprefix(f"{top}/")
        is_own = any(name == of or (of and name.startswith(of)) for of in WRITES.get(stage, ("tokens/",)))
        if verb == "GET" and "list-type" in query and IS_STATE not in folder and name != folder and not is_own:
            yield stage, name, "delimiter" in query


def test_a_stage_lists_a_folder_that_it_reads_once_and_none_in_it(local: Local, finished_run: Finished) -> None:
    """Or, to see that it is there and for its sources, once or twice more; of those a failed request is repeated."""
    data = list(tree(local.out))  # the same objects
    found = Counter(
        (stage, folder)
        for stage, folder, is_level in listings(finished_run.requests, finished_run.prefix)
        if any(name.startswith(folder) and not (is_level and "/" in name[len(folder) :]) for name in data)
    )
    assert {stage for stage, _ in found} >= {"filter", "to_hash", "mix", "encode"}
    assert max(found.values()) <= 3 + 3, found  # three faults in one folder's would be one run in thousands
    assert all(folder.count("/") <= 1 or folder.startswith("train/chunk") for _, folder in found), found


def test_a_finished_run_says_so_and_writes_no_data(store: Store, start: Start, finished: str) -> None:
    store.requests.clear()
    code, printed = start.finish(f"s3://bucket/{finished}")
    assert code == 0 and printed.count("done already, nothing to do") == printed.count(" read = ") > 10, printed
    written = {path.rpartition("/")[2] for verb, path in store.requests if verb == "PUT" and IS_STATE not in path}
    assert written == {"run.json", "funnel.json"}
    asked = [parse_qs(path.partition("?")[2]).get("prefix", [""])[0] for verb, path in store.requests if verb == "GET"]
    of_corpus = [folder for folder in asked if folder.startswith("corpus/") and IS_STATE not in folder]
    assert of_corpus == ["corpus/"] * 2  # before the first stage and, as the lock may have been waited for, in it


@pytest.mark.thorough
def test_a_run_that_was_moved_to_the_store_is_done(store: Store, start: Start, local: Local) -> None:
    store.upload_tree(local.out, "moved")
    before = outputs(store, "moved")
    code, printed = start.finish("s3://bucket/moved", corpus=str(local.corpus))
    assert code == 0 and printed.count("done already, nothing to do") == printed.count(" read = ") > 10, printed
    assert "to train: copy s3://bucket/moved/tokens to a disk" in printed
    assert outputs(store, "moved") == before
    index = ("--dedup.index", "old=s3://bucket/moved/minhash", "--dry_run", "true")
    code, printed = start.finish("s3://bucket/next", *index, corpus=str(local.corpus))
    assert code == 0 and "writes normalized by" in printed and "s3:/bucket" not in printed, printed
    code, printed = start.finish("s3://bucket/next", *index, "--dedup.width", "5", corpus=str(local.corpus))
    assert code != 0 and "cannot be compared" in printed and "Give the options that the index was made with" in printed


@pytest.mark.thorough
def test_a_driver_that_is_killed_and_two_at_once(store: Store, start: Start, local: Local) -> None:
    chance = random.Random(1)
    process = start("s3://bucket/killed")
    time.sleep(chance.uniform(2.0, 6.0))
    process.send_signal(signal.SIGKILL)
    errors = process.communicate()[1]
    assert process.returncode in (0, -signal.SIGKILL) and "Traceback" not in errors, errors
    both = [start("s3://bucket/killed") for _ in range(2)]
    errors = [process.communicate()[1] for process in both]
    assert [process.returncode for process in both] == [0, 0] and "Traceback" not in "".join(errors), errors
    assert any("waiting for process " in text for text in errors), errors
    assert outputs(store, "killed") == tree(local.out)
    assert not list(start.scratch.iterdir()) and not list(start.cwd.iterdir())


APPLIED = """
import os, time

def wait(documents):
    open("begun", "w").close()
    while not os.path.exists("go"):
        time.sleep(0.05)
    yield from documents

def drop(documents):
    yield from list(documents)[1:]
"""


@pytest.mark.thorough
def test_a_driver_that_was_stopped_until_another_had_finished_writes_nothing(store: Store, start: Start) -> None:
    def begin(function: str) -> subprocess.Popen[str]:
        words = ("apply", "s3://bucket/corpus", "s3://bucket/applied", function, "--max_malformed", "0.05")
        environment = {**os.environ, **store.environment, "PYTHONPATH": str(ROOT), "GRISTMILL_LEASE_SECONDS": "1"}
        return subprocess.Popen(
            [sys.executable, "-m", "gristmill_cli", *words, "--scratch", str(start.scratch)], cwd=start.cwd,
            env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True,
        )  # fmt: skip

    (start.cwd / "mine.py").write_text(APPLIED)
    stopped = begin("mine:wait")
    while not (start.cwd / "begun").exists():
        assert stopped.poll() is None
        time.sleep(0.05)
    os.killpg(stopped.pid, signal.SIGSTOP)
    other = begin("mine:drop")
    errors = other.communicate()[1]
    assert other.returncode == 0, errors
    finished = outputs(store, "applied")
    (start.cwd / "go").touch()
    os.killpg(stopped.pid, signal.SIGCONT)
    errors = stopped.communicate()[1]
    assert stopped.returncode == 1 and "another process has taken over the work" in errors, errors
    assert outputs(store, "applied") == finished and not list(start.scratch.iterdir())


def test_a_scratch_folder_that_is_too_small(start: Start) -> None:
    code, printed = start.finish_in_process("s3://bucket/small", "--scratch_size", "1KiB")
    assert code == 1 and printed.startswith("error: --scratch_size 1,024 bytes is too small for the task "), printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize(("corpus", "sentence"), [
    ("s3://nowhere/corpus", "cannot read s3://nowhere/corpus: there is no bucket of that name"),
    ("ftp://bucket/corpus", "ftp://bucket/corpus: the scheme ftp is not known"),
])  # fmt: skip
def test_a_corpus_that_is_not_there(start: Start, corpus: str, sentence: str) -> None:
    code, printed = start.finish_in_process("s3://bucket/nothing_of_it", corpus=corpus)
    assert code == 2 and sentence in printed and printed.count("\n") == 1, printed


@pytest.mark.parametrize("out", ["s3://nowhere/run", "https://bucket/run"])
def test_an_output_that_cannot_be(start: Start, out: str) -> None:
    code, printed = start.finish_in_process(out)
    assert code == 2 and printed.count("\n") == 1, printed


@pytest.mark.thorough
def test_sources_of_a_table_are_read_in_a_bucket_as_on_a_disk(local: Local, store: Store, tmp_path: Path) -> None:
    config = tmp_path / "sources.toml"
    config.write_text('[sources.book]\nformat = "jsonl"\n[sources.mine]\npath = "code/x.parquet"\nweight = 2\n')
    options = ("--config", str(config), "--until", "pass1", *OPTIONS)
    done = run(local.corpus, tmp_path / "out", *options)
    assert done.returncode == 0, done.stderr
    there = run(Path("s3://bucket/corpus"), Path("s3://bucket/of_sources"), *options, **store.environment)
    assert there.returncode == 0, there.stderr
    (here, found) = (
        {name: data for name, data in files.items() if IS_STATE not in name and name != "run.json"}
        for files in (tree(tmp_path / "out"), store.tree("of_sources"))
    )
    assert found == here and any(name.startswith("normalized/mine/") for name in here)


SCORED = ("--spans.min", "24", "--until", "mix")


@pytest.fixture(scope="module")
def scored(local: Local, tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[str, ...], dict[str, bytes]]:
    """The options of a run with scores and spans, and what it writes on a disk, with one worker."""
    folder = tmp_path_factory.mktemp("scored")
    (folder / "scores.toml").write_text('[scores.words]\nmeasure = "words"\nquantile = 0.3\nof = "all"\n')
    options = ("--config", str(folder / "scores.toml"), *SCORED)
    done = run(local.corpus, folder / "out", *OPTIONS, *options, "--workers", "1")
    assert done.returncode == 0, done.stderr
    counts = [line for line in done.stderr.splitlines() if line.startswith(("remove_spans:", "choose_by_score:"))]
    assert re.search(r"[1-9]\d* spans cut", " ".join(counts)) and re.search(r"[1-9]\d* low words", " ".join(counts))
    written = tree(folder / "out")
    assert {"low_scores.parquet", "spans.spans.parquet"} <= written.keys()
    return options, written


def test_scores_and_spans_in_a_bucket(
    scored: tuple[tuple[str, ...], dict[str, bytes]], store: Store, tmp_path: Path
) -> None:
    options, expected = scored
    code, printed = Start(store, tmp_path).finish("s3://bucket/scored", *options)
    assert code == 0, printed
    assert outputs(store, "scored") == expected


def test_scores_and_spans_on_ray(
    scored: tuple[tuple[str, ...], dict[str, bytes]], local: Local, tmp_path: Path
) -> None:
    pytest.importorskip("ray")
    options, expected = scored
    done = run(local.corpus, tmp_path / "out", *OPTIONS, *options, "--executor", "ray")
    assert done.returncode == 0, done.stderr
    assert tree(tmp_path / "out") == expected
