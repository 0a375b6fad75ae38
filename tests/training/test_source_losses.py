"""Training losses of the data sets of a mix: those of their sequences, in any layout as in one process."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training.conftest import VOCABULARY, small_run, write_shards
from training.config import TrainConfig
from training.data.mix import MixedSequences
from training.distributed.process_group import init_distributed
from training.kernels.cross_entropy import IGNORE_INDEX
from training.reporting.metrics_file import METRICS, read_metrics
from training.reporting.plot import distinct_parts, read_panels
from training.run_plan import RunPlan
from training.trainer import Trainer

Records = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folders(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Documents of one token again and again, and documents of random tokens."""
    root, chosen = tmp_path_factory.mktemp("sets"), np.random.default_rng(3)
    for name, highest in (("constant", 5), ("random", VOCABULARY)):
        lengths = chosen.integers(20, 60, 60).tolist()
        documents = [[*chosen.integers(4, highest, length).tolist(), 2] for length in lengths]
        write_shards(root / name / "tokens", [documents], corpus / "tokenizer.model")
    return root / "constant/tokens", root / "random/tokens"


def losses(out_dir: Path) -> Records:
    return [record for record in read_metrics(out_dir / METRICS) if record["kind"] == "losses"]


def options_of(corpus: Path, folders: tuple[Path, Path], *more: str) -> list[str]:
    words = small_run(corpus)
    at = words.index("--data.train")
    words[at + 1 : at + 2] = [*map(str, folders), "--data.weights", "0.25", "0.75"]
    numbers = "--model.layers 4 --optim.steps 6 --optim.lr 0.02 --optim.warmup_steps 1 --optim.min_lr 0.01"
    numbers += " --metrics.log_every 2 --eval.every 0 --eval.sample_tokens 0 --precision fp64"
    return [*words, *numbers.split(), *more]


def test_the_losses_of_sets_are_told_apart_and_the_same_in_any_layout(
    corpus: Path,
    folders: tuple[Path, Path],
    tmp_path: Path,
    train_in_ranks: Callable[[int, Path, list[str]], None],
) -> None:
    runs = {
        "one": (1, ""), "dp, pp": (4, "--parallel.dp 2 --parallel.pp 2 --parallel.micro_batches 2"),
        "zbv": (2, "--parallel.pp 2 --parallel.schedule zbv --parallel.micro_batches 4"),
        "tp, cp": (4, "--parallel.tp 2 --parallel.cp 2"),
    }  # fmt: skip
    for name, (size, layout) in runs.items():
        train_in_ranks(size, tmp_path / name, options_of(corpus, folders, *layout.split()))
    for name in runs:
        found, same = losses(tmp_path / name), losses(tmp_path / "one")
        assert [record["step"] for record in found] == [2, 4, 6]
        for record, other in zip(found, same, strict=True):
            for folder in map(str, folders):
                assert record["sets"][folder]["tokens"] == other["sets"][folder]["tokens"]
                assert record["sets"][folder]["loss"] == pytest.approx(other["sets"][folder]["loss"], rel=1e-9)
    records = [*read_metrics(tmp_path / "one" / METRICS)]
    steps = [record["loss"] for record in records if record["kind"] == "step"]
    for number, record in enumerate(losses(tmp_path / "one")):
        parts = list(record["sets"].values())
        mean = sum(part["loss"] * part["tokens"] for part in parts) / sum(part["tokens"] for part in parts)
        assert mean == pytest.approx(sum(steps[2 * number : 2 * number + 2]) / 2, rel=1e-9)
    constant, random = (losses(tmp_path / "one")[-1]["sets"][str(folder)] for folder in folders)
    assert constant["tokens"] * 3 == random["tokens"] == 2 * 8 * 16 * 3 // 4
    assert constant["loss"] < random["loss"] - 0.5
    curves = read_panels(records)["training loss by data set (nats/token)"]
    assert curves["constant"][-1] == (6, constant["loss"]) and curves["random"][-1] == (6, random["loss"])
    assert distinct_parts(["a/b", "a"]) == ["a/b", "a"]


def test_the_losses_are_those_of_the_sequences_and_one_set_has_no_such_record(
    config: TrainConfig, folders: tuple[Path, Path]
) -> None:
    data = replace(config.data, train=folders, packing="best-fit", mask_documents=True, seq_len=48, batch_size=4)
    mixed = replace(config, data=data, metrics=replace(config.metrics, log_every=1))
    with init_distributed("cpu") as device, Trainer(RunPlan.of(mixed), device) as trainer:
        trainer.load()
        batch, indices = trainer.batches.batch(0), trainer.batches.indices(0)
        (each,) = trainer.model.target_losses([batch.ids], [batch.targets], [batch.positions])  # type: ignore[list-item]
        trainer.step(1)
        ((kind, step, values),) = trainer.plugins.log_records()
        assert (kind, step) == ("losses", 1) and isinstance(trainer.batches.data, MixedSequences)
        for number, places, _ in trainer.batches.data.by_set(indices):
            targets = batch.targets[places] != IGNORE_INDEX
            loss = each[places][targets].double().mean().item()
            assert values["sets"][str(folders[number])] == {
                "loss": pytest.approx(loss, rel=1e-5), "tokens": int(targets.sum())
            }  # fmt: skip
        assert trainer.plugins.log_records() == []  # nothing since
    with init_distributed("cpu") as device, Trainer(RunPlan.of(config), device) as trainer:
        trainer.load()
        trainer.step(1)
        assert trainer.plugins.log_records() == [] and trainer.model.parts[0].head.sequence_losses is None
