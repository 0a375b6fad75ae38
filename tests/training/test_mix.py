"""Runs over several data sets: what they read, resumed and in any layout; bad weights are refused in a sentence."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import torch

from gristmill.config import load_config
from gristmill.errors import UsageError
from tests.training.conftest import sentences, write_shards
from training.config import TrainConfig
from training.data.batch_schedule import BatchSplit
from training.data.batches import Batches
from training.data.data_config import DataConfig
from training.data.mix import TokenMix
from training.data.sequences import TokenSequences
from training.reporting.metrics_file import METRICS, read_metrics
from training.reporting.seen_tokens import SeenTokens
from training.run_plan import RunPlan
from training.train import train

Folders = tuple[Path, Path]


@pytest.fixture(scope="module")
def folders(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Two data sets: one of sources a and b, and a smaller one of source b."""
    root, tokenizer = tmp_path_factory.mktemp("sets"), corpus / "tokenizer.model"
    encode = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer)).encode
    for name, seed, size, sources in (("first", 3, 60, "ab"), ("second", 4, 8, "b")):
        of = [sources[i % len(sources)] for i in range(size)]
        write_shards(root / name, [[[*encode(text), 2] for text in sentences(seed, size)]], tokenizer, sources=[of])
    return root / "first", root / "second"


def mixed(config: TrainConfig, folders: Folders, weights: tuple[float, ...] = (0.75, 0.25)) -> TrainConfig:
    data = replace(config.data, train=folders, weights=weights)
    return replace(config, data=data, metrics=replace(config.metrics, sources=True))


def test_a_mix_is_trained_on_and_resumed_and_tells_what_it_has_seen(
    config: TrainConfig, folders: Folders, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = mixed(replace(config, out_dir=config.out_dir / "whole"), folders)
    train(whole)
    said = capfd.readouterr().out
    first = replace(whole, out_dir=config.out_dir / "parts", optim=replace(whole.optim, steps=5, decay_steps=12))
    train(first)
    train(replace(first, optim=replace(first.optim, steps=12)))
    losses = [[r["loss"] for r in read_metrics(c.out_dir / METRICS) if r["kind"] == "step"] for c in (whole, first)]
    assert losses[0] == losses[1]
    seen = [[r for r in read_metrics(c.out_dir / METRICS) if r["kind"] == "data"][-1] for c in (whole, first)]
    assert seen[0] == seen[1] and seen[0]["step"] == 12
    sets, sources = seen[0]["sets"], seen[0]["sources"]
    assert [sets[str(folder)]["tokens"] for folder in folders] == [12 * 12 * 16 * 3 // 4, 12 * 12 * 16 // 4]
    assert sets[str(folders[0])]["share"] == 0.75 == sets[str(folders[0])]["requested"]
    assert sum(part["tokens"] for part in sources.values()) == 12 * 12 * 16
    assert sources["b"]["share"] > sources["a"]["share"] and sum(p["requested"] for p in sources.values()) == 1
    assert f"75.00% of {folders[0]}: 1,728 of its" in said and "epochs, so some are repeated" in said
    assert f"read from {folders[1]}: 576 tokens, 25.00% of all, 25.00% requested, " in said


def test_a_mix_of_packed_documents_is_counted_target_by_target(
    config: TrainConfig, folders: Folders, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = mixed(config, folders, (0.6, 0.4))
    whole = replace(whole, data=replace(whole.data, packing="best-fit", mask_documents=True, seq_len=48, batch_size=4))
    train(whole)
    said = capfd.readouterr().out
    assert all(
        f"{folder}: packing: {number} documents in " in said for folder, number in zip(folders, (60, 8), strict=True)
    )
    seen = [record for record in read_metrics(whole.out_dir / METRICS) if record["kind"] == "data"][-1]
    first, second = (seen["sets"][str(folder)] for folder in folders)
    plan = RunPlan.of(whole)
    sequences, order = plan.train.sequences(whole.seed, whole.out_dir)
    batches = Batches(sequences, plan.split, 0, whole.seed, mix=order)
    counted = {"a": 0, "b": 0}
    for set_, _, rows in sequences.by_set(batches.global_indices(0, 12)):  # type: ignore[attr-defined]
        part = sequences.sets[set_]
        for row in rows.tolist():
            for start, stop in part.target_spans(row):
                spans = part.documents.between(start, stop)
                for document, tokens in zip(spans.number, spans.overlap(start, stop), strict=True):
                    counted["b" if set_ or document % 2 else "a"] += int(tokens)
    assert {name: source["tokens"] for name, source in seen["sources"].items()} == counted
    targets = sum(batches.target_count(step) for step in range(12))
    assert first["tokens"] + second["tokens"] == sum(counted.values()) == targets < 12 * 4 * 48
    assert first["share"] == pytest.approx(0.6, abs=0.02) and first["requested"] == 0.6
    losses = [record["loss"] for record in read_metrics(whole.out_dir / METRICS) if record["kind"] == "step"]
    again = replace(whole, out_dir=whole.out_dir / "again", optim=replace(whole.optim, steps=5, decay_steps=12))
    train(again)
    train(replace(again, optim=replace(again.optim, steps=12)))
    assert losses == [r["loss"] for r in read_metrics(again.out_dir / METRICS) if r["kind"] == "step"]


def test_weights_of_packed_sets_are_of_tokens_and_not_of_rows(folders: Folders, tmp_path: Path) -> None:
    mix = TokenMix.of([TokenSequences(folder, 100) for folder in folders], (0.5, 0.5))
    packed, order = mix.sequences(seed=1, packed_in=tmp_path)
    assert order is not None
    rows = order.counts(torch.tensor([10_000]))[:, 0].tolist()
    of_row = [part.target_count(np.arange(len(part))) / len(part) for part in packed.sets]
    targets = [count * targets for count, targets in zip(rows, of_row, strict=True)]
    assert targets[0] == pytest.approx(targets[1], rel=1e-3) and rows[0] != rows[1]


def test_another_mix_is_another_run(config: TrainConfig, folders: Folders) -> None:
    def identity(*weights: float) -> dict[str, Any]:
        return RunPlan.of(mixed(config, folders, weights)).identity

    assert identity(3.0, 1.0) == identity(0.75, 0.25) != identity(0.5, 0.5)
    alone = RunPlan.of(replace(config, data=replace(config.data, train=(folders[0],)))).identity
    assert alone == RunPlan.of(replace(config, data=replace(config.data, train=folders[0]))).identity
    assert "data.weights" not in alone


def test_without_weights_the_sets_are_mixed_by_their_tokens(folders: Folders) -> None:
    parts = [TokenSequences(folder, 16) for folder in folders]
    mix = TokenMix.of(parts, ())
    assert mix.shares == [part.tokens / mix.tokens for part in parts]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_global_batches_are_the_same_for_any_number_of_replicas(folders: Folders, ranks: int) -> None:
    mix = TokenMix.of([TokenSequences(folder, 16) for folder in folders], (0.6, 0.4))
    sequences, order = mix.sequences(seed=7)
    batches = [Batches(sequences, BatchSplit(ranks, 1, 8 // ranks), rank, 7, mix=order) for rank in range(ranks)]
    found = np.stack([of_rank.indices(3, 2) for of_rank in batches], 1).flatten()
    whole = Batches(sequences, BatchSplit(1, 1, 8), 0, 7, mix=order)
    assert found.tolist() == whole.indices(3, 2).tolist() == whole.global_indices(3, 2).tolist()
    tokens = whole.read(3, 1)[0].ids
    for index, row in zip(whole.indices(3).tolist(), tokens, strict=True):
        part, number = (0, index) if index < len(mix.parts[0]) else (1, index - len(mix.parts[0]))
        assert row.equal(mix.parts[part][number][:-1])


def test_every_token_seen_is_counted_for_its_source(folders: Folders) -> None:
    mix = TokenMix.of([TokenSequences(folder, 16) for folder in folders], (0.6, 0.4))
    sequences, order = mix.sequences(seed=7)
    batches, wanted = Batches(sequences, BatchSplit(1, 1, 4), 0, 7, mix=order), {"a": 0, "b": 0}
    for index in batches.global_indices(0, 5).tolist():
        part, number = (0, index) if index < len(mix.parts[0]) else (1, index - len(mix.parts[0]))
        spans = mix.parts[part].documents.between(16 * number + 1, 16 * number + 17)
        for document, tokens in zip(spans.number, spans.overlap(16 * number + 1, 16 * number + 17), strict=True):
            wanted["b" if part or document % 2 else "a"] += int(tokens)
    seen = SeenTokens(batches, mix, by_source=True)
    seen.after(2)
    assert {name: part["tokens"] for name, part in seen.after(5)["sources"].items()} == wanted


def test_replicas_that_are_runs_count_their_parts_of_the_batches(folders: Folders) -> None:
    mix = TokenMix.of([TokenSequences(folder, 16) for folder in folders], (0.6, 0.4))
    sequences, order = mix.sequences(seed=7)

    def seen(replicas: int, number: int) -> Counter[str]:
        batches = Batches(sequences, BatchSplit(2 * replicas, 1, 4 // replicas), number, 7, mix=order, runs=replicas)
        found = SeenTokens(batches, mix, True).after(5)
        tokens = {name: part["tokens"] for kind in ("sets", "sources") for name, part in found[kind].items()}
        return Counter(tokens | {f"epochs {name}": part["epochs"] for name, part in found["sets"].items()})

    parts = [seen(2, number) for number in (0, 1)]  # of rank 0 of each
    assert parts[0] != parts[1]
    assert parts[0] + parts[1] == pytest.approx(seen(1, 0))


def test_bad_mixes_are_refused_in_a_sentence(
    config: TrainConfig, folders: Folders, tmp_path: Path, shards: Callable[..., Path]
) -> None:
    other = shards(tmp_path / "other", [[[1] * 40]])
    for data, fault in (
        (replace(config.data, train=folders, weights=(1.0,)), "weights are 1, and data.train names 2 folders"),
        (replace(config.data, train=folders, weights=(1.0, 0.0)), "data.weights are 1.0 0.0; expected finite numbers"),
        (replace(config.data, train=()), "data.train names no folder"),
        (replace(config.data, train=(folders[0], folders[1] / "../first")), "data.train names .*first twice; expected"),
        (replace(config.data, train=folders, order="randperm"), "data.order randperm is for a single folder"),
        (replace(config.data, train=(folders[0], other)), "was made with tokenizer .* and .*other with none.model"),
    ):
        with pytest.raises(UsageError, match=fault):
            RunPlan.of(replace(config, data=data))


def test_sources_that_no_shard_knows_are_not_counted_in_silence(config: TrainConfig, folders: Folders) -> None:
    mixed_folders = (folders[0], config.data.train_folders[0])
    for train_on in (config.data.train_folders, mixed_folders):
        counting = replace(mixed(config, folders, ()), data=replace(config.data, train=train_on))
        with pytest.raises(UsageError, match=r"metrics.sources is true, but .*tokens/train does not say which"):
            train(counting)
    assert not (config.out_dir / "run.json").exists()


def test_folders_and_weights_come_from_the_command_line_and_from_a_file(tmp_path: Path) -> None:
    words = ["--out_dir", "run", "--data.holdout", "h", "--data.train", "a", "b", "--data.weights", "3", "1"]
    data = load_config(TrainConfig, words).data
    assert (data.train, data.weights) == ((Path("a"), Path("b")), (3.0, 1.0))
    assert load_config(TrainConfig, [*words[:5], "a"]).data.train_folders == (Path("a"),)
    (tmp_path / "run.toml").write_text('out_dir = "run"\n[data]\ntrain = ["a", "b"]\nweights = [3, 1]\nholdout = "h"\n')
    assert load_config(TrainConfig, ["--config", str(tmp_path / "run.toml")]).data == data
    (tmp_path / "one.toml").write_text('out_dir = "run"\n[data]\ntrain = "a"\nholdout = "h"\n')
    assert load_config(TrainConfig, ["--config", str(tmp_path / "one.toml")]).data == DataConfig(Path("a"), Path("h"))
    (tmp_path / "bad.toml").write_text('out_dir = "run"\n[data]\ntrain = 5\nholdout = "h"\n')
    with pytest.raises(UsageError, match=r"data.train: expected a path or a list of paths, got 5"):
        load_config(TrainConfig, ["--config", str(tmp_path / "bad.toml")])
