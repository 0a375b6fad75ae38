"""Parts of the user's file under the remaining layouts: experts, and grids of tensor parallelism."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gristmill.config import load_config
from gristmill.errors import UsageError
from tests.training.own.test_own_modules import PARTS, losses, options
from tests.training.own.test_own_optimizer import PARTS as OPTIMIZERS
from training.config import TrainConfig
from training.train import train

EXPERTS = ["--model.experts", "4", "--model.capacity_factor", "2"]
GRIDS = {
    "2D": (4, "--parallel.tp 4 --parallel.tensor 2d"),
    "2.5D": (8, "--parallel.tp 8 --parallel.tensor 2.5d --parallel.depth 2"),
    "3D": (8, "--parallel.tp 8 --parallel.tensor 3d"),
}
TrainInRanks = Callable[[int, Path, list[str]], None]


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    path = tmp_path / "my_parts.py"
    path.write_text(PARTS)
    return path


@pytest.fixture
def optimizers(tmp_path: Path) -> Path:
    path = tmp_path / "my_optimizers.py"
    path.write_text(OPTIMIZERS)
    return path


@pytest.mark.parametrize(
    "part", ["--model.mlp PARTS:ScaledMLP", "--model.mlp PARTS:squared_relu", "--model.block PARTS:ScaledBlock"]
)
@pytest.mark.parametrize("grid", GRIDS)
def test_a_module_on_a_grid_is_refused(
    corpus: Path, tmp_path: Path, parts: Path, monkeypatch: pytest.MonkeyPatch, part: str, grid: str
) -> None:
    processes, layout = GRIDS[grid]
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    words = part.replace("PARTS", str(parts)).split() + layout.split()
    with pytest.raises(UsageError, match=r"parallel\.tensor") as refused:
        train(load_config(TrainConfig, ["--out_dir", str(tmp_path / "run"), *options(corpus), *words]))
    print(refused.value)
    assert "\n" not in str(refused.value)
    assert part.split()[0].removeprefix("--") in str(refused.value)


@pytest.mark.every(2)
@pytest.mark.parametrize("optimizer", ["Normed", "Lion"])
def test_an_optimizer_on_a_grid_trains_alike(
    corpus: Path, tmp_path: Path, optimizers: Path, train_in_ranks: TrainInRanks, optimizer: str
) -> None:
    given = options(corpus, "--optim.name", f"{optimizers}:{optimizer}")
    train_in_ranks(1, tmp_path / "one", given)
    plain = losses(tmp_path / "one")
    for grid in ("2D", "2.5D"):
        processes, layout = GRIDS[grid]
        train_in_ranks(processes, out_dir := tmp_path / grid, [*given, *layout.split()])
        assert losses(out_dir) == pytest.approx(plain, rel=1e-9), grid


@pytest.mark.every(2)
@pytest.mark.parametrize("optimizer", ["Normed", "Lion"])  # the first, under each layout
@pytest.mark.parametrize(
    "layout", ["--parallel.ep 2", "--parallel.tp 2", "--parallel.pp 2", "--parallel.zero 3 --parallel.ep 2"]
)
def test_a_block_and_an_optimizer_with_experts_train_alike(
    corpus: Path, tmp_path: Path, parts: Path, optimizers: Path, train_in_ranks: TrainInRanks, layout: str,
    optimizer: str,
) -> None:  # fmt: skip
    given = options(corpus, *EXPERTS, "--model.block", f"{parts}:ScaledBlock")
    given += ["--optim.name", f"{optimizers}:{optimizer}"]
    train_in_ranks(1, tmp_path / "one", given)
    train_in_ranks(2, tmp_path / "two", [*given, *layout.split()])
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-9)
