import shutil
import threading
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from gristmill.errors import InputError, OutputError, UsageError
from tests.training.small_state import (
    SHAPES,
    Ranks,
    flip_a_bit,
    is_seed,
    load,
    load_latest,
    open_world,
    record,
    save,
    value,
    weights_and_moments,
)
from training.checkpoint import checkpoint
from training.checkpoint.checkpoint import CheckpointManager, load_model
from training.checkpoint.checkpoint_config import CheckpointConfig
from training.checkpoint.checkpoint_group import single_process_group
from training.checkpoint.shard_storage import model_state
from training.config import TrainConfig
from training.distributed.process_group import init_distributed
from training.experimental.parallel_config import ParallelConfig
from training.loop import train_as_planned
from training.model.decoder import meta_decoder
from training.model.model_config import ModelConfig
from training.optim.build_optimizer import build_optimizer
from training.optim.optim_config import OptimConfig
from training.parallel.mesh import build_world
from training.parallel.parallelize import parallelize
from training.run_plan import RunPlan
from training.sharding.shard_spec import ShardSpec
from training.sharding.sharded_parameter import ShardedParameter
from training.train import train


@pytest.mark.parametrize("written", ["rows", "copies"])
def test_a_checkpoint_of_three_ranks_loads_on_any_number_of_ranks_in_any_layout(
    tmp_path: Path, run_ranks: Ranks, written: str
) -> None:
    run_ranks(3, save, tmp_path, written, [4])
    for size, layout in ((1, "rows"), (2, "columns"), (4, "both"), (3, "copies")):
        results = run_ranks(size, load, tmp_path, layout)
        assert [found for found, _, _ in results] == [results[0][0]] * size
        assert results[0][0].step == 4 and results[0][0].updates == 3 and results[0][0].stability == {"scale": 1024.0}
        assert is_seed([held for _, held, _ in results], 4), (size, layout)


def test_torch_tools_read_a_checkpoint(tmp_path: Path, run_ranks: Ranks) -> None:
    run_ranks(4, save, tmp_path, "both", [1])
    dcp_to_torch_save(tmp_path / "step-00000001", tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt")
    for name, shape in SHAPES.items():
        assert torch.equal(found["model"][name], value(f"model.{name}", shape, 1))
        assert torch.equal(found["optim"][f"{name}.exp_avg_sq"], value(f"optim.{name}.exp_avg_sq", shape, 1))


def test_replicated_tensors_are_written_once_and_balanced_over_ranks(tmp_path: Path, run_ranks: Ranks) -> None:
    run_ranks(1, save, tmp_path / "1", "copies", [1])
    run_ranks(3, save, tmp_path / "3", "copies", [1])
    (one,) = [file.stat().st_size for file in tmp_path.glob("1/*/*.distcp")]
    sizes = [file.stat().st_size for file in tmp_path.glob("3/*/*.distcp")]
    assert sum(sizes) == one and len(sizes) == 3 and min(sizes) > one / 6


def pass_on(folder: Path, layout: dict[str, Any], step: int, precision: str) -> bool:
    """Load checkpoint `step` in `layout` and save it as the next one; returns whether it is the model of seed 1."""
    config = ModelConfig(preset="gpt2", layers=4, width=8, heads=2).resolve(21, 8)
    with init_distributed("cpu") as device:
        resolved = ParallelConfig(**layout).resolve(torch.distributed.get_world_size(), config, 8)
        world = build_world(resolved, device)
        found, wanted = (
            parallelize(meta_decoder(config), resolved, world, seed, precision) for seed in (2 if step else 1, 1)
        )
        optimizer = build_optimizer(found.params, OptimConfig())
        moments = optimizer.moments()
        checkpoints = CheckpointManager(folder, 1, world, print)
        if step:
            load_latest(checkpoints, model_state(found.params, moments))
        else:
            for weight in found.params:
                moments[weight.name]["exp_avg"].copy_(weight.local.detach() * 2)
        checkpoints.save(record(step + 1), model_state(found.params, moments))
        return all(
            torch.equal(weight.local, of.local)
            and torch.equal(moments[weight.name]["exp_avg"], of.local * 2)
            and not moments[weight.name]["exp_avg_sq"].any()
            for weight, of in zip(found.params, wanted.params, strict=True)
        )


def test_a_model_and_optimizer_move_between_layouts(tmp_path: Path, run_ranks: Ranks) -> None:
    layouts: list[tuple[int, dict[str, Any]]] = [
        (2, {"pp": 2, "schedule": "zbv"}),  # the first process holds the tied matrix twice
        (4, {"tp": 2, "dp": 2, "zero": 1}),  # 21 rows over 2, and each part over 2
        (2, {"pp": 2, "schedule": "zbv"}),
        (3, {"dp": 3, "zero": 3}),
        (8, {"dp": 2, "zero": 1, "tp": 4, "tensor": "2d"}),  # blocks, of which two replicas hold rows
        (2, {"tp": 2}),
        (8, {"tp": 8, "tensor": "2.5d", "depth": 2}),
        (8, {"tp": 8, "tensor": "3d"}),
        (1, {}),
    ]
    for step, (size, layout) in enumerate(layouts):
        precision = ("bf16", "fp32")[step % 2]  # either takes up what the other has written
        assert run_ranks(size, pass_on, tmp_path, layout, step, precision) == [True] * size, layout


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_same_state_gives_the_same_bytes(tmp_path: Path, run_ranks: Ranks) -> None:
    for name in ("a", "b"):
        run_ranks(3, save, tmp_path / name, "rows", [1, 2])
    run_ranks(3, save, tmp_path / "c", "rows", [1, 2], 2, True)
    assert contents(tmp_path / "a") == contents(tmp_path / "b") == contents(tmp_path / "c")


def test_the_last_k_are_kept(tmp_path: Path) -> None:
    save(tmp_path, "rows", [1, 2, 3])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000002", "step-00000003"]
    save(tmp_path, "rows", [4], keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000004"]


@pytest.mark.parametrize("keep", [3, 4, 5])
def test_none_is_removed_while_there_are_fewer_than_k(tmp_path: Path, keep: int) -> None:
    for last in range(1, keep + 3):
        save(tmp_path, "rows", [last], keep=keep)
        found = sorted(int(path.name[5:]) for path in tmp_path.glob("step-*"))
        assert found == [*range(max(1, last - keep + 1), last + 1)]


def load_another(folder: Path, name: str, shape: tuple[int, ...]) -> str:
    """Load a model that, on the last rank, has another parameter or shape; returns the error."""
    with open_world() as world:
        weights, moments = weights_and_moments("rows", world.size, world.rank, 1)
        if world.rank == world.size - 1:
            own = nn.Parameter(torch.zeros(shape))
            weights = [weight for weight in weights if weight.name != name]
            weights.append(ShardedParameter(name, own, own, ShardSpec.whole(shape), True))
            moments.pop(name, None)
        try:
            load_latest(CheckpointManager(folder, 2, world, print), model_state(weights, moments))
        except InputError as error:
            return str(error)
    return ""


def test_every_rank_names_a_missing_parameter_or_another_shape(tmp_path: Path, run_ranks: Ranks) -> None:
    run_ranks(2, save, tmp_path, "rows", [1])
    for said in run_ranks(2, load_another, tmp_path, "blocks.1.mlp.up.weight", (5, 4)):
        assert "has no model.blocks.1.mlp.up.weight: it belongs" in said
    for said in run_ranks(2, load_another, tmp_path, "norm.weight", (8,)):
        assert "model.norm.weight of shape (6,)" in said and "(8,)" in said


def test_load_model_accepts_a_run_a_folder_or_one_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "run/checkpoints", "rows", [2, 3])
    for folder, seed in (("run", 3), ("run/checkpoints", 3), ("run/checkpoints/step-00000002", 2)):
        with single_process_group() as group:
            state = model_state(weights_and_moments("rows", 1, 0, seed=99)[0])
            assert load_model(tmp_path / folder, state, group, print).step == seed
            assert is_seed([{key: (spec, tensor) for key, [(tensor, spec)] in state.items()}], seed)
    with single_process_group() as group:
        with pytest.raises(UsageError, match="expected a checkpoint"):
            load_model(tmp_path / "nowhere", state, group, print)
        flip_a_bit(tmp_path / "run/checkpoints/step-00000002")
        with pytest.raises(InputError, match=r"__0_0\.distcp is missing or damaged"):
            load_model(tmp_path / "run/checkpoints/step-00000002", state, group, print)


def test_a_checkpoint_runs_no_code(tmp_path: Path) -> None:
    from training.checkpoint.shard_storage import (
        _Reader,  # what SHA-256 cannot tell: a stranger's record agrees with his files
    )

    (tmp_path / ".metadata").write_bytes(b"cos\nsystem\n(S'touch " + bytes(tmp_path / "ran") + b"'\ntR.")
    with pytest.raises(InputError, match=r"os\.system"):
        _Reader(tmp_path).read_metadata()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("layout", ["rows", "copies"])
def test_an_async_save_holds_the_state_at_its_start(tmp_path: Path, run_ranks: Ranks, layout: str) -> None:
    run_ranks(3, save, tmp_path, layout, [1, 2, 3], 3, True)
    for step in (3, 2, 1):  # each in turn the latest
        found, held, _ = load(tmp_path, "columns")
        assert found is not None and found.step == step and is_seed([held], step)
        shutil.rmtree(tmp_path / f"step-{step:08d}")


def all_reduce_during_a_save(folder: Path) -> tuple[float, bool]:
    """All-reduce during an async save; returns the largest error, and whether the save ran meanwhile."""
    with open_world() as world:
        checkpoints = CheckpointManager(folder, 1, world, print)
        weight = torch.ones(3_000_000)
        own = nn.Parameter(weight)
        spec = ShardSpec.whole((3_000_000 * world.size,)).shard(0, world.size, world.rank)
        threads = threading.active_count()
        checkpoints.save_async(record(1), model_state([ShardedParameter("w", own, own, spec, True)]))
        beside = threading.active_count() > threads and not (folder / "step-00000001").exists()
        wrong = 0.0
        for i in range(200):
            found = world.all_reduce(torch.full((100,), float(i + world.rank)))
            wrong = max(wrong, float((found - (2 * i + 1)).abs().max()))
        checkpoints.wait()
        return wrong, beside and (folder / "step-00000001").exists()


def test_collectives_of_training_run_during_an_async_save(tmp_path: Path, run_ranks: Ranks) -> None:
    assert run_ranks(2, all_reduce_during_a_save, tmp_path) == [(0.0, True)] * 2


def test_a_checkpoint_that_could_not_be_written_ends_the_run_at_the_next_step(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_state: object, folder: Path, _group: object) -> None:
        raise OutputError(f"cannot write the checkpoint {folder}")

    save_async = CheckpointManager.save_async

    def save_and_wait(manager: CheckpointManager, *arguments: Any) -> Path:
        path = save_async(manager, *arguments)
        assert manager._saving is not None
        wait([manager._saving])  # so that the failure is known at the next step, however busy this machine is
        return path

    monkeypatch.setattr(checkpoint, "write_shards", refuse)
    monkeypatch.setattr(CheckpointManager, "save_async", save_and_wait)
    begun = list[int]()
    slow = replace(config, checkpoint=CheckpointConfig(every=2), eval=replace(config.eval, every=0))
    with pytest.raises(OutputError, match=r"cannot write the checkpoint .*step-00000002"):
        train_as_planned(RunPlan.of(slow), lambda: begun.append(1))
    assert len(begun) == 3


def test_checkpoints_of_every_so_many_steps_are_kept_besides_the_last(config: TrainConfig) -> None:
    saved = CheckpointConfig(every=2, keep=1, keep_every=4)
    train(replace(config, checkpoint=saved, optim=replace(config.optim, steps=10)))
    assert sorted(path.name for path in (config.out_dir / "checkpoints").glob("step-*")) == [
        "step-00000004", "step-00000008", "step-00000010",
    ]  # fmt: skip
