"""What a run tells of itself: traces of steps, times of their parts, norms of layers; its weights stay the same."""

import gzip
import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.errors import UsageError
from tests.patience import patience
from training.checkpoint.checkpoint_config import CheckpointConfig
from training.config import TrainConfig
from training.distributed.process_group import init_distributed
from training.experimental.parallel_config import ParallelConfig
from training.loop import train_as_planned
from training.profiling.profile_config import ProfileConfig
from training.profiling.profiler import layer_of
from training.reporting.metrics_file import METRICS, read_metrics
from training.run_plan import RunPlan
from training.train import train
from training.trainer import Trainer

LOOK = ProfileConfig(steps="2:3", times=2, norms=3)


def records(config: TrainConfig, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_metrics(config.out_dir / METRICS) if record["kind"] == kind]


def test_a_run_that_is_looked_into_has_the_losses_of_one_that_is_not(config: TrainConfig) -> None:
    plain = replace(config, out_dir=config.out_dir / "plain", optim=replace(config.optim, steps=6))
    looked = replace(plain, out_dir=config.out_dir / "looked", profile=LOOK)
    train(plain)
    train(looked)
    assert [r["loss"] for r in records(plain, "step")] == [r["loss"] for r in records(looked, "step")]
    assert not (plain.out_dir / "profile").exists() and not records(plain, "times") + records(plain, "norms")
    (trace,) = (looked.out_dir / "profile").iterdir()
    assert trace.name == "steps-2-3.rank-0.json.gz"
    assert any(event["name"] == "aten::mm" for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"])
    times = records(looked, "times")
    assert [record["step"] for record in times] == [2, 4, 6]
    for record in times:
        parts = [record[name] for name in ("data", "forward", "backward", "optimizer")]
        assert min(parts) > 0 and sum(parts) <= record["step_seconds"]
    norms = records(looked, "norms")
    assert [record["step"] for record in norms] == [3, 6]
    assert list(norms[0]["grad"]) == ["embed", "blocks.0", "blocks.1", "norm", "head"]
    steps = [record["step"] for record in read_metrics(looked.out_dir / METRICS)]
    assert steps == sorted(steps)  # Weights & Biases leaves out what comes after a later step


@pytest.mark.thorough
def test_ranks_trace_a_step_that_they_measure(
    start_training: Callable[..., subprocess.Popen[str]], torchrun: list[str], tmp_path: Path
) -> None:
    out_dir = tmp_path / "run"
    options = ["--optim.steps", "4", "--profile.steps", "2:3", "--profile.times", "2", "--metrics.tensorboard", "false"]
    process = start_training(torchrun, out_dir, *options)
    said, _ = process.communicate(timeout=patience(300))
    assert process.returncode == 0, said  # it was ended by SIGSEGV while it wrote the trace
    (trace,) = (out_dir / "profile").iterdir()
    names = {event["name"] for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert any(name.startswith("gloo:") for name in names)
    times = [record for record in read_metrics(out_dir / METRICS) if record["kind"] == "times"]
    assert [(record["step"], "communication" in record) for record in times] == [(2, False), (4, True)]
    assert min(record["backward"] for record in times) > 0


def measured(config: TrainConfig) -> dict[str, dict[str, float]]:
    """Norms of the first step, and the whole gradient norm that the step reports."""
    plan = RunPlan.of(replace(config, profile=ProfileConfig(norms=1, times=1)))
    with init_distributed("cpu") as device, Trainer(plan, device) as trainer:
        trainer.load()
        trainer.step(1)
        found = {kind: values for kind, _, values in trainer.plugins.log_records()}
        return {**found["norms"], "times": found["times"], "whole": {"grad": trainer.unreported[0].grad_norm}}


LAYOUTS = [ParallelConfig(zero=2), ParallelConfig(zero=3), ParallelConfig(tp=2), ParallelConfig(pp=2)]


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return {}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_norms_of_layers_are_those_of_one_process(
    config: TrainConfig, run_ranks: Callable[..., list[Any]], layout: ParallelConfig, alone: dict[str, Any]
) -> None:
    if not alone:
        alone.update(measured(config))
    wanted = alone
    assert sum(norm**2 for norm in wanted["grad"].values()) == pytest.approx(wanted["whole"]["grad"] ** 2, rel=1e-5)
    for found in run_ranks(2, measured, replace(config, parallel=layout)):
        for kind in ("grad", "weight", "update"):
            assert found[kind] == pytest.approx(wanted[kind], rel=2e-3 if kind == "update" else 1e-4)
        assert found["times"]["communication"] > 0


def test_updates_are_the_differences_of_weights(config: TrainConfig) -> None:
    with init_distributed("cpu") as device:
        plan = RunPlan.of(replace(config, profile=ProfileConfig(norms=1)))
        with Trainer(plan, device) as trainer:
            trainer.load()
            before = {p.name: p.local.detach().clone() for p in trainer.model.params}
            trainer.step(1)
            ((_, _, norms),) = trainer.plugins.log_records()
            for layer, norm in norms["update"].items():
                of = [p for p in trainer.model.params if layer_of(p.name) == layer]
                change = torch.cat([(p.local.detach() - before[p.name]).flatten() for p in of])
                assert norm == pytest.approx(float(change.norm()), rel=1e-5)


def test_options_that_mean_nothing_are_refused(config: TrainConfig) -> None:
    for steps in ("3", "5:4", "0:1", "a:b"):
        with pytest.raises(UsageError, match=rf"profile.steps is '{steps}'; expected START:STOP"):
            ProfileConfig(steps=steps).check(9)
    with pytest.raises(UsageError, match=r"profile.ranks has 3, and the run has the ranks 0 to 0"):
        train(replace(config, profile=ProfileConfig(steps="1:2", ranks=(0, 3))))


def test_a_trace_that_the_run_does_not_finish_is_not_written_and_one_that_is_over_is_said(
    config: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = replace(config, checkpoint=CheckpointConfig(every=2), profile=ProfileConfig(steps="2:9"))
    steps = iter([None, None])
    with pytest.raises(StopIteration):
        train_as_planned(RunPlan.of(quick), lambda: next(steps))
    assert not (quick.out_dir / "profile").exists()
    train(replace(quick, optim=replace(quick.optim, steps=12), profile=ProfileConfig(steps="1:2")))
    assert "profile.steps 1:2: the run is at step 2, and traces none of them now" in capsys.readouterr().out


def test_a_trace_that_is_interrupted_while_it_is_written_leaves_no_file(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = torch.profiler.profile.export_chrome_trace

    def interrupted(self: torch.profiler.profile, path: str) -> None:
        right(self, path)
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(replace(config, profile=ProfileConfig(steps="1:1")))
    assert not list((config.out_dir / "profile").iterdir())


@pytest.mark.gpu
def test_a_gpu_has_a_snapshot_of_its_memory(config: TrainConfig) -> None:
    train(replace(config, device="cuda", profile=LOOK))
    names = {path.name for path in (config.out_dir / "profile").iterdir()}
    assert names == {"steps-2-3.rank-0.json.gz", "steps-2-3.rank-0.memory.pickle"}
