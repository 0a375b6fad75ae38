"""Steps that the trainer records (`--record.steps`), and what `gristmill check` says of two runs that recorded one."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gristmill.errors import GristmillError, InputError, UsageError
from gristmill_parity.gates.check import check
from gristmill_parity.recorded_training import recorded_trainer
from gristmill_parity.recording.files import Recording
from tests.training.conftest import small_run, train_with_options
from tests.training.parity.test_certificate import no_sum_of_input_gradients
from training.config import TrainConfig
from training.distributed.command_line import load_config
from training.loop import train_as_planned
from training.run_plan import RunPlan

RunRanks = Callable[..., list[Any]]
TRAINING = [
    "--optim.steps", "3", "--optim.warmup_steps", "1", "--checkpoint.every", "2", "--checkpoint.keep", "9",
    "--eval.every", "3", "--eval.sample_tokens", "0", "--metrics.tensorboard", "false",
]  # fmt: skip
RECORD = ["--record.steps", "1", "3"]


def train_recorded(out_dir: Path, options: Sequence[str], with_fault: bool = False) -> None:
    """Train as `gristmill train` does, in this process, perhaps without a sum over the tensor-parallel ranks."""
    with pytest.MonkeyPatch.context() as patch:
        if with_fault:
            no_sum_of_input_gradients(patch)
        config = load_config(TrainConfig, ["--out_dir", str(out_dir), *options])
        train_as_planned(RunPlan.of(config), make=recorded_trainer)


def options_of(corpus: Path, *more: str) -> list[str]:
    return [*small_run(corpus), *TRAINING, *more]


@pytest.fixture(scope="module")
def runs(corpus: Path, rank_pool: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one training: `one` and `again` of one process, `plain` that was not recorded, and faulty ones."""
    folder = tmp_path_factory.mktemp("recorded")
    rank_pool.run(1, train_recorded, folder / "one", options_of(corpus, *RECORD))
    rank_pool.run(1, train_recorded, folder / "again", options_of(corpus, *RECORD))
    rank_pool.run(1, train_with_options, folder / "plain", options_of(corpus))
    return folder


def test_a_layout_under_torchrun_has_the_tensors_of_one_process(
    runs: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["-m", "gristmill_cli.train", "--out_dir", str(tmp_path / "tp"), "--parallel.tp", "2"]
    done = subprocess.run([*command, *options_of(corpus, *RECORD)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    check(runs / "one", tmp_path / "tp")
    shown = capsys.readouterr().out
    assert "recording of step 1: " in shown and " tensors are equal but for rounding; the largest" in shown
    assert "recording of step 3: not compared, weights of different layouts differ after step 1; let both" in shown


def test_recording_changes_no_bit_of_the_run(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(runs / "one", runs / "plain")
    shown = capsys.readouterr().out
    assert "3 steps agree, losses to 0.0e+00" in shown and "2 checkpoints compared bit for bit" in shown
    assert f"recording of step 1: not compared, {runs / 'plain'} has none" in shown


def test_recording_leaves_losses_and_loads_as_they_are(
    corpus: Path, run_ranks: RunRanks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a sparse model whose bias follows the loads, with a z-loss; steps 1 and 2 share a record of loads."""
    sparse = ["--model.experts", "4", "--model.balance", "bias", "--optim.z_loss", "0.1", "--metrics.log_every", "9"]
    run_ranks(1, train_recorded, tmp_path / "recorded", options_of(corpus, *sparse, "--record.steps", "2"))
    run_ranks(1, train_with_options, tmp_path / "plain", options_of(corpus, *sparse))
    check(tmp_path / "recorded", tmp_path / "plain")
    loads = [
        [line for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines() if '"max_load"' in line]
        for name in ("recorded", "plain")
    ]
    assert loads[0] and loads[0] == loads[1]


def test_one_layout_twice_is_equal_in_every_tensor(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(runs / "one", runs / "again")
    shown = capsys.readouterr().out
    for step in (1, 3):
        assert f"recording of step {step}: " in shown
    assert shown.count("tensors of 1 rank are equal bit for bit") == 2


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_fault_of_a_layout_is_named(
    corpus: Path, run_ranks: RunRanks, tmp_path: Path, capsys: pytest.CaptureFixture[str], precision: str
) -> None:
    options = options_of(corpus, "--precision", precision, "--record.steps", "1")
    run_ranks(1, train_recorded, tmp_path / "one", options)
    run_ranks(2, train_recorded, tmp_path / "faulty", [*options, "--parallel.tp", "2"], True)
    with pytest.raises(GristmillError, match="differ, first in "):
        check(tmp_path / "one", tmp_path / "faulty")
    shown = capsys.readouterr().out
    assert f"first difference in norm output gradient of step 1: in {tmp_path / 'faulty'} it differs by" in shown
    assert "It is worst on rank " in shown and "and their sum is right: it was not summed over tp." in shown


def test_of_a_tensor_that_was_not_kept_its_sketch_is_compared(
    corpus: Path, run_ranks: RunRanks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = options_of(corpus, "--record.steps", "1", "--record.keep", "head *", "embed.tokens output")
    run_ranks(1, train_recorded, tmp_path / "one", options)
    run_ranks(2, train_recorded, tmp_path / "faulty", [*options, "--parallel.tp", "2"], True)
    with pytest.raises(GristmillError, match="differ, first in "):
        check(tmp_path / "one", tmp_path / "faulty")
    shown = capsys.readouterr().out
    assert "first difference in norm output gradient of step 1: " in shown and "Only sketches were kept" in shown


def test_the_loss_may_be_off_by_the_order_of_its_sum(
    corpus: Path, run_ranks: RunRanks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Perturbed passes say little of a single number: of this model's loss they are off less than another order is."""
    options = options_of(corpus, "--model.experts", "4", "--record.steps", "1")
    run_ranks(1, train_recorded, tmp_path / "one", options)
    run_ranks(2, train_recorded, tmp_path / "experts", [*options, "--parallel.ep", "2"])
    check(tmp_path / "one", tmp_path / "experts")
    assert "tensors are equal but for rounding" in capsys.readouterr().out


LAYOUTS = {
    "replicas": (2, ["--parallel.micro_batches", "2", "--parallel.zero", "1"]),
    "zero 3": (2, ["--parallel.zero", "3"]),
    "stages": (2, ["--parallel.pp", "2", "--parallel.micro_batches", "2"]),
    "context": (2, ["--parallel.cp", "2"]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_difference_is_found_between_right_layouts(
    runs: Path, corpus: Path, run_ranks: RunRanks, tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str
) -> None:
    processes, more = LAYOUTS[layout]
    run_ranks(processes, train_recorded, tmp_path / "run", options_of(corpus, "--record.steps", "1", *more))
    check(runs / "one", tmp_path / "run")
    assert "recording of step 1: " in (shown := capsys.readouterr().out) and "equal but for rounding" in shown


def test_rounding_is_measured_in_the_first_step_of_a_start(runs: Path) -> None:
    """In later ones layouts are not compared, so a recorded step costs no further passes."""
    recorded = {path.parent.name: [] for path in runs.glob("one/recordings/*/*")}
    for path in sorted(runs.glob("one/recordings/*/*")):
        recorded[path.parent.name].append(path.name)
    assert recorded == {
        "step-00000001": ["base", "perturbed-1", "perturbed-2", "perturbed-3"],
        "step-00000003": ["base"],
    }
    kinds = {key.kind for key in Recording(runs / "one/recordings/step-00000003/base").tensors}
    assert {"state exp_avg", "state exp_avg_sq"} <= kinds


def test_other_bits_of_one_layout_are_named(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = shutil.copytree(runs / "again", tmp_path / "changed")
    path = changed / "recordings/step-00000001/base/rank-00000.json"
    header = json.loads(path.read_text())
    for tensor in header["tensors"]:
        if tensor[1:3] in (["blocks.1.mlp.down.weight", "gradient"], ["norm.weight", "weight"]):
            tensor[7] += 1  # its hash
    path.write_text(json.dumps(header))
    with pytest.raises(
        GristmillError, match=r"differ, first in blocks.1.mlp.down.weight gradient of step 1; see above"
    ):
        check(runs / "one", changed)
    shown = capsys.readouterr().out
    assert "blocks.1.mlp.down.weight gradient of step 1: other bits on rank 0; expected every bit to be equal" in shown
    assert "No difference: " in shown  # beyond rounding


def test_what_cannot_be_compared_is_said_in_a_sentence(runs: Path, tmp_path: Path) -> None:
    lost = shutil.copytree(runs / "again", tmp_path / "lost")
    (lost / "recordings/step-00000001/base/rank-00000.json").unlink()
    with pytest.raises(InputError, match=r"recording of step 1: .*base has no recording; expected files rank-00000"):
        check(runs / "one", lost)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--record.steps", "9"], "record.steps is 9; expected steps of the run, 1 to 3; try --record.steps 3"),
        (["--record.steps", "0"], "record.steps is 0; expected steps of the run, 1 to 3; try --record.steps 1"),
        (["--record.keep", "* output"], "record.keep is given without record.steps"),
        (["--record.steps", "1", "--compile", "true"], "compiled blocks call no hooks"),
        (["--record.steps", "1", "--parallel.compression", "int8"], "record.steps with parallel.compression"),
        (["--record.steps", "1"], "record.steps is given to a command that does not record; try gristmill train"),
    ],
)
def test_what_cannot_be_recorded_is_refused(
    corpus: Path, run_ranks: RunRanks, tmp_path: Path, options: list[str], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        train_with_options(tmp_path / "run", options_of(corpus, *options))
