"""What a worker process does: run one task, check its counts, publish its outputs, and write its done record."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from gristmill.budget import Budget, memory_budget
from gristmill.counts import Counts
from gristmill.engine.executors.staging import Scratch, StagedTask, staged
from gristmill.engine.records import DoneRecord, Ledger, OutputRecord
from gristmill.engine.tags import MISSING, is_hash, writer_of
from gristmill.engine.task import Result, Task
from gristmill.errors import InputError, wrap_read_errors
from gristmill.storage.files import FileInfo, file_info
from gristmill.storage.local import flush_later, sha256_file
from gristmill.urls import is_remote


def run_task(
    step: str,
    task: Task,
    identity: dict[str, str],
    ledger: Ledger,
    inputs: Mapping[Path, FileInfo],
    scratch: Scratch | None = None,
    budget: Budget | None = None,
) -> DoneRecord:
    """Run one task and write its done record, in a worker process; `scratch` is for tasks that are staged.

    `budget` is the memory of the worker, within which records are read.

    Raises ConservationError, the task's errors, and InputError if one of the `inputs` is not as it was when the
    task was identified, before or after the task has read it, or a copy of it is not what a stage wrote.
    """
    local = {path: info for path, info in inputs.items() if not is_remote(path)}
    _reject_changed(local, ledger)
    memory = {} if task.memory is None else {"memory": task.memory}
    with staged(task, inputs, scratch) as copy:
        _reject_damaged(copy, _hashes(task, identity))
        with memory_budget(budget), flush_later():
            result = copy.task.function(**copy.task.arguments, **memory)
        _reject_changed(local, ledger)
        counts, value = result if isinstance(result, Result) else (result or Counts({}, []), None)
        counts = copy.name_objects(counts)
        counts.check_conserved(f"{ledger.file.stem} {task.name}")
        outputs = [
            OutputRecord(ledger.relative(path), info.size, info.mtime_ns, sha256, info.e_tag)
            for path, info, sha256 in copy.publish(task.outputs)
        ]
    record = DoneRecord(step, task.name, identity, outputs, counts, msgspec.to_builtins(value))
    ledger.write(record)
    return record


def _hashes(task: Task, identity: Mapping[str, str]) -> dict[Path, str]:
    """The SHA-256 of each single input that a stage wrote, as the task's identity has it."""
    tags = [tag for name, tag in identity.items() if name.startswith("input ")]
    found = zip(task.inputs, tags, strict=False)
    return {path: tag for path, tag in found if isinstance(path, Path) and is_hash(tag) and tag != MISSING}


def _reject_damaged(copy: StagedTask, hashes: Mapping[Path, str]) -> None:
    """Raise InputError if an object that was fetched whole has other bytes than the stage that wrote it recorded."""
    for path in copy.whole:
        if path in hashes and sha256_file(copy.places[path]) != hashes[path]:
            stage = writer_of(path) or "the stage before"
            raise InputError(
                f"{path} is damaged: it has the recorded size and version, and its bytes are not those that {stage} "
                f"wrote. Remove it and run {stage} again, which writes it anew"
            )


def _reject_changed(inputs: Mapping[Path, FileInfo], ledger: Ledger) -> None:
    for path, seen in inputs.items():
        with wrap_read_errors(path):
            path.stat()
        if file_info(path) != seen:
            raise InputError(f"{path} was changed while {ledger.file.stem} worked: run the same command again")
