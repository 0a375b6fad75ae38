"""Check: two recorded runs of one training agree, or the first step and tensor in which they differ is named."""

from pathlib import Path

from tyro.conf import Positional

from gristmill.errors import GristmillError, require
from gristmill.storage.files import reject_remote
from gristmill.wording import count_of


def check(run_a: Positional[Path], run_b: Positional[Path], steps: int = 0, tolerance: float = 0.0) -> None:
    """Compare two training runs of the same data, model, optimizer, seed and precision, by what they recorded.

    Of the same layout all numbers must be equal bit for bit: losses, gradient norms and checkpoints, also where one of
    the runs was stopped and resumed. Of different layouts losses, and the gradient norm of the first step, must be
    equal but for rounding. The first step that differs is named, and the first tensor of the first checkpoint; of steps
    that both runs recorded (--record.steps), also the first wrong tensor of the model. Reads metrics.jsonl, the
    checkpoints that both runs kept, and the recordings; changes nothing.

    Args:
        run_a: The --out_dir of a training run.
        run_b: That of another one.
        steps: Compare the first steps alone, until this one; 0: all.
        tolerance: Largest relative difference of losses between layouts, and of the gradient norm in their first step;
            0: by precision, 1e-10 in fp64, 1e-5 in fp32 (1e-4 after the first step), 0.02 after it in bf16 and fp16.

    Raises:
        UsageError: a folder is of no training run, has no step recorded, or the runs are not of one training.
    """
    require(steps >= 0, f"--steps is {steps}; expected 0 or more")
    require(tolerance >= 0, f"--tolerance is {tolerance}; expected 0 or more")
    reject_remote(run_a, run_b)
    from gristmill_parity.gates.recorded_run import RecordedRun, require_same_training  # takes seconds, as torch does

    first = RecordedRun.read(run_a)
    second = RecordedRun.read(run_b)
    require_same_training(first, second)
    print(first.describe())
    print(second.describe())
    from gristmill_parity.gates.difference import Comparison, describe_expected
    from gristmill_parity.gates.recordings import compare_recordings
    from training.distributed.process_group import init_distributed

    with init_distributed("cpu"):
        comparison = Comparison.of(first, second, steps, tolerance)
        print(describe_expected(comparison))
        differences = comparison.differences()
        of_weights = comparison.of_weights()
        recordings = list(compare_recordings(comparison))
    differences += [recorded.difference for recorded in recordings if recorded.difference]
    for difference in differences:
        print(f"first difference in {difference}")
    if of_weights:
        print(of_weights)
    for recorded in recordings:
        if recorded.said:
            print(recorded.said)
    if differences:
        earliest = min(differences, key=lambda difference: difference.step)
        on_gpu = first.setting(comparison.steps[-1]).get("device") == "cuda"
        advice = "; on a GPU bits are only equal with --deterministic true" if on_gpu else ""
        raise GristmillError(
            f"{run_a} and {run_b} differ, first in {earliest.what} of step {earliest.step}; see above{advice}"
        )
    agreed = count_of(len(comparison.steps), "step")
    checkpoints = count_of(len(comparison.exact_checkpoints), "checkpoint")
    print(
        f"{agreed} agree, losses to {comparison.largest('loss'):.1e} and gradient norms to "
        f"{comparison.largest('grad_norm'):.1e}; {checkpoints} compared bit for bit"
    )
