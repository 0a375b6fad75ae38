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
OFTEN = "--checkpoint.every 4 --metrics.log_every 1 --eval.every 10 --eval.sample_tokens 8 --metrics.tensorboard false"


def test_a_killed_rank_is_restarted_with_all_and_they_resume(
    corpus: Path, tmp_path: Path, train_in_ranks: TrainInRanks
) -> None:
    """Ranks that raise or hang are in test_hang_detection.py."""
    options = [*small_run(corpus), *OFTEN.split()]
    options += ["--optim.steps", "32", "--parallel.tp", "2"]
    train_in_ranks(2, tmp_path / "whole", options)
    launcher = start_run(tmp_path / "killed", 2, 1, options)
    while launcher.poll() is None and steps_done(tmp_path / "killed") < 8:  # there is a checkpoint of step 4
        time.sleep(0.05)
    seed = random.randrange(1 << 30)
    kills = kill_at_random(launcher, tmp_path / "killed", 1, 16, random.Random(seed))  # a busy machine kills later
    code = launcher.wait()
    said = f"seed {seed}: {kills}\n" + (tmp_path / "killed.log").read_text()
    assert code == 0 and len(kills) == 1, said
    assert differences(tmp_path / "whole", tmp_path / "killed", 32) == [], said
    (resumed,) = [int(line.rpartition("-")[2]) for line in said.splitlines() if "resuming from" in line]
    assert 4 <= resumed <= kills[0].step, said


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
