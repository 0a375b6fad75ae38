"""Runs whose documents do not see each other, and runs of packed documents."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gristmill.errors import UsageError
from tests.training.conftest import small_run
from training.checkpoint.checkpoint_config import CheckpointConfig
from training.config import TrainConfig
from training.data.batch_schedule import BatchSplit
from training.data.batches import Batches
from training.data.packing import PackedSequences
from training.data.sequences import TokenSequences
from training.distributed.process_group import init_distributed
from training.kernels.cross_entropy import IGNORE_INDEX
from training.reporting.metrics_file import METRICS, read_metrics
from training.run_plan import RunPlan
from training.train import train
from training.trainer import Trainer

OPTIONS = {
    "mask": {"mask_documents": True},
    "eod": {"eod_mask_loss": True},
    "pack": {"packing": "best-fit", "mask_documents": True},
}


def losses(out_dir: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(out_dir / METRICS) if record["kind"] in ("step", "eval")]


@pytest.mark.every(3)
@pytest.mark.parametrize("chosen", OPTIONS)
def test_a_run_resumes_bit_for_bit(config: TrainConfig, tmp_path: Path, chosen: str) -> None:
    data = replace(config.data, **OPTIONS[chosen])  # type: ignore[arg-type]
    config = replace(config, data=data, checkpoint=CheckpointConfig(every=5))
    train(config)
    shorter = replace(config, out_dir=tmp_path / "again", optim=replace(config.optim, steps=7, decay_steps=12))
    train(shorter)
    train(replace(shorter, optim=replace(config.optim, decay_steps=12)))
    assert losses(shorter.out_dir)[-6:] == losses(config.out_dir)[-6:]


def test_two_processes_train_on_what_one_does(
    corpus: Path, tmp_path: Path, train_in_ranks: Callable[[int, Path, list[str]], None]
) -> None:
    options = [*small_run(corpus), "--data.packing", "best-fit", "--data.mask_documents", "true", "--optim.steps", "4"]
    options += ["--optim.decay_steps", "4", "--eval.sample_tokens", "4", "--precision", "fp64"]
    for size in (1, 2):
        train_in_ranks(size, tmp_path / str(size), options)
    assert losses(tmp_path / "1") == pytest.approx(losses(tmp_path / "2"), rel=1e-9)


@pytest.mark.every(3)
@pytest.mark.parametrize("layout", ["--parallel.dp=2", "--parallel.pp=2 --parallel.micro_batches=2", "--parallel.cp=2"])
def test_no_first_token_of_a_document_is_a_target_of_eod_mask_loss(
    corpus: Path, tmp_path: Path, train_in_ranks: Callable[[int, Path, list[str]], None], layout: str
) -> None:
    options = [*small_run(corpus), "--optim.steps", "4", "--eval.sample_tokens", "0", "--precision", "fp64"]
    masked = ["--data.eod_mask_loss", "true"]
    train_in_ranks(1, tmp_path / "all", options)
    train_in_ranks(1, tmp_path / "1", [*options, *masked])
    train_in_ranks(2, tmp_path / "2", [*options, *masked, *layout.replace("=", " ").split()])
    assert losses(tmp_path / "1") == pytest.approx(losses(tmp_path / "2"), rel=1e-9)
    assert losses(tmp_path / "1")[0] != losses(tmp_path / "all")[0]
    recorded = json.loads((tmp_path / "1/run.json").read_text())
    assert recorded["data.eod_mask_loss"] is True and "data.mask_documents" not in recorded


def test_the_loss_is_the_mean_over_the_targets_that_are_left(config: TrainConfig) -> None:
    config = replace(config, data=replace(config.data, eod_mask_loss=True))
    with init_distributed("cpu") as device, Trainer(RunPlan.of(config), device) as trainer:
        trainer.load()
        batch = trainer.batches.batch(0)
        (each,) = trainer.model.target_losses([batch.ids], [batch.targets])
        counted = batch.targets != IGNORE_INDEX
        assert int((~counted).sum()) > 0 and int(counted.sum()) == trainer.batches.target_count(0)
        trainer.step(1)
        assert trainer.unreported[0].loss == pytest.approx(each[counted].double().mean().item(), rel=1e-6)


def test_runs_of_other_documents_are_other_runs(config: TrainConfig) -> None:
    config = replace(config, optim=replace(config.optim, steps=1), eval=replace(config.eval, sample_tokens=0))
    train(config)
    recorded = json.loads((config.out_dir / "run.json").read_text())
    assert not [key for key in recorded if "documents" in key or "packing" in key]
    masked = replace(config, data=replace(config.data, mask_documents=True))
    with pytest.raises(UsageError, match=r"data.mask_documents \(None there, True now\)"):
        train(masked)
    masked = replace(masked, out_dir=config.out_dir / "masked")
    train(masked)
    with pytest.raises(UsageError, match=r"data.mask_documents \(True there, None now\)"):
        train(replace(config, out_dir=masked.out_dir))


@pytest.mark.parametrize("packing", [False, True])
def test_the_first_token_of_a_document_is_no_target_where_documents_do_not_see_each_other(
    corpus: Path, tmp_path: Path, packing: bool
) -> None:
    """What precedes it in its sequence is another document; counts and sources of targets leave it out, too."""
    length = 64 if packing else 24  # packed rows hold several documents
    kinds = [TokenSequences(corpus / "tokens/train", length, masked) for masked in (True, False)]
    masked, open_ = (PackedSequences(data, tmp_path) for data in kinds) if packing else kinds
    starts = set(masked.documents.starts_between(0, int(masked.documents.tokens[-1])).tolist())
    ignored = 0
    for first in range(0, len(masked) - 3, 3):
        indices = np.arange(first, first + 3)
        tokens = masked.batch(indices)
        found, wanted = masked.targets(indices, tokens), open_.targets(indices, tokens)
        is_first = (masked.positions(indices)[:, 1:] == 0) & (wanted[:, :-1] != IGNORE_INDEX)
        assert (found[:, :-1][is_first] == IGNORE_INDEX).all()
        assert (found[:, :-1][~is_first] == wanted[:, :-1][~is_first]).all()
        assert masked.target_count(indices) == int((found != IGNORE_INDEX).sum())
        spans = [span for index in indices for span in masked.target_spans(int(index))]
        assert sum(stop - start for start, stop in spans) == masked.target_count(indices)
        assert not starts & {at for start, stop in spans for at in range(start, stop)}
        if not packing:  # also the last target of a sequence, which begins the next one
            ends = [at in starts for at in ((indices + 1) * 24).tolist()]
            assert (found[:, -1] == IGNORE_INDEX).tolist() == ends
        ignored += int((found != wanted).sum())
    assert ignored > 20


@pytest.fixture
def packed(corpus: Path, tmp_path: Path) -> PackedSequences:
    return PackedSequences(TokenSequences(corpus / "tokens/train", 64), tmp_path)


def test_padding_is_ignored_and_not_counted(packed: PackedSequences) -> None:
    for dp in (1, 2):
        ranks = [Batches(packed, BatchSplit(dp, 1, 8 // dp), rank, 3, mask_documents=True) for rank in range(dp)]
        counts = []
        for step in range(2 * ranks[0].steps_per_epoch):
            batches = [rank.batch(step) for rank in ranks]
            counts.append(sum(int((batch.targets != IGNORE_INDEX).sum()) for batch in batches))
            assert {rank.target_count(step) for rank in ranks} == {counts[-1]}
            assert all((batch.ids >= 0).all() for batch in batches)
        assert 0.8 * 8 * 64 < min(counts) < max(counts) <= 8 * 64  # less where a cut document goes on after another


def test_a_batch_has_the_positions_of_its_sequences(corpus: Path) -> None:
    data = TokenSequences(corpus / "tokens/train", 64)
    batches: Any = Batches(data, BatchSplit(2, 1, 4), 1, 3, mask_documents=True)
    for batch, step in zip(batches.read(2, 3), range(2, 5), strict=True):
        assert (batch.positions == data.positions(batches.indices(step))).all()
        after_end = np.flatnonzero((batch.ids[:, :-1] == 2).numpy())  # the end-of-document of these shards
        assert (batch.positions[:, 1:].flatten()[after_end] == 0).all() and len(after_end)
    assert Batches(data, BatchSplit(2, 1, 4), 1, 3).batch(0).positions is None
