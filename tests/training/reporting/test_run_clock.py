"""Wall time of a run over its starts, its cost and its end; and what run.json and checkpoints say of a start."""

import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from training.config import TrainConfig
from training.reporting.metrics_file import METRICS, read_metrics
from training.reporting.run_clock import RunClock, RunTime
from training.train import train

HOUR = 3600.0


def clock_of(*times: float) -> RunClock:
    """A clock of four processes whose readings are given, in hours."""
    readings: Iterator[float] = iter([HOUR * time for time in times])
    return RunClock(4, lambda: next(readings), lambda: 1795946400.0)


def test_time_and_cost_are_those_of_all_starts_and_the_end_that_of_the_last() -> None:
    clock = clock_of(10.0, 10.0, 10.5, 11.5)
    clock.begin_steps(100, {"elapsed_seconds": 2 * HOUR, "device_hours": 16.0})  # of eight processes, before
    assert clock.read(150, 200) == RunTime(1795946400.0, 3.5 * HOUR, 22.0, HOUR)  # 50 steps in an hour, 50 to come


def test_nothing_is_left_after_the_last_step_and_without_steps_the_end_is_unknown() -> None:
    clock = clock_of(0.0, 0.0, 0.0, 1.0, 1.0)
    clock.begin_steps(3)
    assert clock.read(3, 5).remaining_seconds is None
    assert clock.read(5, 5).remaining_seconds is None


@pytest.fixture
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The local clock is that of Greenwich."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


def test_the_end_has_its_day_where_it_is_another(utc: None) -> None:
    assert RunTime(1795946400.0, 90.4, 0.1, 60.0).describe() == "10:00:00 after 0:01:30, ends 10:01"
    assert (
        RunTime(1795946400.0, 9e4, 0.1, 14 * HOUR).describe() == "10:00:00 after 1 day, 1:00:00, ends Mon 30 Nov 00:00"
    )
    assert RunTime(1795946400.0, 90.4, 0.1, None).describe() == "10:00:00 after 0:01:30"


def test_a_run_records_its_times_and_its_starts(
    config: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In metrics.jsonl, TensorBoard, summary.json, run.json and checkpoints; over a restart."""
    config = replace(config, metrics=replace(config.metrics, tensorboard=True, log_every=4))
    decay = replace(config.optim, decay_steps=12)
    train(replace(config, optim=decay))
    said = capsys.readouterr().out
    train(replace(config, optim=replace(decay, steps=16)))
    steps = [record for record in read_metrics(config.out_dir / METRICS) if record["kind"] == "step"]
    timed = [record for record in steps if "time" in record]
    assert [record["step"] for record in timed] == [4, 8, 12, 16]  # the last of each report
    for name in ("elapsed_seconds", "device_hours"):
        values = [record[name] for record in timed]
        assert values == sorted(values)
    assert [record["remaining_seconds"] is None for record in timed] == [False, False, True, True]
    assert all(record["elapsed_seconds"] == pytest.approx(record["device_hours"] * HOUR, abs=0.01) for record in timed)
    summary = json.loads((config.out_dir / "summary.json").read_text())
    assert summary["elapsed_seconds"] == timed[-1]["elapsed_seconds"] > timed[-2]["elapsed_seconds"]
    events = EventAccumulator(str(config.out_dir / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("step/elapsed_seconds")] == [4, 8, 12, 16]
    run = json.loads((config.out_dir / "run.json").read_text())
    first, second = run["starts"]
    record = json.loads((config.out_dir / "checkpoints/step-00000016/record.json").read_text())
    assert record["start"] == second and first["data"] == second["data"]
    assert second["data"]["train"] == [str(Path(str(config.data.train)).absolute())]
    assert {"python", "torch", "numpy", "gristmill"} == {*second["versions"]} and second["processes"] == 1
    assert said.startswith(f"{first['date']} on {first['host']}: python ")
    line = next(line for line in said.splitlines() if line.startswith("step  4/12"))
    assert re.fullmatch(r"  [\d:]{8} after \d:\d\d:\d\d, ends (\w{3} \d\d \w{3} )?\d\d:\d\d", line.partition("GiB")[2])
