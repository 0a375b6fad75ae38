"""What training runs have recorded, read for a report."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gristmill.errors import UsageError
from gristmill.io.files import RUN_FILE
from gristmill_cli.report.page import pointer
from gristmill_cli.run_records import load_json
from training.reporting.metrics_file import METRICS, finite, read_metrics_and_damage


@dataclass
class TrainingRun:
    """What a training run has recorded."""

    folder: Path
    name: str
    records: list[dict[str, Any]]
    options: dict[str, Any]
    faults: list[str]

    def last(self, kind: str) -> dict[str, Any]:
        """The last record of a kind; {} if there is none."""
        return next((record for record in reversed(self.records) if record["kind"] == kind), {})

    def where(self, kind: str, step: int, *names: str) -> str:
        """Which number of metrics.jsonl is meant: kind of record, step, field."""
        return pointer(f"{self.name}/{METRICS}" if self.name else METRICS, kind, step, *names)


def is_training_run(folder: Path) -> bool:
    """Whether a folder is the --out_dir of a training run that has recorded something."""
    return (folder / METRICS).is_file()


def read_training_runs(folders: Sequence[Path]) -> list[TrainingRun]:
    """The records of some runs. Raises UsageError where one has none, InputError where they cannot be read."""
    names = [folder.resolve().name for folder in folders]
    runs = list[TrainingRun]()
    for folder, name in zip(folders, names, strict=True):
        if not is_training_run(folder):
            raise UsageError(f"{folder}: expected the --out_dir of a training run, got no {METRICS} in it")
        records, damaged = read_metrics_and_damage(folder / METRICS)
        options = load_json(folder / RUN_FILE, dict[str, Any])
        of, faults = f"{name}: " if len(folders) > 1 else "", list[str]()
        if damaged:
            faults.append(f"{of}{damaged:,} lines of {METRICS} are damaged and left out.")
        if options is None:
            faults.append(f"{of}{RUN_FILE} is missing or damaged: its options are not shown.")
        label = "" if len(folders) == 1 else name if names.count(name) == 1 else str(folder)
        run = TrainingRun(folder, label, records, options or {}, faults)
        runs.append(run)
        done, asked = run.last("step").get("step", 0), run.options.get("steps")
        if not run.last("step"):
            faults.append(f"{of}No step is recorded.")
        elif isinstance(asked, int) and done < asked:
            faults.append(f"{of}The run has not finished: {done:,} of {asked:,} steps are recorded.")
        steps = [record for record in records if record["kind"] == "step"]
        if odd := [it["step"] for it in steps if finite(it.get("loss")) is None]:
            faults.append(f"{of}{len(odd):,} steps have a loss that is not finite, the first is {odd[0]:,}.")
        if skipped := [it["step"] for it in steps if it.get("skipped")]:
            faults.append(f"{of}{len(skipped):,} updates were skipped, the first at step {skipped[0]:,}.")
    return runs
