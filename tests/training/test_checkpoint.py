import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from pipeline.errors import InputError, OutputError, UsageError
from pipeline.tokens import TokenizerRecord
from training.checkpoint import CheckpointRecord, Checkpoints, load_model
from training.config import OptimConfig
from training.layout import ParallelConfig
from training.mesh import World, build_world, open_processes
from training.model_config import ModelConfig
from training.optim import build_optimizer
from training.parallel_model import ParallelModel
from training.piece import Piece, Weight, assemble
from training.piece_storage import model_state
from training.ranks import RankError

SHAPES = {"embed.tokens.weight": (7, 6), "blocks.0.mlp.up.weight": (5, 4), "norm.weight": (6,)}
Held = dict[str, tuple[Piece, Tensor]]
Ranks = Callable[..., list[Any]]


@contextmanager
def open_world() -> Iterator[World]:
    with open_processes("cpu") as device:
        yield build_world(ParallelConfig(dp=torch.distributed.get_world_size(), shard=1), device)


def value(key: str, shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(key.encode()))
    return torch.randn(shape, generator=generator)


def cut(shape: tuple[int, ...], layout: str, parts: int, number: int) -> Piece:
    """The piece of one of `parts` processes: rows, columns, both, or all of it on each; vectors are never cut."""
    whole = Piece.whole(shape)
    if len(shape) < 2 or layout == "copies":
        return whole
    if layout == "both":
        return whole.part(1, 2, number % 2).part(0, -(-parts // 2), number // 2)
    return whole.part({"rows": 0, "columns": 1}[layout], parts, number)


def weights_and_moments(
    layout: str, parts: int, number: int, seed: int
) -> tuple[list[Weight], dict[str, dict[str, Tensor]]]:
    """What process `number` of `parts` holds; its values follow from `seed` and the place in the whole."""
    weights, moments = [], {}
    for name, shape in SHAPES.items():
        piece = cut(shape, layout, parts, number)
        own = nn.Parameter(value(f"model.{name}", shape, seed)[piece.slices].clone())
        weights.append(Weight(name, own, own, piece, True))
        moments[name] = {
            m: value(f"optim.{name}.{m}", shape, seed)[piece.slices].clone() for m in ("exp_avg", "exp_avg_sq")
        }
    return weights, moments


def record(step: int, size: int = 1) -> CheckpointRecord:
    return CheckpointRecord(
        step=step,
        updates=step - 1,
        processes=size,
        layout={"dp": size},
        stability={"scale": 1024.0},
        unigram_loss=1.5,
        model={"layers": 1},
        tokenizer=TokenizerRecord("t.model", "0", 30, 2),
    )


def save(folder: Path, layout: str, steps: list[int], keep: int = 2, asynchronous: bool = False) -> list[str]:
    """Save at each of `steps` a state of that seed; what was said."""
    said: list[str] = []
    with open_world() as world:
        checkpoints = Checkpoints(folder, keep, world, said.append)
        for step in steps:
            state = model_state(*weights_and_moments(layout, world.size, world.rank, step))
            (checkpoints.save_async if asynchronous else checkpoints.save)(record(step, world.size), state)
            if asynchronous:
                for ((tensor, _),) in state.values():
                    tensor.fill_(torch.nan)  # as the next step would
        checkpoints.wait()
    return said


def load(folder: Path, layout: str) -> tuple[CheckpointRecord | None, Held, list[str]]:
    said: list[str] = []
    with open_world() as world:
        state = model_state(*weights_and_moments(layout, world.size, world.rank, seed=99))
        found = Checkpoints(folder, 2, world, said.append).load(state)
        return found, {key: (piece, tensor) for key, [(tensor, piece)] in state.items()}, said


def is_seed(held: list[Held], seed: int) -> bool:
    """Whether what the processes hold together is, to the bit, the state of `seed`."""
    wholes = {key: assemble({pieces[key][0]: pieces[key][1] for pieces in held}) for key in held[0]}
    return all(torch.equal(whole, value(key, tuple(whole.shape), seed)) for key, whole in wholes.items())


@pytest.mark.parametrize("written", ["rows", "copies"])
def test_what_three_processes_wrote_is_read_by_any_number_under_any_layout(
    tmp_path: Path, run_ranks: Ranks, written: str
) -> None:
    run_ranks(3, save, tmp_path, written, [4])
    for size, layout in ((1, "rows"), (2, "columns"), (4, "both"), (3, "copies")):
        results = run_ranks(size, load, tmp_path, layout)
        assert [found for found, _, _ in results] == [results[0][0]] * size
        assert results[0][0].step == 4 and results[0][0].updates == 3 and results[0][0].stability == {"scale": 1024.0}
        assert is_seed([held for _, held, _ in results], 4), (size, layout)


def test_torch_itself_reads_it(tmp_path: Path, run_ranks: Ranks) -> None:
    run_ranks(4, save, tmp_path, "both", [1])
    dcp_to_torch_save(tmp_path / "step-00000001", tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt")
    for name, shape in SHAPES.items():
        assert torch.equal(found["model"][name], value(f"model.{name}", shape, 1))
        assert torch.equal(found["optim"][f"{name}.exp_avg_sq"], value(f"optim.{name}.exp_avg_sq", shape, 1))


def test_copies_are_written_once_and_by_all(tmp_path: Path, run_ranks: Ranks) -> None:
    run_ranks(1, save, tmp_path / "1", "copies", [1])
    run_ranks(3, save, tmp_path / "3", "copies", [1])
    (one,) = [file.stat().st_size for file in tmp_path.glob("1/*/*.distcp")]
    sizes = [file.stat().st_size for file in tmp_path.glob("3/*/*.distcp")]
    assert sum(sizes) == one and len(sizes) == 3 and min(sizes) > one / 6


def pass_on(folder: Path, layout: dict[str, Any], step: int) -> bool:
    """Load checkpoint `step` into a model under `layout`, save it as the next; whether it is the model of seed 1."""
    config = ModelConfig(preset="gpt2", layers=4, width=8, heads=2).resolve(21, 8)
    with open_processes("cpu") as device:
        resolved = ParallelConfig(**layout).resolve(torch.distributed.get_world_size(), config, 8)
        world = build_world(resolved, device)
        found, wanted = (ParallelModel(config, resolved, world, seed) for seed in (2 if step else 1, 1))
        optimizer = build_optimizer(found.weights, OptimConfig())
        moments = optimizer.moments()
        checkpoints = Checkpoints(folder, 1, world, print)
        if step:
            checkpoints.load(model_state(found.weights, moments))
        else:
            for weight in found.weights:
                moments[weight.name]["exp_avg"].copy_(weight.own.detach() * 2)
        checkpoints.save(record(step + 1), model_state(found.weights, moments))
        return all(
            torch.equal(weight.own, of.own)
            and torch.equal(moments[weight.name]["exp_avg"], of.own * 2)
            and not moments[weight.name]["exp_avg_sq"].any()
            for weight, of in zip(found.weights, wanted.weights, strict=True)
        )


def test_a_model_goes_from_layout_to_layout(tmp_path: Path, run_ranks: Ranks) -> None:
    layouts: list[tuple[int, dict[str, Any]]] = [
        (2, {"pp": 2, "schedule": "zbv"}),  # the first process holds the tied matrix twice
        (4, {"tp": 2, "dp": 2, "zero": 1}),  # 21 rows over 2, and each part over 2
        (2, {"pp": 2, "schedule": "zbv"}),
        (3, {"dp": 3, "zero": 3}),
        (1, {}),
    ]
    for step, (size, layout) in enumerate(layouts):
        assert run_ranks(size, pass_on, tmp_path, layout, step) == [True] * size, layout


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_same_state_makes_the_same_bytes(tmp_path: Path, run_ranks: Ranks) -> None:
    for name in ("a", "b"):
        run_ranks(3, save, tmp_path / name, "rows", [1, 2])
    run_ranks(3, save, tmp_path / "c", "rows", [1, 2], 2, True)
    assert contents(tmp_path / "a") == contents(tmp_path / "b") == contents(tmp_path / "c")


def test_the_last_few_are_kept(tmp_path: Path) -> None:
    save(tmp_path, "rows", [1, 2, 3])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000002", "step-00000003"]
    save(tmp_path, "rows", [4], keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000004"]


def flip_a_bit(checkpoint: Path) -> None:
    file = next(checkpoint.glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def truncate(checkpoint: Path) -> None:
    file = next(checkpoint.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-100])


def make_old(checkpoint: Path) -> None:
    file = checkpoint / "record.json"
    file.write_text(file.read_text().replace('"version": 2', '"version": 1'))


@pytest.mark.parametrize(
    "damage",
    [
        flip_a_bit,
        truncate,
        make_old,
        lambda checkpoint: next(checkpoint.glob("*.distcp")).unlink(),
        lambda checkpoint: (checkpoint / ".metadata").write_bytes(b""),
        lambda checkpoint: (checkpoint / "record.json").write_text('{"step": 3'),
        lambda checkpoint: (checkpoint / "record.json").write_bytes(b"\xff\xfe"),
        lambda checkpoint: (checkpoint / "record.json").unlink(),
    ],
    ids=["bit", "truncated", "version", "no file", "empty metadata", "half a record", "no text", "no record"],
)
def test_a_damaged_checkpoint_is_passed_over_and_said_so(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    save(tmp_path, "rows", [2, 3])
    damage(tmp_path / "step-00000003")
    found, held, said = load(tmp_path, "columns")
    assert found is not None and found.step == 2 and is_seed([held], 2)
    assert len(said) == 1 and "step-00000003 cannot be used" in said[0]


def test_all_processes_pass_over_what_one_found_damaged(tmp_path: Path, run_ranks: Ranks) -> None:
    run_ranks(3, save, tmp_path, "rows", [2, 3])
    (tmp_path / "step-00000003/__1_0.distcp").write_bytes(b"something else")
    results = run_ranks(3, load, tmp_path, "rows")
    assert [found.step for found, _, _ in results] == [2, 2, 2] and is_seed([held for _, held, _ in results], 2)


def go_on(folder: Path, step: int) -> int:
    """Load, then save `step`, as a run does that goes on; the step begun at."""
    with open_world() as world:
        checkpoints = Checkpoints(folder, 2, world, [].append)
        state = model_state(*weights_and_moments("rows", 1, 0, seed=step))
        found = checkpoints.load(state)
        checkpoints.save(record(step), state)
        return found.step if found else 0


def test_what_is_later_than_where_a_run_went_on_gives_way_to_it(tmp_path: Path) -> None:
    save(tmp_path, "rows", [2, 3])
    flip_a_bit(tmp_path / "step-00000003")
    assert go_on(tmp_path, 4) == 2  # and not 3 and 4, of which one is damaged
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000002", "step-00000004"]
    (tmp_path / "latest").write_text("step-00000002")
    assert go_on(tmp_path, 4) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000002", "step-00000004"]
    assert go_on(tmp_path, 5) == 4
    (tmp_path / "latest").unlink()
    assert go_on(tmp_path, 6) == 5


def test_a_half_written_checkpoint_is_never_read(tmp_path: Path) -> None:
    save(tmp_path, "rows", [2])
    shutil.copytree(tmp_path / "step-00000002", tmp_path / "step-00000003.partial")
    found, _, said = load(tmp_path, "rows")
    assert found is not None and found.step == 2
    assert said == ["checkpoint step-00000003 was never finished: passing it over"]
    save(tmp_path, "rows", [5])
    assert not list(tmp_path.rglob("*.partial"))


def test_when_none_can_be_used_the_run_does_not_quietly_begin_again(tmp_path: Path) -> None:
    assert load(tmp_path, "rows")[0] is None
    save(tmp_path, "rows", [2])
    flip_a_bit(tmp_path / "step-00000002")
    with pytest.raises(InputError, match="remove that folder"):
        load(tmp_path, "rows")


def load_another(folder: Path, name: str, shape: tuple[int, ...]) -> str:
    """Load a model that has a parameter more, or another shape of one, on the last process."""
    with open_world() as world:
        weights, moments = weights_and_moments("rows", world.size, world.rank, 1)
        if world.rank == world.size - 1:
            own = nn.Parameter(torch.zeros(shape))
            weights = [weight for weight in weights if weight.name != name]
            weights.append(Weight(name, own, own, Piece.whole(shape), True))
            moments.pop(name, None)
        try:
            Checkpoints(folder, 2, world, print).load(model_state(weights, moments))
        except InputError as error:
            return str(error)
    return ""


def test_a_missing_parameter_and_another_shape_are_named_by_every_process(tmp_path: Path, run_ranks: Ranks) -> None:
    run_ranks(2, save, tmp_path, "rows", [1])
    for said in run_ranks(2, load_another, tmp_path, "blocks.1.mlp.up.weight", (5, 4)):
        assert "holds no model.blocks.1.mlp.up.weight" in said
    for said in run_ranks(2, load_another, tmp_path, "norm.weight", (8,)):
        assert "model.norm.weight of shape (6,)" in said and "(8,)" in said


def test_a_model_alone_is_begun_from_a_run_a_folder_or_one_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "run/checkpoints", "rows", [2, 3])
    for folder, seed in (("run", 3), ("run/checkpoints", 3), ("run/checkpoints/step-00000002", 2)):
        with open_world() as world:
            state = model_state(weights_and_moments("rows", 1, 0, seed=99)[0])
            assert load_model(tmp_path / folder, state, world, print).step == seed
            assert is_seed([{key: (piece, tensor) for key, [(tensor, piece)] in state.items()}], seed)
    with open_world() as world:
        with pytest.raises(UsageError, match="wanted a checkpoint"):
            load_model(tmp_path / "nowhere", state, world, print)
        flip_a_bit(tmp_path / "run/checkpoints/step-00000002")
        with pytest.raises(InputError, match=r"__0_0\.distcp is missing or damaged"):
            load_model(tmp_path / "run/checkpoints/step-00000002", state, world, print)


def test_a_checkpoint_runs_no_code(tmp_path: Path) -> None:
    from training.piece_storage import _Reader  # what SHA-256 cannot tell: a stranger's record agrees with his files

    (tmp_path / ".metadata").write_bytes(b"cos\nsystem\n(S'touch " + bytes(tmp_path / "ran") + b"'\ntR.")
    with pytest.raises(InputError, match=r"os\.system"):
        _Reader(tmp_path).read_metadata()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("layout", ["rows", "copies"])
def test_what_is_saved_beside_the_training_is_what_was_there_when_it_began(
    tmp_path: Path, run_ranks: Ranks, layout: str
) -> None:
    run_ranks(3, save, tmp_path, layout, [1, 2, 3], 3, True)
    for step in (3, 2, 1):  # each in turn the latest
        found, held, _ = load(tmp_path, "columns")
        assert found is not None and found.step == step and is_seed([held], step)
        shutil.rmtree(tmp_path / f"step-{step:08d}")


def train_beside(folder: Path) -> tuple[float, bool]:
    """Sum over the training's group while a checkpoint is written: the largest error, and whether it was meanwhile."""
    with open_world() as world:
        checkpoints = Checkpoints(folder, 1, world, print)
        weight = torch.ones(3_000_000)
        own = nn.Parameter(weight)
        piece = Piece.whole((3_000_000 * world.size,)).part(0, world.size, world.rank)
        threads = threading.active_count()
        checkpoints.save_async(record(1), model_state([Weight("w", own, own, piece, True)]))
        beside = threading.active_count() > threads and not (folder / "step-00000001").exists()
        wrong = 0.0
        for i in range(200):
            found = world.sum(torch.full((100,), float(i + world.rank)))
            wrong = max(wrong, float((found - (2 * i + 1)).abs().max()))
        checkpoints.wait()
        return wrong, beside and (folder / "step-00000001").exists()


def test_the_training_goes_on_beside(tmp_path: Path, run_ranks: Ranks) -> None:
    assert run_ranks(2, train_beside, tmp_path) == [(0.0, True)] * 2


def run_out_of_room(folder: Path, asynchronous: bool) -> tuple[str, str]:
    """What is said when there is no room for the second checkpoint, and whether the next one can be saved."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    said = ["", ""]
    with open_world() as world:
        checkpoints = Checkpoints(folder, 2, world, print)
        for step, room in ((1, resource.RLIM_INFINITY), (2, 2000), (3, resource.RLIM_INFINITY)):
            resource.setrlimit(resource.RLIMIT_FSIZE, (room if world.rank == world.size - 1 else -1, -1))
            state = model_state(*weights_and_moments("copies", world.size, world.rank, step))
            state = {f"{key}.{i}": held for key, held in state.items() for i in range(4)}  # 2000 bytes, and more
            try:
                if asynchronous:
                    checkpoints.save_async(record(step), state)
                    checkpoints.wait()
                else:
                    checkpoints.save(record(step), state)
            except OutputError as error:
                said[step - 2] = str(error)
                assert not (world.is_main and [*folder.glob("*.partial")]), "room was not given back"
    return said[0], said[1]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_no_room_on_one_process_is_an_error_of_all_and_the_one_before_it_is_left(
    tmp_path: Path, run_ranks: Ranks, asynchronous: bool
) -> None:
    for first, then in run_ranks(2, run_out_of_room, tmp_path, asynchronous):
        assert "cannot write the checkpoint" in first and "MiB are free there" in first and "\n" not in first
        assert then == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001", "step-00000003"]


def test_a_folder_that_cannot_be_is_an_error(tmp_path: Path, run_ranks: Ranks) -> None:
    (tmp_path / "file").write_text("")
    assert all("cannot write" in said for said in run_ranks(2, save_into_a_file, tmp_path / "file/checkpoints"))


def save_into_a_file(folder: Path) -> str:
    try:
        save(folder, "rows", [1])
    except OutputError as error:
        return str(error)
    return ""


def save_until_killed(folder: Path, moment: str) -> None:
    """Save large checkpoints until a path appears, then die at once, as all processes do."""

    def watch() -> None:
        while not (folder / moment).exists():
            time.sleep(0.0005)
        os.kill(os.getpid(), signal.SIGKILL)

    with open_world() as world:
        checkpoints = Checkpoints(folder, 2, world, print)
        threading.Thread(target=watch, daemon=True).start()
        for step in range(1, 100):
            own = nn.Parameter(torch.full((4_000_000,), float(step)))
            piece = Piece.whole((4_000_000 * world.size,)).part(0, world.size, world.rank)
            checkpoints.save_async(record(step), model_state([Weight("w", own, own, piece, True)]))
        checkpoints.wait()


@pytest.mark.parametrize("moment", ["step-00000003.partial", "step-00000003.partial/__1_0.distcp", "step-00000004"])
def test_a_kill_in_the_middle_leaves_one_to_go_on_from(tmp_path: Path, run_ranks: Ranks, moment: str) -> None:
    with pytest.raises(RankError, match="-9"):
        run_ranks(2, save_until_killed, tmp_path, moment)
    latest = (tmp_path / "latest").read_text()
    with open_world() as world:
        state = {"model.w": [(torch.zeros(8_000_000), Piece.whole((8_000_000,)))]}
        found = Checkpoints(tmp_path, 2, world, print).load(state)
    assert found is not None and f"step-{found.step:08d}" == latest and found.step in (2, 3, 4)
    assert bool((state["model.w"][0][0] == found.step).all())
