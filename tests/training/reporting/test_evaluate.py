import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gristmill.errors import UsageError
from training.data.mix import TokenMix
from training.data.sequences import TokenSequences
from training.distributed.process_group import init_distributed
from training.experimental.parallel_config import ParallelConfig
from training.model.decoder import meta_decoder
from training.model.model_config import ModelConfig
from training.parallel.mesh import build_world
from training.parallel.parallel_model import ParallelModel
from training.parallel.parallelize import parallelize
from training.reporting.holdouts import HoldoutLosses, Holdouts, bits_per_byte, unigram_loss
from training.reporting.reporting_config import EvalConfig

Shards = Callable[..., Path]


def measured(train: Path, holdout: Path, layout: ParallelConfig = ParallelConfig()) -> tuple[float, float]:
    with init_distributed("cpu") as device:
        model = build(layout, device)
        data = TokenSequences(holdout, 4)
        found = Holdouts({"": data}, EvalConfig(sequences=5), 2).evaluate(model)[""].whole.loss
        return found, unigram_loss(TokenMix.of([TokenSequences(train, 4)], ()), data, 5, model.world)


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
    monkeypatch.setattr("training.reporting.holdouts._SPAN", 10)
    monkeypatch.setattr("training.reporting.holdouts._SPANS", 5)
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


@pytest.fixture
def mixed(shards: Shards, tmp_path: Path) -> Path:
    """Two shards of documents of three sources, of which one is in the second shard alone."""
    numbers = torch.randint(10, (31,), generator=torch.Generator().manual_seed(2)).tolist()
    documents = [[numbers[:3], numbers[3:10], numbers[10:11]], [numbers[11:13], numbers[13:]]]
    return shards(tmp_path / "mixed", documents, vocabulary=10, sources=[["web", "book", "web"], ["code", "book"]])


def measured_by_source(holdout: Path, layout: ParallelConfig, weights: dict[str, float]) -> HoldoutLosses:
    with init_distributed("cpu") as device:
        config = EvalConfig(sequences=7, weights=weights, lengths=(3, 7))
        return Holdouts({"": TokenSequences(holdout, 4)}, config, 2).evaluate(build(layout, device))[""]


def losses_by_hand(holdout: Path) -> list[tuple[str, int, float]]:
    """Source, length of the document, and loss of each target of the first seven sequences."""
    with init_distributed("cpu") as device:
        model = build(ParallelConfig(), device).parts[0]
    of = [*[("web", 3)] * 3, *[("book", 7)] * 7, ("web", 1), *[("code", 2)] * 2, *[("book", 18)] * 18]
    data, found = TokenSequences(holdout, 4), []
    for i in range(7):
        losses = -model(data[i][None, :-1])[0].log_softmax(-1)[range(4), data[i][1:]]
        found += [(*of[4 * i + 1 + place], loss) for place, loss in enumerate(losses.tolist())]
    return found


def mean(losses: list[float]) -> float:
    return sum(losses) / len(losses)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_target_counts_for_the_source_and_the_length_of_its_document(
    mixed: Path, run_ranks: Callable[..., list[Any]], layout: ParallelConfig
) -> None:
    by_hand = losses_by_hand(mixed)
    for found in run_ranks(2, measured_by_source, mixed, layout, {}):
        assert found.whole.loss == pytest.approx(mean([loss for *_, loss in by_hand]), rel=1e-5)
        for source, tokens in {"web": 3, "code": 2, "book": 23}.items():
            wanted = mean([loss for name, _, loss in by_hand if name == source])
            assert found.sources[source].loss == pytest.approx(wanted, rel=1e-5)
            assert found.sources[source].tokens == tokens
        for name, low, high in (("0-2", 0, 2), ("3-6", 3, 6), ("7-", 7, 99)):
            wanted = mean([loss for _, length, loss in by_hand if low <= length <= high])
            assert found.lengths[name].loss == pytest.approx(wanted, rel=1e-5)


def test_weights_of_sources_replace_their_tokens(mixed: Path) -> None:
    found = measured_by_source(mixed, ParallelConfig(), {"web": 1.0, "code": 3.0})
    assert found.whole.loss == pytest.approx((found.sources["web"].loss + 3 * found.sources["code"].loss) / 4)
    assert found.whole.bits_per_byte == pytest.approx(found.whole.loss / math.log(2) / 2)  # a token is two bytes


def test_shards_that_do_not_know_their_sources_are_of_one(folders: tuple[Path, Path]) -> None:
    with init_distributed("cpu") as device:
        holdouts = Holdouts({"": TokenSequences(folders[1], 4)}, EvalConfig(sequences=5), 2)
        found = holdouts.evaluate(build(ParallelConfig(), device))[""]
    assert (found.sources, found.lengths, found.lines(), holdouts.groups[""].count) == ({}, {}, [], 1)


@pytest.mark.parametrize(
    ("weights", "sequences", "fault"),
    [
        ({"wiki": 1.0}, 0, "eval.weights has 'wiki', and .*mixed has no such source; it has book, code, web"),
        ({"code": 1.0}, 2, "no token of it is among the first 2 sequences of .*; try more --eval.sequences"),
    ],
)
def test_weights_of_sources_that_are_not_evaluated_are_refused(
    mixed: Path, weights: dict[str, float], sequences: int, fault: str
) -> None:
    with pytest.raises(UsageError, match=fault):
        Holdouts({"": TokenSequences(mixed, 4)}, EvalConfig(weights=weights, sequences=sequences), 2)


def test_weights_need_shards_that_know_their_sources(folders: tuple[Path, Path]) -> None:
    with pytest.raises(UsageError, match="does not say which source each document is from; run tokenize_corpus again"):
        Holdouts({"": TokenSequences(folders[1], 4)}, EvalConfig(weights={"web": 1.0}), 2)


@pytest.mark.parametrize("options", [EvalConfig(weights={"a": -1.0}), EvalConfig(lengths=(5, 5))])
def test_options_that_mean_nothing_are_refused(options: EvalConfig) -> None:
    with pytest.raises(UsageError, match="expected"):
        options.check()


def test_bits_per_byte_by_hand(folders: tuple[Path, Path]) -> None:
    manifest = TokenSequences(folders[0], 4).manifest
    assert (manifest.tokens, manifest.bytes) == (170, 340)
    # ln 2 nats are a bit, and a token is two bytes
    assert math.isclose(bits_per_byte(3 * math.log(2), manifest), 1.5)
