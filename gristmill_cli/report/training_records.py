"""Records of training runs, read for a report: metrics and options, and what is wrong with them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from gristmill.errors import InputError, UsageError
from gristmill.io.files import RUN_FILE
from gristmill.storage.files import is_file, read_file
from gristmill.wording import count_of
from gristmill_cli.report.page import Number, pointer
from gristmill_cli.run_config import recorded_options
from training.reporting.metrics_file import METRICS, finite, read_metrics_and_damage

Record = dict[str, Any]  # a line of metrics.jsonl
SCORES = "scores.json"  # in the folder of a run: scores in tasks that gristmill evaluate wrote


@dataclass
class TrainingRun:
    """The records of a training run; `name` is empty if the page is of this run alone."""

    folder: Path
    name: str
    records: list[Record]
    options: dict[str, Any]
    faults: list[str]
    scores: dict[str, dict[str, Any]]  # of gristmill evaluate, by task and metric

    def of(self, kind: str) -> list[Record]:
        """Return the records of a kind."""
        return [record for record in self.records if record["kind"] == kind]

    def last(self, kind: str) -> Record:
        """Return the last record of a kind; {} if there is none."""
        for record in reversed(self.records):
            if record["kind"] == kind:
                return record
        return {}

    def titled(self, text: str) -> str:
        """Return a text after the name of the run."""
        return f"{self.name} {text}".strip()

    def where(self, kind: str, step: int, *names: str) -> str:
        """Return which number of metrics.jsonl is meant: kind of record, step, field."""
        return pointer(self.file_name(METRICS), kind, step, *names)

    def file_name(self, file: str) -> str:
        """Return a file of the run, below the name of the run if it has one."""
        if not self.name:
            return file
        return f"{self.name}/{file}"

    def number(self, record: Record, form: str, *names: str) -> Number:
        """Return a number of a record, as `form` shows it."""
        value: Any = reduce(getitem, names, record)
        return Number(value, format(value, form), self.where(record["kind"], record["step"], *names))


def is_training_run(folder: Path) -> bool:
    """Return whether a folder is the --out_dir of a training run that has recorded something."""
    return is_file(folder / METRICS)


def read_training_runs(folders: Sequence[Path]) -> list[TrainingRun]:
    """Read the records of some runs. Raises UsageError where one has none, InputError where they cannot be read."""
    names = [folder.resolve().name for folder in folders]
    runs = list[TrainingRun]()
    for folder, name in zip(folders, names, strict=True):
        if not is_training_run(folder):
            raise UsageError(f"{folder}: expected the --out_dir of a training run, got no {METRICS} in it")
        records, damaged = read_metrics_and_damage(folder / METRICS)
        run = TrainingRun(folder, "", records, recorded_options(folder), [], {})
        faults = list[str]()
        if damaged:
            faults.append(f"{count_of(damaged, 'damaged line')} of {METRICS} left out.")
        faults += _faults(run)
        try:
            run.scores = read_scores(folder)
        except InputError as error:
            faults.append(str(error))
        if len(folders) > 1:
            run.name = name if names.count(name) == 1 else str(folder)
            faults = [f"{name}: {fault}" for fault in faults]
        run.faults = faults
        runs.append(run)
    return runs


def read_scores(run: Path) -> dict[str, dict[str, Any]]:
    """Return the scores of a run by task and metric; {} where it has none. Raises InputError for a damaged file."""
    path = run / SCORES
    if not is_file(path):
        return {}
    try:
        content = json.loads(read_file(path))
    except ValueError as error:
        raise InputError(f"{path} is damaged ({error}); write it again by gristmill evaluate --tasks") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected the scores of gristmill evaluate, got something else; remove it")
    scores = dict[str, dict[str, Any]]()
    for name, values in content.items():
        if isinstance(values, dict) and "items" in values:
            scores[name] = values
    return scores


def _faults(run: TrainingRun) -> list[str]:
    """Return sentences on what is missing in the records of a run, and what went wrong in it."""
    faults = list[str]()
    if not run.options:
        faults.append(f"{RUN_FILE} is missing or damaged: its options are not shown.")
    steps = run.of("step")
    asked = run.options.get("steps")
    if not steps:
        faults.append("No step is recorded.")
    elif isinstance(asked, int) and steps[-1]["step"] < asked:
        faults.append(f"The run has not finished: {steps[-1]['step']:,} of {count_of(asked, 'step')} recorded.")
    diverged = [record["step"] for record in steps if finite(record.get("loss")) is None]
    if diverged:
        faults.append(f"The loss is not finite at {count_of(len(diverged), 'step')}, first at step {diverged[0]:,}.")
    skipped = [record["step"] for record in steps if record.get("skipped")]
    if skipped:
        faults.append(f"{count_of(len(skipped), 'update')} skipped, first at step {skipped[0]:,}.")
    return faults
