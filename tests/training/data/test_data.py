from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data.distributed import DistributedSampler

from gristmill.errors import UsageError
from training.data.batches import Ahead, Batches, BatchSplit, DataConfig, TokenSequences
from training.distributed.layout import ParallelConfig

Shards = Callable[..., Path]


def counting(shards: Shards, folder: Path, tokens: int, borders: list[int]) -> Path:
    """Shards whose token at position i is i, cut at `borders`."""
    parts = np.split(np.arange(tokens), borders)
    return shards(folder, [[part.tolist()] if len(part) else [] for part in parts], vocabulary=tokens)


def test_sequences_are_windows_over_all_shards_end_to_end(shards: Shards, tmp_path: Path) -> None:
    data = TokenSequences(counting(shards, tmp_path, 101, [7, 7, 33, 34, 90]), 10)  # one of them empty
    assert len(data) == 10
    for i in range(10):
        assert data[i].tolist() == list(range(10 * i, 10 * i + 11))
    assert data.batch([9, 0]).shape == (2, 11) and data.batch([9, 0])[0, 0] == 90


@pytest.mark.parametrize(("tokens", "length", "sequences"), [(21, 10, 2), (20, 10, 1), (11, 10, 1)])
def test_the_last_target_needs_a_token_too(
    shards: Shards, tmp_path: Path, tokens: int, length: int, sequences: int
) -> None:
    assert len(TokenSequences(counting(shards, tmp_path, tokens, []), length)) == sequences


def test_less_than_one_sequence_is_an_error(shards: Shards, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"10 tokens.*needs 11.*--data.seq_len"):
        TokenSequences(counting(shards, tmp_path, 10, []), 10)


def test_no_manifest_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="tokenize_corpus"):
        TokenSequences(tmp_path, 10)


@pytest.mark.parametrize("sequences", [24, 29])
def test_every_number_of_ranks_sees_the_same_global_batches_and_each_sequence_once_an_epoch(
    shards: Shards, tmp_path: Path, sequences: int
) -> None:
    data = TokenSequences(counting(shards, tmp_path, sequences * 2 + 1, [13]), 2)
    seen = {}
    for ranks in (1, 2, 3):
        split = BatchSplit.of(DataConfig(tmp_path, tmp_path, batch_size=6), ParallelConfig(dp=ranks, micro_batches=1))
        batches = [Batches(data, split, rank, seed=4) for rank in range(ranks)]
        seen[ranks] = [sorted(int(i) for b in batches for i in b.indices(step)) for step in range(12)]
    assert seen[1] == seen[2] == seen[3]
    epochs = [[i for batch in seen[1][e * 4 : e * 4 + 4] for i in batch] for e in range(3)]
    assert all(len(set(epoch)) == 24 for epoch in epochs)
    assert seen[1][0] != seen[1][4]  # shuffled anew
    assert set(range(sequences)) == set().union(*epochs)  # who sat one epoch out is in another


def test_a_step_s_batch_does_not_depend_on_what_was_read_before(shards: Shards, tmp_path: Path) -> None:
    data = TokenSequences(counting(shards, tmp_path, 101, []), 5)
    split = BatchSplit.of(DataConfig(tmp_path, tmp_path, batch_size=4), ParallelConfig(dp=1, micro_batches=2))
    through = Batches(data, split, 0, seed=1)
    ahead = [through.indices(step).tolist() for step in range(11)]
    assert Batches(data, split, 0, seed=1).indices(10).tolist() == ahead[10]
    assert Batches(data, split, 0, seed=2).indices(10).tolist() != ahead[10]


def test_micro_batches_are_inputs_and_the_same_shifted_by_one(shards: Shards, tmp_path: Path) -> None:
    data = TokenSequences(counting(shards, tmp_path, 101, [50]), 5)
    split = BatchSplit.of(DataConfig(tmp_path, tmp_path, batch_size=8), ParallelConfig(dp=2, micro_batches=2))
    assert (split.rounds, split.micro, split.batch_size) == (2, 2, 8)
    batch = Batches(data, split, 1, seed=1).step(0)
    assert batch.ids.shape == batch.targets.shape == (4, 5) and (batch.targets == batch.ids + 1).all()


def test_a_sequence_has_the_same_number_in_whichever_replica_and_no_other_has_it(
    shards: Shards, tmp_path: Path
) -> None:
    data = TokenSequences(counting(shards, tmp_path, 101, []), 5)
    seen = []
    for dp in (1, 2, 4):
        split = BatchSplit.of(DataConfig(tmp_path, tmp_path, batch_size=8), ParallelConfig(dp=dp, micro_batches=1))
        replicas = [Batches(data, split, replica, seed=3_000_000_000) for replica in range(dp)]
        batches = [replica.step(step) for step in range(4) for replica in replicas]
        seen.append(
            {int(n): ids.tolist() for batch in batches for n, ids in zip(batch.samples, batch.ids, strict=True)}
        )
    assert seen[0] == seen[1] == seen[2] and len(seen[0]) == 32


def test_reading_ahead_gives_the_same_batches_in_whatever_order_they_are_asked_for(
    shards: Shards, tmp_path: Path
) -> None:
    data = TokenSequences(counting(shards, tmp_path, 101, []), 5)
    split = BatchSplit.of(DataConfig(tmp_path, tmp_path, batch_size=8), ParallelConfig(dp=1, micro_batches=1))
    plain, ahead = Batches(data, split, 0, seed=3), Ahead(Batches(data, split, 0, seed=3), torch.device("cpu"))
    for step in (0, 1, 2, 7, 8, 3, *range(4, 40)):
        read, wanted = ahead.step(step), plain.step(step)
        assert torch.equal(read.ids, wanted.ids) and torch.equal(read.targets, wanted.targets)
        assert torch.equal(read.samples, wanted.samples)
    ahead.close()


@pytest.mark.parametrize(("most", "count"), [(1 << 20, 16), (200, 5), (39, 1)])
def test_what_is_read_ahead_is_bounded_in_tokens(
    shards: Shards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, count: int
) -> None:
    monkeypatch.setattr("training.data.batches._TOKENS_AHEAD", most)
    data = TokenSequences(counting(shards, tmp_path, 101, []), 5)
    assert Ahead(Batches(data, BatchSplit(1, 2, 4), 0, seed=3), torch.device("cpu")).count == count


@pytest.mark.parametrize(("dp", "rounds", "advice"), [(3, 1, 12), (2, 3, 12), (4, 1, 12)])
def test_a_batch_that_does_not_divide_is_an_error_that_names_one_that_does(dp: int, rounds: int, advice: int) -> None:
    with pytest.raises(UsageError, match=f"--data.batch_size {advice}"):
        BatchSplit.of(DataConfig(Path(), Path(), batch_size=10), ParallelConfig(dp=dp, micro_batches=rounds))


def test_less_than_one_batch_is_an_error(shards: Shards, tmp_path: Path) -> None:
    data = TokenSequences(counting(shards, tmp_path, 26, []), 5)
    split = BatchSplit.of(DataConfig(tmp_path, tmp_path, batch_size=8), ParallelConfig(dp=2, micro_batches=1))
    with pytest.raises(UsageError, match=r"5 sequences.*--data.batch_size 4"):
        Batches(data, split, 0, seed=1)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_the_order_is_that_of_torchs_sampler(shards: Shards, tmp_path: Path, replicas: int) -> None:
    data = TokenSequences(counting(shards, tmp_path, 157, []), 4)
    for replica in range(replicas):
        sampler = DistributedSampler(data, replicas, replica, shuffle=True, seed=7, drop_last=True)
        batches = Batches(data, BatchSplit(replicas, 1, 2), replica, 7)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            first = epoch * batches.steps_per_epoch
            found = np.concatenate([batches.indices(first + step) for step in range(batches.steps_per_epoch)])
            assert found.tolist() == list(sampler)[: len(found)]
