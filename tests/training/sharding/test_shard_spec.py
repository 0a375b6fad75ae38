import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from training.sharding.shard_spec import ShardSpec, assemble_shards, shard_range

CPU = torch.device("cpu")
SHAPES = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)


@given(st.integers(0, 60), st.integers(1, 9))
def test_ranges_are_consecutive_and_equal_torch_chunk(length: int, parts: int) -> None:
    ranges = [shard_range(length, parts, index) for index in range(parts)]
    assert ranges[0][0] == 0 and ranges[-1][1] == length
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
    chunks = [list(range(*r)) for r in ranges if r[0] < r[1]]
    assert chunks == [c.tolist() for c in torch.arange(length).chunk(parts) if len(c)]


@st.composite
def divided(draw: st.DrawFn) -> tuple[tuple[int, ...], list[ShardSpec]]:
    """A shape, and shards of it, split along several dimensions in turn."""
    shape = draw(SHAPES)
    specs = [ShardSpec.whole(shape)]
    for _ in range(draw(st.integers(0, 2))):
        dim, parts = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 4))
        specs = [spec.shard(dim, parts, index) for spec in specs for index in range(parts)]
    return shape, specs


@given(divided())
def test_shards_slice_index_and_assemble_the_global_tensor(case: tuple[tuple[int, ...], list[ShardSpec]]) -> None:
    shape, specs = case
    whole = torch.arange(math.prod(shape)).view(shape)
    assert sum(p.numel for p in specs) == whole.numel()  # nothing twice
    assert torch.equal(assemble_shards({p: whole[p.slices] for p in specs}), whole)
    for p in specs:
        assert whole[p.slices].shape == p.size
        assert torch.equal(p.indices(0, p.numel, CPU), whole[p.slices].flatten())
        if p.numel > 1:
            assert torch.equal(p.indices(1, p.numel - 1, CPU), whole[p.slices].flatten()[1:-1])
        left = {q: whole[q.slices] for q in specs if q != p}
        if p.numel and left:
            with pytest.raises(AssertionError, match=f"{p.numel} elements of"):
                assemble_shards(left)


def test_a_shard_of_a_shard_is_a_shard_of_the_global_tensor() -> None:
    rows = ShardSpec.whole((10, 6)).shard(0, 4, 1)
    assert (rows.offset, rows.size) == ((3, 0), (3, 6))
    inner = rows.shard(1, 2, 1).shard(0, 2, 1)
    assert (inner.offset, inner.size, inner.global_shape) == ((5, 3), (1, 3), (10, 6))
    assert ShardSpec.whole((3,)).shard(0, 4, 3).numel == 0
