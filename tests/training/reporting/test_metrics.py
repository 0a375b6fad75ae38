import errno
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gristmill.errors import OutputError, UsageError
from training.config import TrainConfig
from training.distributed.rank_pool import RankError
from training.reporting.metrics import Reporter, StepMetrics
from training.reporting.metrics_file import METRICS, read_metrics
from training.reporting.reporting_config import MetricsConfig
from training.reporting.run_clock import RunClock, RunTime
from training.reporting.throughput import Throughput
from training.train import train

QUIET = MetricsConfig(tensorboard=False)


def write(out_dir: Path, begin: int, steps: range, active: bool = True) -> None:
    with closing(Reporter(out_dir, active, MetricsConfig())) as reporter:
        reporter.start(begin)
        for step in steps:
            reporter.record("step", step, loss=1.0 / step, mfu=None)
        reporter.record("eval", steps[-1], loss=0.5, text="once upon")


def test_records_reach_the_file_and_tensorboard(tmp_path: Path) -> None:
    write(tmp_path, 0, range(1, 4))
    records = list(read_metrics(tmp_path / METRICS))
    assert records[1] == {"kind": "step", "step": 2, "loss": 0.5, "mfu": None} and len(records) == 4
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("step/loss")][:2] == [(1, 1.0), (2, 0.5)]
    assert events.Scalars("eval/loss")[0].value == 0.5


def test_resuming_drops_the_records_after_the_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, 0, range(1, 6))
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"kind": "step", "st')  # the process was killed here
    write(tmp_path, 3, range(4, 7))
    steps = [record["step"] for record in read_metrics(tmp_path / METRICS) if record["kind"] == "step"]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert all(json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines())


def test_other_ranks_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 0, range(1, 3), active=False)
    Reporter(tmp_path, False, QUIET).say("hello")
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().out == ""


def test_an_out_dir_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="a part of that path is a file"):
        Reporter(tmp_path / "file" / "run", True, QUIET).start(0)


def test_every_rank_ends_at_once_where_metrics_cannot_be_written(
    config: TrainConfig, run_ranks: Callable[..., list[object]]
) -> None:
    (config.out_dir / METRICS).mkdir(parents=True)
    with pytest.raises(RankError) as error:
        run_ranks(2, train, config)
    said = str(error.value)
    assert said.count(f"{METRICS}: Is a directory") == 2 and "did not answer" not in said


def test_steps_are_recorded_and_the_last_one_and_skipped_ones_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [StepMetrics(i, 1e-3, 2.0, 1.0, None, "") for i in (1, 2)]
    steps.append(StepMetrics(3, 5e-4, float("nan"), float("inf"), 512.0, "the loss is nan"))
    clock = RunClock(2, iter([0.0, 0.0, 10.0, 40.0]).__next__, lambda: 1795946400.0)
    with closing(Reporter(tmp_path, True, QUIET, clock)) as reporter:
        reporter.start(0)
        reporter.log_steps(steps, 100, Throughput(0.5, 8192.0, 0.25, 2**30))
    records = list(read_metrics(tmp_path / METRICS))
    assert records[0] == {
        "kind": "step", "step": 1, "lr": 1e-3, "loss": 2.0, "grad_norm": 1.0,
        "step_seconds": 0.5, "tokens_per_second": 8192.0, "mfu": 0.25, "memory_bytes": 2**30,
    }  # fmt: skip
    times = {"time": 1795946400.0, "elapsed_seconds": 40.0, "device_hours": 0.022222, "remaining_seconds": 970.0}
    assert {key: records[2][key] for key in times} == times
    ends = f"{RunTime(1795946400.0, 40.0, 0.0, 970.0).describe()}"
    assert records[2]["loss"] is None and records[2]["grad_norm"] is None and records[2]["skipped"]
    assert capsys.readouterr().out == (
        "skipped step 3: the loss is nan\n"
        "step   3/100  loss nan  lr 5.00e-04  grad inf  scale 512  500 ms  8,192 tokens/s  MFU 25.0%  1.00 GiB  "
        f"{ends}\n"
    )


def test_a_full_disk_is_one_error_wherever_it_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"metrics.jsonl: the disk is full"), closing_quietly(tmp_path) as reporter:
        lines = reporter.sinks[0]
        lines.file.close()
        lines.file = Path("/dev/full").open("a")  # noqa: SIM115
        reporter.record("step", 1, loss=1.0)
    with pytest.raises(OutputError, match=r"tensorboard: the disk is full"), closing_quietly(tmp_path) as reporter:

        def fail(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        reporter.sinks[1].board.add_scalar = fail
        reporter.record("step", 1, loss=1.0)


@contextmanager
def closing_quietly(out_dir: Path) -> Iterator[Reporter]:
    """A reporter, closed as the trainer closes it: an error then must not hide what the disk lacks."""
    reporter = Reporter(out_dir, True, MetricsConfig())
    reporter.start(0)
    try:
        yield reporter
    finally:
        try:
            reporter.close()
        except OutputError as error:
            assert "the disk is full" in str(error)


def test_records_reach_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name, value in {"RUN_ID": "given-id", "NAME": "given name", "RUN_GROUP": "given group"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    with closing(Reporter(tmp_path, True, MetricsConfig(tensorboard=False, wandb=True))) as reporter:
        reporter.start(0)
        reporter.record("step", 1, loss=2.5)
        reporter.record("eval", 1, loss=3.0, sources={"web": {"loss": 3.5}}, text="once")
    wandb.teardown()  # ends the process that writes the file, as the end of a run does
    (path,) = tmp_path.glob("wandb/wandb/offline-run-*/*.wandb")
    written = path.read_bytes()  # a log of protocol buffers, which hold names and values as text
    assert path.name == "run-given-id.wandb" and (tmp_path / "wandb/run_id").read_text() == "given-id"
    for text in (b"given name", b"given group", b"step/loss", b"2.5", b"eval/sources/web/loss", b"3.5", b'"once"'):
        assert text in written


def test_records_reach_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with closing(Reporter(tmp_path, True, MetricsConfig(tensorboard=False, mlflow=True))) as reporter:
        reporter.start(0)
        for step in (1, 2):
            reporter.record("step", step, loss=2.5 / step, mfu=None)
        reporter.record("eval", 2, sources={"web": {"loss": 3.5}}, text="once")
    client = mlflow.MlflowClient((tmp_path / "mlruns").absolute().as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("gristmill").experiment_id])
    history = client.get_metric_history(run.info.run_id, "step/loss")
    assert [(point.step, point.value) for point in history] == [(1, 2.5), (2, 1.25)]
    assert run.data.metrics["eval/sources/web/loss"] == 3.5 and run.data.tags["eval/text"] == "once"


@pytest.mark.parametrize("sink", ["wandb", "mlflow"])
def test_a_sink_that_is_not_installed_is_refused_in_a_sentence(
    tmp_path: Path, sink: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UsageError, match=rf"metrics.{sink} needs {sink}, which is not installed: pip install 'gristm"):
        Reporter(tmp_path, True, MetricsConfig(**{sink: True}))  # type: ignore[arg-type]


def run_with(config: TrainConfig, **sinks: bool) -> None:
    """A run of three steps that stops after two, and goes on."""
    config = replace(config, metrics=replace(config.metrics, **sinks), eval=replace(config.eval, sample_tokens=0))
    for steps in (2, 3):
        train(replace(config, optim=replace(config.optim, steps=steps, decay_steps=3, warmup_steps=1)))


def test_a_resumed_run_continues_its_run_of_wandb_with_its_options(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    run_with(config, wandb=True)
    wandb.teardown()
    kept = (config.out_dir / "wandb/run_id").read_text()
    runs = sorted((config.out_dir / "wandb/wandb").glob("offline-run-*"))
    assert runs and all(f"-{kept}" in run.name for run in runs)  # a second one in a second ends in -1
    written = b"".join(path.read_bytes() for run in runs for path in run.glob("*.wandb"))
    assert b"mine" in written and b"optim/lr" in written and b"model/width" in written


def test_a_resumed_run_continues_its_run_of_mlflow_with_its_options(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    run_with(config, mlflow=True)
    client = mlflow.MlflowClient((config.out_dir / "mlruns").absolute().as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert run.info.run_id == (config.out_dir / "mlflow_run_id").read_text() and run.info.status == "FINISHED"
    assert run.data.params["optim/lr"] == "0.01" and run.data.tags["resumed_after"] == "2"
    assert [point.step for point in client.get_metric_history(run.info.run_id, "step/loss")] == [1, 2, 3]


def test_a_run_that_mlflow_no_longer_has_is_told_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient((tmp_path / "mlruns").absolute().as_uri())
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", mine := client.create_experiment("mine"))
    config, kept = MetricsConfig(tensorboard=False, mlflow=True), tmp_path / "mlflow_run_id"
    with closing(Reporter(tmp_path, True, config)) as reporter:
        reporter.start(0)
    (run,) = client.search_runs([mine])
    assert run.info.run_id == kept.read_text()
    shutil.rmtree(tmp_path / f"mlruns/{mine}/{run.info.run_id}")
    said = rf"cannot continue run {run.info.run_id} of .*; set MLFLOW_TRACKING_URI .* or remove"
    with closing(Reporter(tmp_path, True, config)) as reporter, pytest.raises(UsageError, match=said):
        reporter.start(1)
    kept.unlink()
    with closing(Reporter(tmp_path, True, config)) as reporter:
        reporter.start(1)
    assert client.search_runs([mine])[0].info.run_id == kept.read_text() != run.info.run_id
