"""Records: the ledger gives the last record of each task, whatever is damaged or written meanwhile."""

from pathlib import Path

from gristmill.counts import READ, WRITTEN, Counts, Tally
from gristmill.engine.staleness.ledger import Ledger
from gristmill.engine.staleness.records import DoneRecord, OutputRecord


def record(task: str, size: int) -> DoneRecord:
    counts = Counts({}, [])
    counts.add("a", READ, size)
    counts.add("a", WRITTEN, size)
    return DoneRecord("step", task, {"size": str(size)}, [OutputRecord(f"{task}.out", size, 1, "0" * 64)], counts)


def test_the_last_record_of_a_task_counts_and_a_damaged_one_does_not(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "out" / ".gristmill", "stage")
    assert ledger.read() == {}
    for found in (record("one", 1), record("two", 2)):
        ledger.write(found)
    ledger.compact(ledger.read().values())
    assert not ledger.loose.exists()
    ledger.write(record("one", 3))
    ledger.file.write_bytes(ledger.file.read_bytes() + b'{"step": "cut sh\n\xff\n')
    (ledger.loose / "empty.json").touch()  # emptied by a power cut
    found = ledger.read()
    assert {name: found[name].outputs[0].size for name in found} == {("step", "one"): 3, ("step", "two"): 2}
    assert found["step", "one"].counts.total(READ) == Tally(1, 3)
    assert ledger.is_damaged
    damaged = ledger.file.read_bytes()
    ledger.file.write_bytes(damaged.replace(b'"size":2', b'"size":7'))  # still JSON
    assert ("step", "two") not in ledger.read()
    ledger.file.write_bytes(damaged)
    ledger.compact(found.values(), [("step", "two")])
    assert list(ledger.read()) == [("step", "one")] and not ledger.is_damaged


def test_what_was_left_by_processes_killed_as_they_wrote_is_removed(tmp_path: Path) -> None:
    """Not what a process may be writing that does another part of the work."""
    ledger = Ledger(tmp_path / "out" / ".gristmill", "stage")
    for name in ("one", "two"):
        ledger.write(record(name, 1))
    for path in (ledger.file, *ledger.loose.iterdir()):
        path.with_name(f"{path.name}.0123abcd.partial").touch()
    found = list(ledger.read().values())
    ledger.compact(found[:1])
    assert [path.parent for path in (tmp_path / "out").rglob("*.partial")] == [ledger.loose]
    ledger.compact(found[1:])
    assert not ledger.loose.exists()


def test_outputs_move_with_the_folder(tmp_path: Path) -> None:
    """A copy of a folder must never speak of, and so remove, files of the original."""
    ledger = Ledger(tmp_path / "a" / ".gristmill", "stage")
    ledger.write(record("one", 1))
    (tmp_path / "a").rename(tmp_path / "b")
    moved = Ledger(tmp_path / "b" / ".gristmill", "stage")
    assert list(moved.outputs()) == [str(tmp_path / "b" / "one.out")]
