"""What a worker process does: run one task, check its counts, hash its outputs, and write its done record."""

from pathlib import Path

import msgspec

from gristmill.counts import Counts
from gristmill.engine.records import DoneRecord, Ledger, OutputRecord
from gristmill.engine.task import Result, Task
from gristmill.errors import InputError, wrap_read_errors
from gristmill.io.files import flush_all, flush_later, rejects_path, sha256_file

FileState = tuple[int, int]  # size in bytes, modification time in nanoseconds


def run_task(
    step: str, task: Task, identity: dict[str, str], ledger: Ledger, inputs: dict[Path, FileState]
) -> DoneRecord:
    """Run one task and write its done record, in a worker process.

    Raises ConservationError, the task's errors, and InputError if one of the `inputs` is not as it was when the
    task was identified, before or after the task has read it.
    """
    _reject_changed(inputs, ledger)
    budget = {} if task.memory is None else {"memory": task.memory}
    with flush_later():
        result = task.function(**task.arguments, **budget)
    _reject_changed(inputs, ledger)
    counts, value = result if isinstance(result, Result) else (result or Counts({}, []), None)
    counts.check_conserved(f"{ledger.file.stem} {task.name}")
    written = [*task.outputs, *(path for path in map(rejects_path, task.outputs) if path.exists())]
    flush_all(written)  # before the record: it must not vouch for bytes that a power cut takes away
    outputs = [_record_output(path, ledger.relative(path)) for path in written]
    record = DoneRecord(step, task.name, identity, outputs, counts, msgspec.to_builtins(value))
    ledger.write(record)
    return record


def _reject_changed(inputs: dict[Path, FileState], ledger: Ledger) -> None:
    for path, state in inputs.items():
        with wrap_read_errors(path):
            found = path.stat()
        if (found.st_size, found.st_mtime_ns) != state:
            raise InputError(f"{path} was changed while {ledger.file.stem} worked: run the same command again")


def _record_output(path: Path, name: str) -> OutputRecord:
    found = path.stat()
    return OutputRecord(name, found.st_size, found.st_mtime_ns, sha256_file(path))
