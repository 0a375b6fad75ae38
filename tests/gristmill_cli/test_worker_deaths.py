"""A document on which a worker process dies is set aside within --max_failed; beyond it the run ends, and names it."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait as wait_for_end
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from gristmill.engine.execution.call import Call
from gristmill.engine.execution.local import LocalExecutor, PoolContext
from gristmill.engine.execution.worker_deaths import note_place
from gristmill.text import utf8_size
from tests.gristmill_cli.corpus import ROOT, tree
from tests.gristmill_cli.deadly_corpus import (
    DEADLY,
    POISON,
    STEPS,
    gristmill,
    run_until_filter,
    write_deadly_corpus,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a corpus of 240 documents, functions that end their process, and the file of a run."""
    return write_deadly_corpus(tmp_path)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_step_that_ends_its_process_costs_the_documents_alone(folder: Path, workers: str) -> None:
    done = run_until_filter(folder, "--max_failed", "0.1", "--workers", workers)
    assert done.returncode == 0, done.stderr
    assert "normalize_text: 240 read = 237 written + 3 failed: a worker process died" in done.stderr
    removed = pq.read_table(folder / "out/normalized.removed.parquet").to_pylist()
    assert {(row["file"], row["row"], row["id"]) for row in removed} == {
        (f"{source}/{number}.jsonl", row, f"{source}-{number}-{row}") for source, number, row in DEADLY
    }
    assert {(row["rule"], row["detail"]) for row in removed} == {("failed: a worker process died", "SIGSEGV")}
    traced = gristmill(folder, "trace", "out", "book-1-30")
    assert "removed: failed: a worker process died, SIGSEGV" in traced.stdout


def test_without_max_failed_the_run_ends_and_names_the_file(folder: Path) -> None:
    done = run_until_filter(folder)
    assert done.returncode == 1
    (said,) = done.stderr.splitlines()[-1:]
    assert said.startswith("error: a worker process died in deadly:keep on ")
    assert "row 0 or soon after (" in said and said.endswith("are set aside")
    within = run_until_filter(folder, "--max_failed", "0.001")
    assert within.returncode == 2
    assert "functions failed on 3 of 240 documents, more than --max_failed 0.10% allows: a worker process died at " in (
        within.stderr
    )
    assert "book/1.jsonl line 31: SIGSEGV; " in within.stderr


@pytest.mark.parametrize("slice_bytes", [1 << 20, 5000], ids=["whole", "cut"])
def test_a_file_of_which_a_reader_dies_is_left_out_as_damaged(folder: Path, slice_bytes: int) -> None:
    """Python imports sitecustomize in each process, and so in workers: their reader is one that crashes on a file."""
    (folder / "sitecustomize.py").write_text(POISON.format(slice_bytes=slice_bytes))
    (folder / "deadly.py").write_text(STEPS.replace('startswith("deadly")', 'startswith("fixed")'))
    allowed = ("--max_failed", "0.1", "--max_malformed", "0.5")
    done = run_until_filter(folder, *allowed)
    assert done.returncode == 0, done.stderr
    assert "normalize_text: 180 read = 180 written" in done.stderr
    assert "web/1.jsonl (a worker process died of reading it)" in done.stderr
    (folder / "sitecustomize.py").write_text(POISON.format(slice_bytes=slice_bytes).replace("web/1.jsonl", "none"))
    assert "240 read = 240 written" in run_until_filter(folder, *allowed, "--retry_failed").stderr


def test_without_max_failed_the_file_of_which_a_reader_dies_is_named(folder: Path) -> None:
    (folder / "sitecustomize.py").write_text(POISON.format(slice_bytes=1 << 20))
    (folder / "deadly.py").write_text(STEPS.replace('startswith("deadly")', 'startswith("fixed")'))
    done = run_until_filter(folder)
    assert done.returncode == 1
    (said,) = done.stderr.splitlines()[-1:]
    assert said.startswith("error: a worker process died while web/1.jsonl was read (") and "left out" in said


def test_a_retry_gives_the_documents_to_the_function_again(folder: Path) -> None:
    assert run_until_filter(folder, "--max_failed", "0.1").returncode == 0
    (folder / "deadly.py").write_text(STEPS.replace('startswith("deadly")', 'startswith("fixed")'))
    again = run_until_filter(folder, "--max_failed", "0.1")
    assert "3 failed: a worker process died" in again.stderr  # the version of the function is the same
    retried = run_until_filter(folder, "--retry_failed")
    assert retried.returncode == 0 and "normalize_text: 240 read = 240 written" in retried.stderr
    assert run_until_filter(folder, "--out", "fresh").returncode == 0
    assert tree(folder / "out/normalized") == tree(folder / "fresh/normalized")


def test_a_score_that_is_noted_after_texts_were_cut_costs_its_documents_alone(folder: Path) -> None:
    """They are left out of what follows, which reads facts; counts between stages, and the funnel, add up."""
    toml = "corpus = 'corpus'\nout = 'out'\n[spans]\nmin = 1000\n[scores.mine]\nfunction = 'deadly:length'\n"
    (folder / "run.toml").write_text(toml)
    until_mix = ("run", "run.toml", "--until", "mix", "--alarms.source_loss", "0")
    done = gristmill(folder, *until_mix, "--max_failed", "0.1")
    assert done.returncode == 0, done.stderr
    assert "note_facts: 240 read = 1 failed: a worker process died + 2 failed: score mine + 237 noted" in done.stderr
    assert "filter: 237 read" in done.stderr
    removed = pq.read_table(folder / "out/facts.removed.parquet").to_pylist()
    files = [Path(row["file"]) for row in removed]
    assert {
        (file.parent.name, int(file.name[0]), row["row"]) for file, row in zip(files, removed, strict=True)
    } == DEADLY
    traced = gristmill(folder, "trace", "out", "book-1-33")
    assert "removed: failed: score mine, ValueError: no length" in traced.stdout
    beyond = gristmill(folder, *until_mix, "--max_failed", "0.001")
    assert beyond.returncode == 2
    assert "note_facts: functions failed on 3 of 240 documents, more than --max_failed 0.10% allows" in beyond.stderr


def test_a_function_that_always_ends_its_process_ends_the_run(folder: Path) -> None:
    (folder / "run.toml").write_text("corpus = 'corpus'\nout = 'out'\n[[steps]]\nkeep = 'deadly:always'\n")
    done = run_until_filter(folder, "--max_failed", "0.9")
    assert done.returncode == 1
    assert "error: worker processes died on 17 documents of one task, at last in deadly:always on " in done.stderr


@pytest.mark.parametrize("function", ["one_by_one", "in_batches"])
def test_apply_finds_the_document_also_where_the_function_reads_ahead(folder: Path, function: str) -> None:
    done = gristmill(folder, "apply", "corpus", "kept", f"deadly:{function}", "--max_failed", "0.1")
    assert done.returncode == 0, done.stderr
    assert f"apply: 240 read = 237 written + 3 failed: {function}" in done.stderr
    failed = pq.read_table(folder / "kept.failed.parquet").to_pylist()
    rows = {(row["file"], row["row"]) for row in failed}
    assert rows == {(f"{source}/{number}.jsonl", row) for source, number, row in DEADLY}
    assert all(row["detail"].startswith("a worker process died: ") for row in failed)


def test_apply_leaves_out_a_file_of_which_a_reader_dies(folder: Path) -> None:
    (folder / "sitecustomize.py").write_text(POISON.format(slice_bytes=1 << 20))
    allowed = ("--max_failed", "0.1", "--max_malformed", "0.5")
    done = gristmill(folder, "apply", "corpus", "kept", "deadly:one_by_one", *allowed)
    assert done.returncode == 0, done.stderr
    assert "apply: 180 read = 177 written + 3 failed: one_by_one" in done.stderr
    assert "web/1.jsonl (a worker process died of reading it)" in done.stderr


def test_what_no_document_does_alone_ends_the_stage(folder: Path) -> None:
    done = gristmill(folder, "apply", "corpus", "kept", "deadly:only_together", "--max_failed", "0.9")
    assert done.returncode == 1
    assert "a worker process died in deadly:only_together on " in done.stderr
    assert "row 59 or soon after (exit code 6)" in done.stderr


def test_processes_that_share_a_run_survive(folder: Path) -> None:
    words = [sys.executable, "-m", "gristmill_cli", "run", "run.toml", "--until", "filter", "--max_failed", "0.1"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}", "OMP_NUM_THREADS": "1"}
    processes = []
    for shard in ("1/2", "2/2"):
        command = [*words, "--shard", shard]
        processes.append(subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True))
    said = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert any("237 written + 3 failed: a worker process died" in text for text in said)


def test_a_call_whose_worker_died_is_made_again_alone_and_no_other_is_lost(tmp_path: Path) -> None:
    """As a worker that another program killed: nothing is set aside."""
    calls = [Call(utf8_size, {"text": "a" * size}, sets_aside=True) for size in range(20)]
    calls.insert(5, Call(note_and_die_once, {"mark": tmp_path / "mark"}, sets_aside=True))
    with LocalExecutor(2) as executor:
        results = dict(executor.run(calls))
    assert results == dict(enumerate([0, 1, 2, 3, 4, 7, *range(5, 20)]))


def test_threads_that_ask_at_once_are_told_one_exit_code() -> None:
    """As the pool's thread and the driver do: the fork server sends the code once."""
    context = PoolContext([])
    codes = set[int | None]()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(40):
            process = context.Process(target=os._exit, args=(6,))
            process.start()
            wait_for_end([process.sentinel])
            with ThreadPoolExecutor(4) as threads:
                codes.update(threads.map(lambda _, ended=process: ended.exitcode, range(8)))
    finally:
        sys.setswitchinterval(interval)
    assert codes == {6}


def note_and_die_once(mark: Path) -> int:
    """Note a document, and end this process on it, unless an earlier call did."""
    note_place("book/a.jsonl+0", 3)
    if mark.exists():
        return 7
    mark.touch()
    os._exit(9)
