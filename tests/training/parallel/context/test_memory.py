"""A rank keeps its share of the activations, and nothing that grows with the square of the length."""

import pytest

from benchmarks.bench_context import measured, small_model
from training.distributed.rank_pool import RankPool
from training.experimental.parallel_config import ParallelConfig

ONE, RING = ParallelConfig(), ParallelConfig(cp=4)


def kept(ranks: RankPool, layout: ParallelConfig, seq_len: int) -> int:
    return measured(ranks, small_model(seq_len, layers=1), layout, seq_len).kept


@pytest.mark.parametrize("context", ["ring", "ulysses"])
def test_four_ranks_keep_a_quarter_each(rank_pool: RankPool, context: str) -> None:
    layout = ParallelConfig(cp=4, context=context)  # type: ignore[arg-type]
    assert kept(rank_pool, layout, 1024) == pytest.approx(kept(rank_pool, ONE, 1024) / 4, rel=0.1)


def test_a_ring_keeps_twice_as_much_of_twice_the_tokens(rank_pool: RankPool) -> None:
    assert kept(rank_pool, RING, 2048) == pytest.approx(2 * kept(rank_pool, RING, 1024), rel=0.05)
