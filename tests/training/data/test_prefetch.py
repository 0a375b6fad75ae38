import pytest
import torch

from tests.training.data.conftest import OpenSequences
from training.data.batch_schedule import BatchSplit
from training.data.batches import Batches, PrefetchLoader


def test_prefetched_batches_are_the_same_in_any_order(open_sequences: OpenSequences) -> None:
    batches = Batches(open_sequences(101, 5), BatchSplit(1, 1, 8), 0, seed=3)
    loader = PrefetchLoader(batches, torch.device("cpu"))
    for step in (0, 1, 2, 7, 8, 3, *range(4, 40)):
        found, expected = loader.batch(step), batches.batch(step)
        assert torch.equal(found.ids, expected.ids) and torch.equal(found.targets, expected.targets)
        assert torch.equal(found.sample_ids, expected.sample_ids)
    loader.close()


@pytest.mark.parametrize(("limit", "steps"), [(1 << 20, 16), (200, 5), (39, 1)])
def test_a_read_is_limited_in_tokens(
    open_sequences: OpenSequences, monkeypatch: pytest.MonkeyPatch, limit: int, steps: int
) -> None:
    monkeypatch.setattr("training.data.batches._MAX_READ_TOKENS", limit)
    batches = Batches(open_sequences(101, 5), BatchSplit(1, 2, 4), 0, seed=3)
    assert PrefetchLoader(batches, torch.device("cpu")).steps_per_read == steps
