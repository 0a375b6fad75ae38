"""The training loop: step, report, evaluate, save, until all steps are done or a signal asks to stop."""

import sys
from collections.abc import Callable

from gristmill.errors import require
from training.checkpoint.run_folder import RunFolder, lock_run_folder
from training.config import TrainConfig
from training.distributed.hang_detection import report_failures
from training.distributed.process_group import init_distributed
from training.distributed.stall_watch import StallWatch, gpu_busy
from training.distributed.stop_signals import StopSignals
from training.kernels.dispatch import deterministic_kernels
from training.reporting.metrics_file import Summary
from training.reporting.run_start import data_folders
from training.run_plan import RunPlan
from training.trainer import Trainer


def train_as_planned(
    plan: RunPlan, on_step: Callable[[], None] = lambda: None, make: Callable[..., Trainer] = Trainer
) -> Summary:
    """Train from options that are complete and checked; resume from the latest checkpoint in `out_dir` if there is one.

    `on_step` is called before every step. On SIGINT or SIGTERM it saves a checkpoint, once there is a model, and raises
    SystemExit(128 + signal).
    `make` takes the arguments of `Trainer`: a class of trainers whose gradients come from elsewhere, or a function that
    adds plug-ins to a trainer.
    """
    config = plan.config
    folders = data_folders(config.data)
    folder = RunFolder(config.out_dir, plan.identity, config.optim, config.began_from, plan.remote, folders)
    with (
        deterministic_kernels(config.deterministic),
        init_distributed(config.device, config.seconds_to_wait) as device,
        StopSignals(says=True, is_starting=True) as stop,
        lock_run_folder(folder),
        make(plan, device) as trainer,
    ):
        require(
            trainer.is_recorded or not config.record.steps,
            "record.steps is given to a command that does not record; try gristmill train, or torchrun -m "
            "gristmill_cli.train",
        )
        trainer.stop_signals = stop
        stop.is_starting = False
        trainer.load()
        changed = folder.describe_changed_decay(trainer.steps_done)
        folder.claim(trainer.seen.since, trainer.start_record, trainer.interventions)
        trainer.start()
        if changed:
            trainer.reporter.say(changed)
        due = False
        while (step := trainer.steps_done + 1) <= config.optim.steps:
            on_step()
            stopping = trainer.step(step)
            if trainer.unfinished:
                trainer.save_unsaved()
                trainer.finish_early(trainer.steps_done)
                sys.exit(128 + trainer.world.all_reduce_max(stop.received))
            step = trainer.steps_done  # a replica that was away continues at the step of the others
            last = step == config.optim.steps
            evaluating = last or _is_due(step, config.eval.every)
            due = due or _is_due(step, config.checkpoint.every)
            saving = stopping or last or (due and not trainer.skipped)  # or a diverged model would replace good ones
            if evaluating or saving or _is_due(step, config.metrics.log_every):
                trainer.report()  # before a checkpoint: after a resume, steps before it are never recorded
            if stopping and not last:  # before an evaluation, which may take longer than the launcher waits
                trainer.save(step)
                trainer.checkpoints.wait()
            if evaluating:
                trainer.evaluate(step)
            if stopping and not last:
                trainer.finish_early(step)
                sys.exit(128 + trainer.world.all_reduce_max(stop.received))
            if saving:
                trainer.save(step)
                due = False
        return trainer.finish()


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def train_and_report_failures(config: TrainConfig, make: Callable[..., Trainer] = Trainer) -> None:
    """Train as a command does: where a rank fails, dies or hangs, one rank prints why, and every process ends.

    `make`: see `train_as_planned`.
    """
    plan = RunPlan.of(config)
    with init_distributed(config.device, config.seconds_to_wait) as device:
        watch = StallWatch(config.seconds_to_wait, lambda: gpu_busy(device))
        with report_failures(watch):
            train_as_planned(plan, watch.beat, make)
