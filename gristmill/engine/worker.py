"""What a worker process does: run one task, check its counts, publish its outputs, and write its done record."""

import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from gristmill.budget import Budget, memory_budget
from gristmill.counts import Counts
from gristmill.engine.executors.staging import staged
from gristmill.engine.ledger import DoneRecord, Ledger, OutputRecord
from gristmill.engine.scratch import Scratch
from gristmill.engine.task import Result, Task
from gristmill.errors import InputError, wrap_read_errors
from gristmill.storage.files import FileInfo, file_info
from gristmill.storage.local import flush_later
from gristmill.urls import is_remote


def run_task(
    step: str,
    task: Task,
    identity: dict[str, str],
    ledger: Ledger,
    inputs: Mapping[Path, FileInfo],
    hashes: Mapping[Path, str],
    scratch: Scratch | None = None,
    budget: Budget | None = None,
) -> DoneRecord:
    """Run one task and write its done record, in a worker process; `scratch` is for tasks that are staged.

    `budget` is the memory of the worker, within which records are read.

    Raises ConservationError, the task's errors, and InputError if one of the `inputs` is not as it was when the
    task was identified, before or after the task has read it, or the copy of an object has another SHA-256 than
    `hashes` gives.
    """
    local, began = {path: info for path, info in inputs.items() if not is_remote(path)}, time.process_time()
    memory = {} if task.memory is None else {"memory": task.memory}
    with staged(task, inputs, scratch, hashes) as copy:
        _reject_changed(local, ledger)
        with memory_budget(budget), flush_later():
            result = copy.run(**memory)
        _reject_changed(local, ledger)
        counts, value = result if isinstance(result, Result) else (result or Counts({}, []), None)
        counts = copy.name_objects(counts)
        counts.check_conserved(f"{ledger.file.stem} {task.name}")
        outputs = [
            OutputRecord(ledger.relative(path), info.size, info.mtime_ns, sha256, info.e_tag)
            for path, info, sha256 in copy.publish(task.outputs)
        ]
    spent = round(time.process_time() - began, 3)
    record = DoneRecord(step, task.name, identity, outputs, counts, msgspec.to_builtins(value), spent)
    ledger.write(record)
    return record


def _reject_changed(inputs: Mapping[Path, FileInfo], ledger: Ledger) -> None:
    for path, seen in inputs.items():
        if file_info(path) != seen:
            with wrap_read_errors(path):
                path.stat()
            raise InputError(f"{path} was changed while {ledger.file.stem} worked: run the same command again")
