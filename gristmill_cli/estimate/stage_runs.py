"""Runs of all stages on a sample, in this process: the CPU time, the files and the bytes of each."""

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import psutil

from gristmill.counts import Counts
from gristmill.engine.options import RunOptions
from gristmill.engine.records import LEDGER, DoneRecord, Ledger
from gristmill_cli.run_config import RunConfig
from gristmill_cli.run_stages import PipelineStage, plan_stages

_INPUT = re.compile(r"input \d+ \((?:([\d,]+) files\)$)?")  # in the identity of a done record


@dataclass
class StageRun:
    """A run of one stage on a sample: CPU seconds, bytes through the operating system, bytes on disk, done records.

    `kept` are the bytes that stay on disk, `temporary` those that the stage removed at its end.
    """

    name: str
    counts: Counts
    cpu: float
    reads: int
    writes: int
    kept: int
    temporary: int
    records: list[DoneRecord]

    @property
    def gets(self) -> int:
        """Input files of all tasks."""
        found = (_INPUT.match(name) for record in self.records for name in record.identity)
        return sum(int((match[1] or "1").replace(",", "")) for match in found if match)

    @property
    def puts(self) -> int:
        """Output files of all tasks, and their done records."""
        return sum(len(record.outputs) + 1 for record in self.records)


@dataclass(frozen=True)
class SampleConfig(RunConfig):
    """Configuration of a run on a sample: in this process, without messages."""

    @property
    def run_options(self) -> RunOptions:
        options = replace(super().run_options, workers=1, quiet=True)
        return replace(options, executor="local", address="", shard="", scratch_size="")

    @classmethod
    def of(cls, config: RunConfig, corpus: Path, out: Path) -> "SampleConfig":
        """The options of `config`, for a sample of its corpus."""
        options = {each.name: getattr(config, each.name) for each in fields(RunConfig)}
        tokenizer = replace(config.tokenizer, exact=False)  # a sample may have fewer pieces than are asked for
        return cls(**options | {"corpus": corpus, "out": out, "tokenizer": tokenizer})


def run_stages(config: SampleConfig) -> list[StageRun]:
    """Run and measure all stages."""
    known: set[Path] = set()
    return [_run_stage(stage, config.out, known) for stage in plan_stages(config)]


def _run_stage(stage: PipelineStage, out: Path, known: set[Path]) -> StageRun:
    """Run and measure a stage; adds its ledgers to those that are `known`."""
    disk, before = _disk_bytes(out), psutil.Process().io_counters()
    counts, cpu = measure_cpu(stage)
    after = psutil.Process().io_counters()
    ledgers = [path for path in out.rglob(f"*{LEDGER}") if path not in known]
    known.update(ledgers)
    records, temporary = _read_records(ledgers)
    return StageRun(
        stage.name, counts, cpu, after.read_chars - before.read_chars, after.write_chars - before.write_chars,
        _disk_bytes(out) - disk, temporary, records,
    )  # fmt: skip


def measure_cpu(stage: PipelineStage) -> tuple[Counts, float]:
    """Run a stage; return its counts and the CPU seconds of this process."""
    before = time.process_time()
    counts = stage.call()
    stage.reject_empty(counts)
    return counts, time.process_time() - before


def measure_start() -> float:
    """CPU seconds of a process that imports what `gristmill run` does."""
    before = psutil.Process().cpu_times()
    subprocess.run([sys.executable, "-c", f"import {plan_stages.__module__}"], check=True)
    after = psutil.Process().cpu_times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def _disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _read_records(ledgers: Sequence[Path]) -> tuple[list[DoneRecord], int]:
    """The records of tasks in ledgers, and the bytes of those outputs that were temporary."""
    records, temporary = list[DoneRecord](), 0
    for path in ledgers:
        ledger = Ledger(path.parent, path.stem)
        for record in ledger.read().values():
            if record.step:  # others are claims and notes
                records.append(record)
                temporary += sum(output.size for output in record.outputs if not ledger.path(output).exists())
    return records, temporary
