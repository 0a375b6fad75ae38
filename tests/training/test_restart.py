"""Killed or stopped runs resume and give the losses of an uninterrupted run."""

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kill_training import differences, kill_at_random, metric_values, start_run, steps_done
from tests.patience import patience
from tests.training.conftest import small_run
from tests.training.launch import launch
from training.checkpoint.checkpoint_config import CheckpointConfig
from training.config import TrainConfig
from training.experimental.parallel_config import ParallelConfig
from training.train import train

TrainInRanks = Callable[[int, Path, list[str]], None]
OFTEN = "--checkpoint.every 6 --metrics.log_every 1 --eval.every 9 --eval.sample_tokens 8 --metrics.tensorboard false"


def test_killed_ranks_are_restarted_and_a_stop_saves_and_both_resume(
    corpus: Path, tmp_path: Path, train_in_ranks: TrainInRanks
) -> None:
    """One launch is killed, goes on by itself, is stopped and resumed; ranks that hang are in test_hang_detection."""
    options = [*small_run(corpus), *OFTEN.split(), "--precision", "bf16", "--parallel.tp", "2"]
    options += ["--optim.schedule", "constant", "--optim.warmup_steps", "2"]
    run = tmp_path / "run"
    log = tmp_path / "run.log"
    launcher = start_run(run, 2, 1, [*options, "--optim.steps", "100000"])
    try:
        while launcher.poll() is None and steps_done(run) < 8:  # there is a checkpoint of step 6
            time.sleep(0.05)
        seed = random.randrange(1 << 30)
        kills = kill_at_random(launcher, run, 1, 16, random.Random(seed))  # a busy machine kills later
        assert len(kills) == 1, f"seed {seed}: {log.read_text()}"
        while launcher.poll() is None and (
            "resuming from" not in log.read_text() or steps_done(run) < kills[0].step + 3
        ):
            time.sleep(0.02)
        launcher.terminate()
        code = launcher.wait()
    finally:
        launcher.kill()
    said = log.read_text()
    done = steps_done(run)
    assert code == 143 and said.splitlines()[-1] == "torchrun: stopped by SIGTERM", f"seed {seed}: {said}"
    assert said.count(f"stopped after step {done}; run the same command to resume") == 1, said  # by one of the two
    (resumed,) = [int(line.rpartition("-")[2]) for line in said.splitlines() if "resuming from" in line]
    assert 6 <= resumed <= kills[0].step <= done, said
    assert (run / f"checkpoints/step-{done:08d}/record.json").is_file() and not (run / "summary.json").exists()
    (run / "run.json").write_text((run / "run.json").read_text().replace('"steps": 100000', f'"steps": {done}'))
    options += ["--optim.steps", str(done + 3)]
    train_in_ranks(2, run, options)
    train_in_ranks(2, tmp_path / "whole", options)
    said = f"seed {seed}: {kills}, stopped after step {done}\n{said}"
    assert differences(tmp_path / "whole", run, done + 3) == [], said


@pytest.mark.thorough
def test_a_signal_to_one_rank_stops_all_and_resuming_gives_the_same_losses(
    config: TrainConfig, tmp_path: Path, run_ranks: Callable[..., list[Any]]
) -> None:
    config = replace(config, parallel=ParallelConfig(tp=2, pp=2), checkpoint=CheckpointConfig(every=50))
    config = replace(config, optim=replace(config.optim, steps=40), metrics=replace(config.metrics, log_every=1))
    run_ranks(4, train, config)
    for number in (signal.SIGTERM, signal.SIGINT):
        stopped = replace(config, out_dir=tmp_path / number.name)
        stop_in_the_middle(stopped, tmp_path, number)
        run_ranks(4, train, stopped)
        for kind, name in (("step", "loss"), ("step", "grad_norm"), ("eval", "loss"), ("eval", "text")):
            assert metric_values(stopped.out_dir, kind, name) == metric_values(config.out_dir, kind, name)


def stop_in_the_middle(stopped: TrainConfig, tmp_path: Path, number: signal.Signals) -> None:
    """Send rank 2 of four a signal: all save a checkpoint and exit with the signal's code."""
    with launch(4, stopped, tmp_path) as launched:
        deadline = time.monotonic() + patience(90)
        while steps_done(stopped.out_dir) < 5 and time.monotonic() < deadline:
            time.sleep(0.002)
        pid = launched.processes[2].pid
        assert pid is not None
        os.kill(pid, number)
        assert launched.codes() == [128 + number] * 4 and launched.said() == [""] * 4
    done = steps_done(stopped.out_dir)
    assert 5 <= done < 40 and (stopped.out_dir / f"checkpoints/step-{done:08d}/record.json").is_file()
