"""Masked token shards: targets are those of the masks, in packed rows of which each has one, and in evaluation."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gristmill.errors import InputError, UsageError
from gristmill.io.token_masks import MaskRecord, write_mask, write_masks
from tests.training.conftest import write_shards
from training.checkpoint.checkpoint_config import CheckpointConfig
from training.config import TrainConfig
from training.data.packing import PackedSequences
from training.data.sequences import TokenSequences
from training.kernels.cross_entropy import IGNORE_INDEX
from training.train import train

LENGTH = 24


def write_masked(folder: Path, seed: int = 1, vocabulary: int = 300) -> tuple[list[list[int]], list[list[bool]]]:
    """Two shards of documents of which runs of tokens are targets; some documents are longer than a row."""
    chosen = random.Random(seed)
    documents = []
    masks = []
    for number in range(60):
        length = chosen.randrange(2, 40) if number % 10 else 90
        documents.append([chosen.randrange(3, vocabulary) for _ in range(length)])
        mask: list[bool] = []
        while len(mask) < length:
            mask += [bool(len(mask)) and chosen.random() < 0.4] * chosen.randrange(1, 20)
        mask = mask[:length]
        mask[-1] = mask[-1] or not any(mask)
        masks.append(mask)
    write_shards(folder, [documents[:25], documents[25:]], None, vocabulary)
    records: dict[str, MaskRecord] = {}
    for number, part in enumerate((masks[:25], masks[25:])):
        name = f"shard-{number:05d}"
        records[name] = write_mask(folder / name, np.array([value for mask in part for value in mask], bool))
    write_masks(folder, records)
    return documents, masks


@pytest.mark.parametrize("ignores_firsts", [False, True])
def test_packed_rows_have_the_targets_of_the_masks_and_each_has_one(tmp_path: Path, ignores_firsts: bool) -> None:
    documents, masks = write_masked(tmp_path / "tokens")
    packed = PackedSequences(TokenSequences(tmp_path / "tokens", LENGTH, ignores_firsts), tmp_path)
    indices = np.arange(len(packed))
    tokens = packed.batch(indices)
    targets = packed.targets(indices, tokens)
    counts = (targets != IGNORE_INDEX).sum(1)
    assert counts.min() > 0 and packed.target_count(indices) == counts.sum()
    flat = [token for ids in documents for token in ids]
    is_target = [value for mask in masks for value in mask]
    firsts = np.cumsum([0] + [len(ids) for ids in documents]).tolist()
    expected = {place for place, value in enumerate(is_target) if value and place not in firsts}
    found: list[int] = []
    for index in indices.tolist():
        spans = packed.target_spans(index)
        places = [place for start, stop in spans for place in range(start, stop)]
        assert [flat[place] for place in places] == targets[index][targets[index] != IGNORE_INDEX].tolist()
        found += places
    assert sorted(found) == sorted(expected)  # each target once an epoch


def test_windows_of_a_holdout_have_the_targets_of_the_masks(tmp_path: Path) -> None:
    documents, masks = write_masked(tmp_path / "tokens")
    windows = TokenSequences(tmp_path / "tokens", LENGTH)
    indices = np.arange(len(windows))
    targets = windows.targets(indices, windows.batch(indices))
    is_target = np.array([value for mask in masks for value in mask])[1 : len(windows) * LENGTH + 1]
    assert np.array_equal((targets != IGNORE_INDEX).numpy().reshape(-1), is_target)
    assert windows.target_count(indices) == is_target.sum() and documents
    spans = [span for index in indices.tolist() for span in windows.target_spans(index)]
    assert sum(stop - start for start, stop in spans) == is_target.sum()


def masked_run(config: TrainConfig, tokens: Path) -> TrainConfig:
    data = replace(config.data, train=tokens, holdout=tokens, packing="best-fit", mask_documents=True, seq_len=LENGTH)
    saving = CheckpointConfig(every=4)
    return replace(config, data=data, eval=replace(config.eval, sample_tokens=0), checkpoint=saving)


def test_a_run_learns_the_targets_alone_and_resumes_with_the_same_masks(config: TrainConfig, tmp_path: Path) -> None:
    write_masked(tmp_path / "tokens")
    run = masked_run(config, tmp_path / "tokens")
    whole = train(run)
    part = replace(run, out_dir=tmp_path / "part")
    train(replace(part, optim=replace(run.optim, steps=8, decay_steps=12)))
    assert train(replace(part, optim=replace(run.optim, decay_steps=12))).holdout_loss == whole.holdout_loss
    record = json.loads((tmp_path / "tokens/masks.json").read_text())
    folder = tmp_path / "tokens"
    path = folder / "shard-00000.mask"
    mask = np.fromfile(path, np.uint8).astype(bool)
    records = {name: MaskRecord(**each) for name, each in record.items()}
    write_masks(folder, records | {"shard-00000": write_mask(folder / "shard-00000", ~mask)})
    with pytest.raises(UsageError, match="were written anew since"):
        train(replace(part, optim=replace(run.optim, decay_steps=12)))


def test_what_is_no_target_has_no_gradient(config: TrainConfig, tmp_path: Path) -> None:
    """Weights are the same whatever the ids are that are no targets and that no target sees."""
    tokens = tmp_path / "tokens"
    documents, masks = write_masked(tmp_path / "tokens")
    run = masked_run(config, tokens)
    first = train(run).holdout_loss
    for ids, mask in zip(documents, masks, strict=True):
        last = max(place for place, value in enumerate(mask) if value)
        for place in range(last + 1, len(ids)):
            ids[place] = 3 + (ids[place] + 1) % 250
    write_shards(tokens, [documents[:25], documents[25:]], None, 300)
    second = train(replace(run, out_dir=tmp_path / "other")).holdout_loss
    assert first == second


def test_masks_that_do_not_fit_are_refused(config: TrainConfig, tmp_path: Path) -> None:
    folder = tmp_path / "tokens"
    write_masked(folder)
    windows = replace(masked_run(config, folder).data, packing="windows")
    with pytest.raises(UsageError, match=r"has masks, such as of chats, .* try --data\.packing best-fit"):
        train(replace(config, data=windows))
    data = TokenSequences(folder, LENGTH)
    content = (folder / "shard-00001.mask").read_bytes()
    (folder / "shard-00001.mask").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(InputError, match=r"shard-00001\.mask is damaged"):
        data.verify(data.manifest.shards[1])
    (folder / "shard-00001.mask").write_bytes(content[:-1])
    with pytest.raises(InputError, match=r"shard-00001\.mask is missing or damaged"):
        TokenSequences(folder, LENGTH)
    assert torch.is_tensor(data.batch([0]))
