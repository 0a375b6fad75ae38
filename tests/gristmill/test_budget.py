"""Budget: a large record waits for the reserve, one that cannot fit is refused, and long lines are copied little."""

import json
import multiprocessing
import re
import tracemalloc
from collections import deque
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from gristmill.budget import Budget, MemoryReservation, memory_budget, reserve_memory
from gristmill.counts import Counts
from gristmill.errors import UsageError
from gristmill.io.corpus import list_corpus
from gristmill.io.lines import read_lines
from gristmill.io.readers import plan_slices, read_documents
from gristmill.io.writers import Rejects
from preprocessing.normalize_text import normalize_slices

MB = 1 << 20


def hold_until(budget: Budget, size: int, ready: multiprocessing.Event, go_on: multiprocessing.Event) -> None:
    with memory_budget(budget), reserve_memory(size, "a record"):
        ready.set()
        assert go_on.wait(300)


def test_a_large_record_waits_for_that_of_another_worker(tmp_path: Path) -> None:
    budget, context = Budget.of(400, 2, tmp_path / "lock"), multiprocessing.get_context("fork")
    (one, other), go_on = (context.Event(), context.Event()), context.Event()
    workers = [context.Process(target=hold_until, args=(budget, 101, event, go_on)) for event in (one, other)]
    workers[0].start()
    assert one.wait(300)
    workers[1].start()
    with memory_budget(budget), reserve_memory(60, "a record of a worker's share"):  # does not wait
        assert not other.wait(0.3)
    go_on.set()
    assert other.wait(300)
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert not budget.lock.exists()


def test_a_process_holds_the_reserve_for_several_records(tmp_path: Path) -> None:
    budget = Budget.of(400, 2, tmp_path / "lock")
    with memory_budget(budget):
        one, other = MemoryReservation(), MemoryReservation()
        one.grow(150)
        other.grow(200)
        one.release()
        one.release()
        with memory_budget(Budget.of(400, 2, tmp_path / "another")):
            MemoryReservation().grow(300)
    assert MemoryReservation().fits(1 << 60)  # without a budget


@pytest.mark.parametrize("suffix", ["jsonl", "txt"])
def test_a_record_that_cannot_fit_is_refused_and_says_how_much_it_needs(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"corpus/a.{suffix}"
    path.parent.mkdir()
    path.write_text('{"text": "short"}\n' * (suffix == "jsonl") + json.dumps({"text": "a" * 5 * MB}) + "\n")
    (part,) = plan_slices(list_corpus(tmp_path / "corpus", read_also=("txt",))[0])
    for whole, workers in ((16 * MB, 1), (24 * MB, 2)):
        with memory_budget(Budget.of(whole, workers, tmp_path / "lock")), pytest.raises(UsageError) as raised:
            list(read_documents(part, Counts({}, []), Rejects(tmp_path / "out")))
        assert str(path) in str(raised.value) and ("line 2, of 5,24" in str(raised.value)) == (suffix == "jsonl")
        wanted = int(re.search(r"give --memory (\d+)MiB", str(raised.value))[1])
        with memory_budget(Budget.of(wanted * MB, workers, tmp_path / "lock")):
            list(read_documents(part, Counts({}, []), Rejects(tmp_path / "out")))


def test_a_table_whose_repeated_values_cannot_fit_is_refused(tmp_path: Path) -> None:
    table = pa.table({"text": [f"{n % 4}" * MB for n in range(40)]})
    (tmp_path / "corpus").mkdir()
    pa.parquet.write_table(table, tmp_path / "corpus/a.parquet", compression="none", dictionary_pagesize_limit=1 << 30)
    (part,) = plan_slices(list_corpus(tmp_path / "corpus")[0])
    for whole, fits in ((20 * MB, True), (10 * MB, False)):
        with memory_budget(Budget.of(whole, 1, tmp_path / "lock")):
            documents = read_documents(part, Counts({}, []), Rejects(tmp_path / "out"))
            if fits:
                assert sum(1 for _ in documents) == 40
            else:
                with pytest.raises(UsageError, match="row group 0 takes about 13 MiB"):
                    next(documents)


def peak(function) -> int:
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("start", "most"), [("", 4), ("é", 4), ("\u4e2d", 6), ("e\u0301", 6), ("\U0001f600", 10)])
def test_a_long_line_takes_no_more_memory_than_is_held_for_it(tmp_path: Path, start: str, most: int) -> None:
    """Also the second of two, and one that is rewritten: with a combining accent."""
    path, size = tmp_path / "corpus/a.jsonl", 8 * MB
    path.parent.mkdir()
    line = json.dumps({"text": start + "word " * (size // 5), "id": 1}, ensure_ascii=False) + "\n"
    path.write_text(line + line)
    assert peak(lambda: deque(map(len, read_lines(path)))) < 1.3 * size
    (part,) = plan_slices(list_corpus(tmp_path / "corpus")[0])
    assert peak(lambda: normalize_slices((part,), (tmp_path / "out.jsonl",), ftfy=False)) < most * size
