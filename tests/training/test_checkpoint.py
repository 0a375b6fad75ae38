import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.errors import InputError, OutputError
from pipeline.tokens import TokenizerRecord
from training.checkpoint import CheckpointRecord, Checkpoints
from training.config import ModelConfig, OptimConfig
from training.initialize import materialize
from training.mesh import open_world
from training.model import Decoder, summed_loss
from training.optim import build_optimizer, set_learning_rate
from training.parallelize import parallelize

CONFIG = ModelConfig(preset="gpt2", layers=1, width=16, heads=2).resolve(30, 8)
State = dict[str, torch.Tensor]


def work(folder: Path, save: list[int], steps: int = 0, keep: int = 2, seed: int = 1) -> tuple[int, State, list[str]]:
    """Load what there is, take steps up to `steps`, saving at some; the step begun at, the weights, what was said."""
    said: list[str] = []
    with open_world("cpu") as world:
        with torch.device("meta"):
            model = Decoder(CONFIG)
        model = materialize(model, world.device, seed)
        parallel, optimizer = parallelize(model, world), build_optimizer(model, OptimConfig())
        checkpoints = Checkpoints(folder, keep, world, said.append)
        record = checkpoints.load(model, optimizer)
        begun = record.step if record else 0
        set_learning_rate(optimizer, 0.01)
        for step in range(begun + 1, steps + 1):
            ids = torch.randint(30, (2, 8), generator=torch.Generator().manual_seed(10 * step + world.rank))
            summed_loss(parallel(ids), ids).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in save:
                tokenizer = TokenizerRecord("t.model", "0", 30, 2)
                checkpoints.save(CheckpointRecord(step, world.size, 1.5, asdict(CONFIG), tokenizer), model, optimizer)
        return begun, {name: p.detach().clone() for name, p in model.named_parameters()}, said


def equal(one: State, other: State) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_going_on_is_bit_for_bit_going_through_and_the_last_few_are_kept(tmp_path: Path) -> None:
    _, through, _ = work(tmp_path / "a", [], 6)
    work(tmp_path / "b", [1, 2, 3], 3)
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == ["latest", "step-00000002", "step-00000003"]
    begun, resumed, said = work(tmp_path / "b", [], 6, seed=2)  # other initial weights: they are replaced
    assert (begun, said) == (3, [])
    assert equal(through, resumed)


def test_a_checkpoint_of_two_processes_is_read_by_one_and_by_three(
    tmp_path: Path, run_ranks: Callable[..., list[Any]]
) -> None:
    (_, saved, _), (_, other, _) = run_ranks(2, work, tmp_path, [2], 2)
    assert equal(saved, other)
    for ranks in (1, 3):
        for begun, loaded, _ in run_ranks(ranks, work, tmp_path, [], 0, 2, 9):
            assert begun == 2 and equal(saved, loaded)


def test_three_ranks_resume_bit_for_bit_too(tmp_path: Path, run_ranks: Callable[..., list[Any]]) -> None:
    # with three, the order in which shares are added shows in the last bit
    (_, through, _), *_ = run_ranks(3, work, tmp_path / "a", [], 5)
    run_ranks(3, work, tmp_path / "b", [2], 2)
    (begun, resumed, _), *_ = run_ranks(3, work, tmp_path / "b", [], 5)
    assert begun == 2 and equal(through, resumed)


def flip_a_bit(checkpoint: Path) -> None:
    file = next(checkpoint.glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        flip_a_bit,
        lambda checkpoint: next(checkpoint.glob("*.distcp")).unlink(),
        lambda checkpoint: (checkpoint / ".metadata").write_bytes(b""),
        lambda checkpoint: (checkpoint / "record.json").write_text('{"step": 3'),
        lambda checkpoint: (checkpoint / "record.json").unlink(),
    ],
    ids=["flipped bit", "missing file", "empty metadata", "half a record", "no record"],
)
def test_a_damaged_checkpoint_is_passed_over_and_said_so(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    work(tmp_path, [2, 3], 3)
    damage(tmp_path / "step-00000003")
    begun, weights, said = work(tmp_path, [3], 3)
    assert begun == 2
    assert len(said) == 1 and "step-00000003 is damaged" in said[0]
    assert equal(weights, work(tmp_path, [])[1])  # written anew in its place


def test_a_half_written_checkpoint_is_never_read(tmp_path: Path) -> None:
    work(tmp_path, [2], 2)
    shutil.copytree(tmp_path / "step-00000002", tmp_path / "step-00000003.partial")
    begun, _, said = work(tmp_path, [3], 3)
    assert begun == 2 and said == ["checkpoint step-00000003 was never finished: passing it over"]
    assert not list(tmp_path.glob("*.partial"))


def test_latest_is_the_one_to_go_on_from(tmp_path: Path) -> None:
    work(tmp_path, [2, 3], 3)
    (tmp_path / "latest").write_text("step-00000002")
    assert work(tmp_path, [])[0] == 2
    (tmp_path / "latest").unlink()
    assert work(tmp_path, [])[0] == 3


def test_when_all_are_damaged_the_run_does_not_quietly_begin_again(tmp_path: Path) -> None:
    work(tmp_path, [2], 2)
    flip_a_bit(tmp_path / "step-00000002")
    with pytest.raises(InputError, match="remove that folder"):
        work(tmp_path, [])


def run_out_of_room(folder: Path) -> str:
    import resource

    work(folder, [1], 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))  # what a full disk is like
    try:
        work(folder, [2], 2)
    except OutputError as error:
        return str(error)
    return ""


def test_no_room_for_a_checkpoint_is_an_error_and_the_one_before_it_is_left(
    tmp_path: Path, run_ranks: Callable[..., list[Any]]
) -> None:
    (said,) = run_ranks(1, run_out_of_room, tmp_path)
    assert "cannot write the checkpoint" in said and "MiB are free there" in said
    assert work(tmp_path, [])[0] == 1
