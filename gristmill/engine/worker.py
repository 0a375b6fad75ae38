"""What a worker process does: run one task, check its counts, publish its outputs, and write its done record."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from gristmill.budget import Budget, memory_budget
from gristmill.counts import Counts
from gristmill.engine.executors.staging import StagedTask, staged
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
    with staged(task, inputs, scratch, hashes) as copy:
        counts, value, outputs = _run_and_publish(task, copy, local, ledger, budget)
    spent = round(time.process_time() - began, 3)
    record = DoneRecord(step, task.name, identity, outputs, counts, msgspec.to_builtins(value), spent)
    ledger.write(record)
    return record


def _run_and_publish(
    task: Task, copy: StagedTask, local: Mapping[Path, FileInfo], ledger: Ledger, budget: Budget | None
) -> tuple[Counts, Any, list[OutputRecord]]:
    """Run a task's `copy`, whose inputs are here, and publish its outputs."""
    memory = {} if task.memory is None else {"memory": task.memory}
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
    return counts, value, outputs


def _reject_changed(inputs: Mapping[Path, FileInfo], ledger: Ledger) -> None:
    for path, seen in inputs.items():
        if file_info(path) != seen:
            with wrap_read_errors(path):
                path.stat()
            raise InputError(f"{path} was changed while {ledger.file.stem} worked: run the same command again")
