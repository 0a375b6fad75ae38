from pathlib import Path

import numpy as np
import pytest
from torch.utils.data.distributed import DistributedSampler

from gristmill.errors import UsageError
from tests.training.data.conftest import OpenSequences
from training.data.batch_schedule import BatchSplit
from training.data.batches import Batches
from training.data.data_config import DataConfig, OrderKind
from training.experimental.parallel_config import ParallelConfig


@pytest.mark.parametrize("sequences", [24, 29])
def test_any_number_of_ranks_reads_the_same_global_batches_and_each_sequence_once_per_epoch(
    open_sequences: OpenSequences, sequences: int
) -> None:
    data = open_sequences(sequences * 2 + 1, 2, [13])
    seen = {}
    for dp_size in (1, 2, 3):
        split = BatchSplit(dp_size, 1, 6 // dp_size)
        batches = [Batches(data, split, dp_rank, seed=4) for dp_rank in range(dp_size)]
        seen[dp_size] = [sorted(int(i) for b in batches for i in b.indices(step)) for step in range(12)]
    assert seen[1] == seen[2] == seen[3]
    epochs = [[i for batch in seen[1][e * 4 : e * 4 + 4] for i in batch] for e in range(3)]
    assert all(len(set(epoch)) == 24 for epoch in epochs)
    assert seen[1][0] != seen[1][4]  # another permutation
    assert set(range(sequences)) == set().union(*epochs)  # a sequence left out of one epoch is in another


def test_a_batch_does_not_depend_on_earlier_reads(open_sequences: OpenSequences) -> None:
    data, split = open_sequences(101, 5), BatchSplit(1, 2, 2)
    batches = Batches(data, split, 0, seed=1)
    indices = [batches.indices(step).tolist() for step in range(11)]
    assert Batches(data, split, 0, seed=1).indices(10).tolist() == indices[10]
    assert Batches(data, split, 0, seed=2).indices(10).tolist() != indices[10]


@pytest.mark.parametrize("order", ["keyed", "randperm"])
def test_steps_that_are_read_together_are_those_read_one_by_one(
    open_sequences: OpenSequences, order: OrderKind
) -> None:
    batches = Batches(open_sequences(101, 5), BatchSplit(2, 1, 3), 1, seed=1, order=order)  # three steps an epoch
    singly = [batches.indices(step).tolist() for step in range(11)]
    assert batches.indices(2, 8).tolist() == [index for step in singly[2:10] for index in step]


def test_targets_are_inputs_shifted_by_one(open_sequences: OpenSequences) -> None:
    data = open_sequences(101, 5, [50])
    split = BatchSplit.of(DataConfig(Path(), Path(), batch_size=8), ParallelConfig(dp=2, micro_batches=2))
    assert (split.grad_accum_steps, split.micro_batch_size, split.batch_size) == (2, 2, 8)
    batch = Batches(data, split, 1, seed=1).batch(0)
    assert batch.ids.shape == batch.targets.shape == (4, 5) and (batch.targets == batch.ids + 1).all()


def test_sample_numbers_are_unique_and_do_not_depend_on_the_number_of_ranks(open_sequences: OpenSequences) -> None:
    data = open_sequences(101, 5)
    seen = []
    for dp_size in (1, 2, 4):
        split = BatchSplit(dp_size, 1, 8 // dp_size)
        ranks = [Batches(data, split, dp_rank, seed=3_000_000_000) for dp_rank in range(dp_size)]
        batches = [rank.batch(step) for step in range(4) for rank in ranks]
        seen.append(
            {int(n): ids.tolist() for batch in batches for n, ids in zip(batch.sample_ids, batch.ids, strict=True)}
        )
    assert seen[0] == seen[1] == seen[2] and len(seen[0]) == 32


@pytest.mark.parametrize(("dp", "micro_batches", "advice"), [(3, 1, 12), (2, 3, 12), (4, 1, 12)])
def test_an_indivisible_batch_is_an_error_that_suggests_a_divisible_one(
    dp: int, micro_batches: int, advice: int
) -> None:
    with pytest.raises(UsageError, match=f"--data.batch_size {advice}"):
        BatchSplit.of(DataConfig(Path(), Path(), batch_size=10), ParallelConfig(dp=dp, micro_batches=micro_batches))


def test_rows_of_a_grid_divide_the_batch_too() -> None:
    grid = ParallelConfig(dp=2, micro_batches=2, tp=8, tensor="2.5d", depth=2)
    with pytest.raises(
        UsageError, match=r"micro_batches 2 x 4 rows of tp 8 \(2.5d, 2 x 2 x 2\); try --data.batch_size 32"
    ):
        BatchSplit.of(DataConfig(Path(), Path(), batch_size=20), grid)
    assert BatchSplit.of(DataConfig(Path(), Path(), batch_size=32), grid).micro_batch_size == 8


def test_less_than_one_batch_is_an_error(open_sequences: OpenSequences) -> None:
    with pytest.raises(UsageError, match=r"5 sequences.*--data.batch_size 4"):
        Batches(open_sequences(26, 5), BatchSplit(2, 1, 4), 0, seed=1)


@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_the_order_before_keyed_ones_is_that_of_torchs_sampler(open_sequences: OpenSequences, dp_size: int) -> None:
    data = open_sequences(157, 4)
    for dp_rank in range(dp_size):
        sampler = DistributedSampler(data, dp_size, dp_rank, shuffle=True, seed=7, drop_last=True)
        batches = Batches(data, BatchSplit(dp_size, 1, 2), dp_rank, 7, "randperm")
        for epoch in range(2):
            sampler.set_epoch(epoch)
            first = epoch * batches.steps_per_epoch
            found = np.concatenate([batches.indices(first + step) for step in range(batches.steps_per_epoch)])
            assert found.tolist() == list(sampler)[: len(found)]


def test_the_batch_that_is_advised_divides_into_micro_batches(open_sequences: OpenSequences) -> None:
    data = open_sequences(13, 2, [])
    for sizes, advised in (((1, 4, 2), "try --data.batch_size 4, a lower"), ((1, 8, 1), "try a lower --data.seq_len")):
        with pytest.raises(UsageError, match=advised):
            Batches(data, BatchSplit(*sizes), 0, 1)
