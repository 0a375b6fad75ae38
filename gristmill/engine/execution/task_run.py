"""TaskRun: a task with all that a worker process needs to run it, and what came of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from gristmill.budget import Budget, memory_budget
from gristmill.counts import Counts
from gristmill.engine.execution.staging import Published, Scratch, staged
from gristmill.engine.task import Result, Task
from gristmill.errors import InputError, wrap_read_errors
from gristmill.processes import processor_seconds
from gristmill.storage.files import FileInfo, file_info
from gristmill.storage.local import flush_later
from gristmill.storage.stores import store_of


@dataclass(frozen=True)
class TaskRun:
    """A task of a step of a stage's run, and where it runs.

    Attributes:
        run: Name of the run, for messages.
        step: Name of the step.
        task: The task.
        inputs: What the driver saw of its inputs when it planned the task.
        hashes: The SHA-256 of the objects among them that stages wrote.
        scratch: Where it works on copies, if it must.
        budget: Memory of the worker, within which records are read.
    """

    run: str
    step: str
    task: Task
    inputs: Mapping[Path, FileInfo] = field(default_factory=dict)
    hashes: Mapping[Path, str] = field(default_factory=dict)
    scratch: Scratch | None = None
    budget: Budget | None = None

    def on(self, scratch: Scratch, budget: Budget | None) -> "TaskRun":
        """Return the same for another process, which has its own scratch folder and memory."""
        return replace(self, scratch=scratch, budget=budget)


@dataclass(frozen=True)
class TaskOutcome:
    """The files that a task wrote, its counts and its value, and the processor seconds that it took."""

    files: list[Published]
    counts: Counts
    value: Any
    core_seconds: float


def run_task(this: TaskRun) -> TaskOutcome:
    """Run a task, and publish its outputs.

    Raises ConservationError, the task's errors, and InputError if one of the inputs is not as it was when the task was
    planned, before or after the task has read it, or the copy of an object has another SHA-256.
    """
    task = this.task
    in_place = {path: info for path, info in this.inputs.items() if not store_of(path).needs_copies}
    began = processor_seconds()
    memory = {} if task.memory is None else {"memory": task.memory}
    with staged(task, this.inputs, this.scratch, this.hashes) as copy:
        _reject_changed(in_place, this.run)
        with memory_budget(this.budget), flush_later():
            result = copy.run(**memory)
        _reject_changed(in_place, this.run)
        if not isinstance(result, Result):
            result = Result(result or Counts({}, []), None)
        counts = copy.name_objects(result.counts)
        counts.check_conserved(f"{this.run} {task.name}")
        files = copy.publish(task.outputs)
    core_seconds = round(processor_seconds() - began, 3)
    return TaskOutcome(files, counts, msgspec.to_builtins(result.value), core_seconds)


def _reject_changed(inputs: Mapping[Path, FileInfo], run: str) -> None:
    """Raise InputError if a local input is not as it was seen."""
    for path, seen in inputs.items():
        if file_info(path) != seen:
            with wrap_read_errors(path):
                path.stat()
            raise InputError(f"{path} was changed while {run} worked: run the same command again")
