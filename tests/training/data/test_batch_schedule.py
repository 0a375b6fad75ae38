"""Batch sizes that change: the batches of a run are parts of one order, without a repeat or a gap."""

from pathlib import Path

import numpy as np
import pytest

from gristmill.errors import UsageError
from tests.training.data.conftest import OpenSequences
from training.data.batch_schedule import BatchSchedule, BatchSplit
from training.data.batches import Batches
from training.data.data_config import DataConfig
from training.data.mix import MixedSequences, MixOrder


@pytest.mark.parametrize("epoch", [0, 29, 101])
def test_one_size_reads_epochs_of_whole_batches(epoch: int) -> None:
    schedule, size = BatchSchedule([(0, 6)], epoch), 6
    for step in range(60):
        per_epoch = epoch // size or 1000
        assert schedule.place(step) == step // per_epoch * epoch + step % per_epoch * size
        assert schedule.read(step) == step * size and schedule.size(step) == size


def test_sizes_that_change_read_every_sequence_once_an_epoch_but_for_less_than_a_batch_at_its_end() -> None:
    generator = np.random.default_rng(5)
    for _ in range(200):
        epoch = int(generator.integers(8, 60))
        steps = np.cumsum(generator.integers(1, 12, 6)).tolist()
        sizes = [(step, int(generator.integers(1, 9))) for step in [0, *steps]]
        schedule, end, read = BatchSchedule(sizes, epoch), 0, 0
        for step in range(80):
            assert schedule.read(step) == read
            start, size = schedule.place(step), schedule.size(step)
            assert size == [size for first, size in sizes if first <= step][-1]
            if start != end:  # what is left out is the end of an epoch, too short for this batch
                assert start % epoch == 0 and start - end < size
            assert start // epoch == (start + size - 1) // epoch
            end, read = start + size, read + size
        for step in range(1, 80, 7):  # what a checkpoint keeps of the steps before it is enough to continue
            again = BatchSchedule.plan(schedule.until(step), step, [], 5, epoch)
            assert [again.place(s) for s in range(step)] == [schedule.place(s) for s in range(step)]
            assert again.size(step) == 5 and again.read(step) == schedule.read(step)


def test_a_ramp_by_tokens_is_the_same_from_any_step_of_it() -> None:
    ramp = [(4, 20), (8, 53)]  # in sequences
    schedule = BatchSchedule.plan([], 0, ramp, 16, 0)
    assert schedule.describe() == "sequences per step: 4 until step 5, 8 until step 10, then 16"
    assert [schedule.size(step) for step in range(12)] == [4] * 5 + [8] * 5 + [16] * 2
    for step in range(14):
        again = BatchSchedule.plan(schedule.until(step), step, ramp, 16, 0)
        assert again.until(99) == schedule.until(99)


@pytest.mark.parametrize("mixed", [False, True])
def test_ranks_of_any_number_read_the_batches_of_a_ramp(open_sequences: OpenSequences, mixed: bool) -> None:
    config = DataConfig(Path(), Path(), seq_len=5, batch_size=12, batch_ramp=("4:60", "8:150"))
    whole_set = open_sequences(1001, 5, [13])
    parts = [whole_set, whole_set][: 1 + mixed]
    data = MixedSequences(parts) if mixed else parts[0]
    mix = MixOrder([len(part) for part in parts], [2, 1], 3) if mixed else None
    found: dict[int, list[list[int]]] = {}
    for dp in (1, 2, 4):
        ranks = [Batches(data, BatchSplit(dp, 1, 12 // dp), rank, 4, mix=mix) for rank in range(dp)]
        for rank in ranks:
            rank.plan_sizes(config)
        found[dp] = [sorted(int(i) for r in ranks for i in r.indices(step)) for step in range(20)]
        singly = [rank.batch(step) for rank in ranks for step in range(9)]
        together = [batch for rank in ranks for batch in rank.read(0, 9)]
        ids = [batch.sample_ids.tolist() for batch in singly]
        assert ids == [batch.sample_ids.tolist() for batch in together]
        assert all(one.ids.equal(other.ids) for one, other in zip(singly, together, strict=True))
        assert len({i for batch in ids for i in batch}) == sum(map(len, ids)) == ranks[0].schedule.read(9)
    assert found[1] == found[2] == found[4]
    assert [len(batch) for batch in found[1]] == [4] * 3 + [8] * 3 + [12] * 14
    read = sorted(i for batch in found[1][:16] for i in batch)
    whole = Batches(data, BatchSplit(1, 1, len(read)), 0, 4, mix=mix)  # one batch of all
    assert read == sorted(whole.indices(0).tolist()) and len(read) == 156


@pytest.mark.parametrize("ramp", [("8",), ("8:0x",), ("0:10",), ("8:20", "16:20"), ("8:20", "16:10")])
def test_a_ramp_that_is_none_is_refused(ramp: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="expected SIZE:TOKENS, at growing numbers of tokens; try"):
        DataConfig(Path(), Path(), batch_ramp=ramp).check()
