import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from training.data.sequences import TokenSequences
from training.distributed.layout import ParallelConfig
from training.distributed.mesh import build_world, init_distributed
from training.model.decoder import meta_decoder
from training.model.model_config import ModelConfig
from training.parallel.parallel_model import ParallelModel
from training.parallel.parallelize import parallelize
from training.reporting.evaluate import bits_per_byte, evaluate, unigram_loss

Shards = Callable[..., Path]


def measured(train: Path, holdout: Path, layout: ParallelConfig = ParallelConfig()) -> tuple[float, float]:
    with init_distributed("cpu") as device:
        model = build(layout, device)
        data = TokenSequences(holdout, 4)
        return evaluate(model, data, 5, 2), unigram_loss(TokenSequences(train, 4), data, 5, model.world)


def build(layout: ParallelConfig, device: torch.device) -> ParallelModel:
    config = ModelConfig(layers=2, width=16, heads=2, init_std=0.5).resolve(10, 4)
    layout = layout.resolve(dist.get_world_size(), config, 4)
    return parallelize(meta_decoder(config), layout, build_world(layout, device), seed=1)


@pytest.fixture
def folders(shards: Shards, tmp_path: Path) -> tuple[Path, Path]:
    numbers = torch.randint(10, (200,), generator=torch.Generator().manual_seed(1)).pow(2).div(9).int().tolist()
    train = shards(tmp_path / "train", [[numbers[:50]], [], [numbers[50:90], numbers[90:170]]], vocabulary=10)
    return train, shards(tmp_path / "holdout", [[numbers[170:185]], [numbers[185:]]], vocabulary=10)


def test_loss_is_the_mean_over_all_targets_of_the_given_sequences(folders: tuple[Path, Path]) -> None:
    with init_distributed("cpu") as device:
        model = build(ParallelConfig(), device).parts[0]
    data = TokenSequences(folders[1], 4)
    losses = [-model(data[i][None, :-1])[0].log_softmax(-1)[range(4), data[i][1:]].mean() for i in range(5)]
    assert math.isclose(measured(*folders)[0], float(sum(losses).detach()) / 5, rel_tol=1e-5)


def test_unigram_loss_by_hand(folders: tuple[Path, Path]) -> None:
    train, holdout = (TokenSequences(folder, 4) for folder in folders)
    seen, targets = train.read(0, train.tokens).tolist(), holdout.read(1, 21).tolist()
    by_hand = -sum(math.log((seen.count(t) + 1) / (len(seen) + 10)) for t in targets) / 20
    assert math.isclose(measured(*folders)[1], by_hand, rel_tol=1e-12)


def test_the_unigram_model_of_many_tokens_is_that_of_evenly_spread_spans(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    train, holdout = (TokenSequences(folder, 4) for folder in folders)
    monkeypatch.setattr("training.reporting.evaluate._SPAN", 10)
    monkeypatch.setattr("training.reporting.evaluate._SPANS", 5)
    seen = [t for start in (0, 40, 80, 120, 160) for t in train.read(start, start + 10).tolist()]
    targets = holdout.read(1, 21).tolist()
    by_hand = -sum(math.log((seen.count(t) + 1) / (len(seen) + 10)) for t in targets) / 20
    assert math.isclose(measured(*folders)[1], by_hand, rel_tol=1e-12)


LAYOUTS = [
    ParallelConfig(),  # five sequences for two replicas: one of them has one less
    ParallelConfig(zero=3),
    ParallelConfig(tp=2, sequence_parallel=True),
    ParallelConfig(pp=2),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes_evaluate_to_the_same_loss(
    folders: tuple[Path, Path], run_ranks: Callable[..., list[Any]], layout: ParallelConfig
) -> None:
    alone = measured(*folders)
    for both in run_ranks(2, measured, *folders, layout):
        assert both == pytest.approx(alone, rel=1e-6)


def test_bits_per_byte_by_hand(folders: tuple[Path, Path]) -> None:
    manifest = TokenSequences(folders[0], 4).manifest
    assert (manifest.tokens, manifest.bytes) == (170, 340)
    # ln 2 nats are a bit, and a token is two bytes
    assert math.isclose(bits_per_byte(3 * math.log(2), manifest), 1.5)
